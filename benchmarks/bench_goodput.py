"""The time to a fixed validation loss: `tune --for time-to-accuracy` against a grid of global batches.

    make bench ARGS="-k goodput"

Fashion-MNIST on an emulated fleet of a host and three nodes, with the demo's network and one with batch
normalization. A first run, tuned for throughput, measures the gradient noise scale. Then the chosen global
batch, and six others, train until rank 0 reports the loss. The time is that of the run's steps. Prints
figures, asserts no limits.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.running import EXAMPLES, csdctl, emulated_fleet, place_sample, run_program

GRID = (32, 64, 128, 256, 512, 1024)
NUM_NODES, NODE_CPU = 3, 0.25
NUM_SAMPLES, MAX_EPOCHS = 6000, 60
TARGETS = {"fashion_cnn.py:build": 0.5, "normalized.py:build": 0.6}
"""Validation losses that each of the grid reaches within the epochs."""
NORMALIZED = '''
import keras
from keras import layers


def build():
    """Return a small network with batch normalization."""
    blocks = []
    for filters in (16, 32):
        convolution = layers.Conv2D(filters, 3, strides=2, use_bias=False)
        blocks += [convolution, layers.BatchNormalization(), layers.ReLU()]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((28, 28, 1)), *blocks, *head])
'''
TRAIN = """
import json, sys
import csdctl


def stop_at_target(event):
    if event["event"] == "EpochEnd" and event["rank"] == 0 and event["validation_loss"] <= float(sys.argv[1]):
        return csdctl.STOP


print(json.dumps({"path": str(csdctl.train("goodput.yaml", callbacks=[stop_at_target]).directory.path)}))
"""


@pytest.fixture
def fleet_directory(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(EXAMPLES / "fashion_mnist", tmp_path, dirs_exist_ok=True)
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    with emulated_fleet(tmp_path, NUM_NODES, NODE_CPU):
        place_sample(tmp_path, "fashion-mnist", "--private", "")
        for path in (tmp_path / "data" / "public").glob(
            "*.npy"
        ):  # short epochs: the loss is seen at their ends
            np.save(path, np.load(path)[:NUM_SAMPLES])
        yield tmp_path


def write_job(directory: Path, model: str) -> None:
    job = yaml.load((directory / "job.yaml").read_text(), yaml.BaseLoader)  # `on` is a string here
    job["model"] = model
    job["data"].pop("private", None)
    job["recipe"] |= {"epochs": MAX_EPOCHS, "warmup_epochs": 1, "decay": "none"}
    (directory / "goodput.yaml").write_text(yaml.safe_dump(job).replace("'", ""))


def time_to_loss(directory: Path, model: str) -> tuple[float | None, dict[str, Any]]:
    """Train by the plan; return the seconds until the loss, None: not reached, and the report."""
    path = run_program(TRAIN, TARGETS[model], cwd=directory)["path"]
    report = csdctl(directory, "report", "latest")[-1]
    reached_s, spent_s = None, 0.0
    for line in (Path(path) / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "EpochEnd" and event["rank"] == 0:
            spent_s += event["compute_s"] + event["wait_s"]
            if reached_s is None and event["validation_loss"] <= TARGETS[model]:
                reached_s = spent_s
    return reached_s, report


@pytest.mark.parametrize("model", TARGETS)
def test_goodput(fleet_directory: Path, model: str) -> None:
    write_job(fleet_directory, model)
    csdctl(fleet_directory, "tune", "goodput.yaml", "--strategy", "data-parallel")
    _, first = time_to_loss(fleet_directory, model)
    print(f"\n{model}: gradient noise scale {first['noise_scale']:.0f} samples")
    choices = [("chosen", ("--for", "time-to-accuracy", "--max-global-batch", str(GRID[-1])))]
    choices += [(str(size), ("--global-batch", str(size))) for size in GRID]
    for name, options in choices:
        common = ("--strategy", "data-parallel")
        csdctl(fleet_directory, "tune", "goodput.yaml", *common, *options)
        reached_s, report = time_to_loss(fleet_directory, model)
        size, rate = report["global_batch"], report["samples_per_s"]
        when = "not reached" if reached_s is None else f"{reached_s:.1f} s"
        print(f"{name:>6}: global batch {size}, {rate:,.0f} samples/s, loss {TARGETS[model]} after {when}")
