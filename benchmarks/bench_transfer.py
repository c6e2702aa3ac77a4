"""Transfer learning against learning from scratch, on the pictures of `csdctl demo --transfer`.

    make bench ARGS="-k bench_transfer"

Downloads 150 MB. Each seed has a split of its own, the same for both.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.running import EXAMPLES, csdctl, emulated_fleet, place_sample
from examples.transfer_learning.efficientnet_lite0 import fetch_weights

SEEDS = (7, 8, 9)


def test_transfer_against_from_scratch(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "transfer_learning", tmp_path, dirs_exist_ok=True)
    fetch_weights(tmp_path)
    found: dict[str, list[float]] = {"transfer": [], "scratch": []}
    with emulated_fleet(tmp_path, 3, 0.25):
        for seed in SEEDS:
            for name, job, options in (
                ("transfer", "job.yaml", ("--strategy", "features")),
                ("scratch", "scratch.yaml", ()),
            ):
                file = f"{name}-{seed}.yaml"
                text = (tmp_path / job).read_text().replace("seed: 7", f"seed: {seed}")
                text = text.replace("data/", f"data-{seed}/").replace("~/private", f"~/private-{seed}")
                (tmp_path / file).write_text(text)
                places = ("--data", f"data-{seed}", "--private", f"private-{seed}", "--seed", str(seed))
                place_sample(tmp_path, "openclipart", *places)
                csdctl(tmp_path, "prepare", file)
                lines: list[dict[str, Any]] = csdctl(
                    tmp_path, "train", file, *options, "--batch-size", "16", "--skip-doctor"
                )
                found[name].append(lines[-1]["validation_accuracy"])
                print(f"\n{name}, seed {seed}: {found[name][-1]:.4f}", flush=True)
    for name, accuracies in found.items():
        print(f"{name}: {np.round(accuracies, 4)}, mean {np.mean(accuracies):.4f}")
