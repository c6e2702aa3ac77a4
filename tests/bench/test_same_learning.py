"""Loss and accuracy of one Keras process and of a host with five nodes: same model, data and global batch.

    make bench ARGS="-k same_learning"

Fashion-MNIST and the demo's network on an emulated fleet, three seeds. Both begin with the same weights; the
order of samples is each one's own. Prints figures and judges nothing.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from csdctl.job.model import load_job
from csdctl.workflows.demo import write_demo_files

CSDCTL = Path(sys.prefix) / "bin" / "csdctl"
SEEDS = (1, 2, 3)
EPOCHS = 6
HOST_BATCH, NODE_BATCH, NUM_NODES = 200, 24, 5
RATE, REFERENCE = 0.01, 128
KERAS = """
import json, sys
import numpy as np
import keras
sys.path.insert(0, ".")
from fashion_cnn import build
seed, epochs, batch, rate = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
keras.utils.set_random_seed(seed)
model = build()
load = lambda name: (np.load(f"{name}/images.npy") / np.float32(255), np.load(f"{name}/labels.npy"))
images, labels = load("data/public")
validation = load("data/validation")
if images.ndim == 3:
    images, validation = images[..., None], (validation[0][..., None], validation[1])
sgd = keras.optimizers.SGD(rate, momentum=0.9)
model.compile(sgd, "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images, labels, batch_size=batch, epochs=epochs, verbose=0)
loss, accuracy = model.evaluate(*validation, batch_size=500, verbose=0)
print(json.dumps({"loss": loss, "accuracy": accuracy}))
"""


def csdctl(directory: Path, *arguments: str) -> list[Any]:
    """What the command wrote as JSON lines."""
    done = subprocess.run(
        [str(CSDCTL), *arguments, "--json"], cwd=directory, stdout=subprocess.PIPE, text=True, check=True
    )
    return [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{") and line.endswith("}")
    ]


@pytest.fixture
def fleet_directory(tmp_path: Path) -> Iterator[Path]:
    write_demo_files(tmp_path)
    csdctl(tmp_path, "emulate", "up", "--nodes", str(NUM_NODES), "--cpu", "0.15")
    yield tmp_path
    csdctl(tmp_path, "emulate", "down")


def write_job(directory: Path, seed: int) -> None:
    """The demo's job without private data, so that one process can read all of it; and its plan."""
    job = yaml.load((directory / "job.yaml").read_text(), yaml.BaseLoader)  # `on` is a word here
    job["data"].pop("private", None)
    job["recipe"] |= {"epochs": EPOCHS, "seed": seed, "learning_rate": RATE, "reference_batch": REFERENCE}
    job["recipe"]["warmup_epochs"] = 0
    (directory / "same.yaml").write_text(yaml.safe_dump(job).replace("'", ""))
    ranks = [{"node": "host", "batch_size": HOST_BATCH, "threads": 2}]
    ranks += [{"node": f"csd{n}", "batch_size": NODE_BATCH, "threads": 1} for n in range(NUM_NODES)]
    fingerprint = load_job(directory / "same.yaml").fingerprint()
    plan = {"job": "same", "job_fingerprint": fingerprint, "method": "by hand", "ranks": ranks}
    (directory / "plan.yaml").write_text(yaml.safe_dump(plan))


@pytest.mark.bench
@pytest.mark.timeout(3000)
def test_same_learning_as_one_keras_process(fleet_directory: Path) -> None:
    global_batch = HOST_BATCH + NUM_NODES * NODE_BATCH
    ours, theirs = [], []
    for seed in SEEDS:
        write_job(fleet_directory, seed)
        sample = ["--sample", "fashion-mnist"] if seed == SEEDS[0] else []
        csdctl(fleet_directory, "prepare", "same.yaml", *sample)
        report = csdctl(fleet_directory, "train", "same.yaml", "--plan", "plan.yaml", "--skip-doctor")[-1]
        ours.append((report["validation_loss"], report["validation_accuracy"]))
        arguments = [str(seed), str(EPOCHS), str(global_batch), str(RATE * global_batch / REFERENCE)]
        done = subprocess.run(
            [sys.executable, "-c", KERAS, *arguments],
            cwd=fleet_directory,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        theirs.append((found["loss"], found["accuracy"]))
        print(f"\nseed {seed}: csdctl loss {ours[-1][0]:.4f}, accuracy {ours[-1][1]:.4f}; ", end="")
        print(f"one process loss {theirs[-1][0]:.4f}, accuracy {theirs[-1][1]:.4f}")
    losses = [statistics.mean(one[0] for one in column) for column in (ours, theirs)]
    accuracies = [statistics.mean(one[1] for one in column) for column in (ours, theirs)]
    print(
        f"mean of {len(SEEDS)} seeds, global batch {global_batch}, {EPOCHS} epochs: "
        f"loss {losses[0]:.4f} and {losses[1]:.4f} ({losses[0] / losses[1] - 1:+.2%}), "
        f"accuracy {accuracies[0]:.4f} and {accuracies[1]:.4f} "
        f"({100 * (accuracies[0] - accuracies[1]):+.2f} points)"
    )
