"""Samples/s of the demo's fleet: tuned batch sizes against an equal batch size, in one invocation.

    make bench ARGS="-k tuned_against_equal"

The peer is the fastest of the equal sizes tried; tuned and equal runs
alternate, because machines are noisy.
"""

import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.running import EXAMPLES, csdctl, emulated_fleet, place_sample

NUM_NODES = 3
ROUNDS = 2
TUNED_STEPS = 80


@pytest.fixture
def fleet_directory(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(EXAMPLES / "fashion_mnist", tmp_path, dirs_exist_ok=True)
    with emulated_fleet(tmp_path, NUM_NODES, 0.25):
        yield tmp_path


def test_tuned_against_equal(fleet_directory: Path) -> None:
    place_sample(fleet_directory, "fashion-mnist")
    csdctl(fleet_directory, "prepare")
    plan = csdctl(fleet_directory, "tune")[0]
    of_node = min(rank["batch_size"] for rank in plan["ranks"])
    same_global = round(plan["global_batch"] / len(plan["ranks"]))
    speeds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, size in (
            ("tuned", 0),
            (f"equal {of_node}", of_node),
            (f"equal {same_global}", same_global),
        ):
            samples = TUNED_STEPS * plan["global_batch"]
            steps = samples // ((size or 0) * len(plan["ranks"])) if size else TUNED_STEPS
            choice = ["--batch-size", str(size)] if size else []
            report = csdctl(fleet_directory, "train", "--max-steps", str(steps), *choice)[-1]
            speeds.setdefault(name, []).append(report["samples_per_s"])
    sizes = ", ".join(f"{rank['node']} {rank['batch_size']}" for rank in plan["ranks"])
    print(f"\nbatch sizes: {sizes}")
    for name, measured in speeds.items():
        runs = ", ".join(f"{speed:,.0f}" for speed in measured)
        print(f"{name:12} {statistics.median(measured):8,.0f} samples/s  (runs: {runs})")
    tuned = statistics.median(speeds.pop("tuned"))
    best = max(statistics.median(measured) for measured in speeds.values())
    print(f"tuned / best equal: {tuned / best:.2f}")
