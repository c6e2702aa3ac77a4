"""Forecasts against what was then reached: how many runs lie in their range, errors, widths of the ranges.

    make bench ARGS="-k forecasts"

Three networks on four emulated fleets, one of them behind 100 Mbit/s, each tuned, then trained twice; and
the same with one node of each. Once on a quiet machine, once beside a process that keeps a core busy while
machines are tuned and trained. Prints figures, asserts no limits.
Forecasts of whole trainings by features and split: `-k strategy_choice`.
"""

import math
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.bench_goodput import NORMALIZED
from benchmarks.running import EXAMPLES, csdctl, emulated_fleet, limited_link, place_sample
from csdctl.perfmodel.spread import NORMAL_QUANTILE
from examples.sample_data import fetch_fashion_mnist
from tests.soak.soak import hogs

FLEETS = {
    "1 node": (1, 0.5, 0),
    "3 nodes": (3, 0.25, 0),
    "5 nodes": (5, 0.15, 0),
    "2 nodes, 100 Mbit/s": (2, 0.4, 100),
}
"""Number of nodes, cores of each, and Mbit/s of all their traffic together; 0: not limited."""
DENSE = '''
import keras
from keras import layers


def build():
    """Return a network with few operations for each of its parameters: its sums take long."""
    hidden = [layers.Dense(1024, activation="relu") for _ in range(2)]
    return keras.Sequential(
        [keras.Input((28, 28, 1)), layers.Flatten(), *hidden, layers.Dense(10, activation="softmax")]
    )
'''
MODELS = {"fashion_cnn": "", "normalized": NORMALIZED, "dense": DENSE}
NUM_RUNS = 2
MEASURED_S = 8.0
MIN_STEPS = 20
OPTIONS = ("--strategy", "data-parallel")


def reach(directory: Path, job: str, rate: float, plan: dict[str, Any], *options: str) -> float:
    """Return the samples/s of a run by the plan, of about MEASURED_S of steps."""
    steps = max(MIN_STEPS, round(MEASURED_S * rate / plan["global_batch"]))
    command = ("train", job, "--max-steps", str(steps), "--skip-doctor", *options)
    return float(csdctl(directory, *command)[-1]["samples_per_s"])


def forecasts_of(directory: Path, model: str) -> Iterator[tuple[float, tuple[float, float], float]]:
    """Yield the rate that is forecast, its range, and the rate that is reached."""
    job = f"{model}.yaml"
    has_others = (directory / ".csdctl" / "emulated" / "nodes" / "csd1").exists()
    for limit in ((), ("--limit", "csd0"))[: 1 + has_others]:
        plan = csdctl(directory, "tune", job, *OPTIONS, *limit)[-1]
        predicted = plan["predicted"]
        for _ in range(NUM_RUNS):
            reached = reach(directory, job, predicted["samples_per_s"], plan, *limit)
            yield predicted["samples_per_s"], tuple(predicted["samples_per_s_range"]), reached


@pytest.mark.parametrize("num_busy", [0, 1], ids=["quiet", "busy"])
def test_forecasts(tmp_path: Path, num_busy: int) -> None:
    found = []
    for number, (fleet, (num_nodes, cpu, mbit_per_s)) in enumerate(FLEETS.items()):
        directory = tmp_path / str(number)
        shutil.copytree(EXAMPLES / "fashion_mnist", directory)
        # Behind a limited link there is no other network.
        fetch_fashion_mnist(directory / ".csdctl" / "samples" / "fashion-mnist")
        with limited_link(mbit_per_s), emulated_fleet(directory, num_nodes, cpu), hogs(num_busy):
            csdctl(directory, "discover")
            place_sample(directory, "fashion-mnist", "--private", "")
            for model, code in MODELS.items():
                if code:
                    (directory / f"{model}.py").write_text(code)
                job = yaml.load((directory / "job.yaml").read_text(), yaml.BaseLoader)
                job["data"].pop("private", None)
                job["model"] = f"{model}.py:build"
                (directory / f"{model}.yaml").write_text(yaml.safe_dump(job).replace("'", ""))
                for rate, (low, high), reached in forecasts_of(directory, model):
                    found.append((rate, low, high, reached))
                    where = "in" if low <= reached <= high else "OUTSIDE"
                    told = f"forecast {rate:,.0f} ({low:,.0f} to {high:,.0f}), {where}: {reached:,.0f}"
                    print(f"{fleet}, {model}, {num_busy} busy: {told}", flush=True)
    inside = sum(low <= reached <= high for _, low, high, reached in found)
    error = statistics.median(abs(reached / rate - 1) for rate, *_, reached in found)
    width = statistics.median((high - low) / rate for rate, low, high, _ in found)
    print(f"{inside} of {len(found)} in their range; median error {error:.1%}, median width {width:.0%}")
    differences = [math.log(found[at][3] / found[at + 1][3]) for at in range(0, len(found), NUM_RUNS)]
    deviation = math.sqrt(statistics.fmean(difference**2 for difference in differences) / 2)
    narrowest = 2 * NORMAL_QUANTILE * deviation
    print(f"runs of one plan deviate by {deviation:.1%}: 9 of 10 are in a range of {narrowest:.0%} at best")
