"""What trials of batch sizes gain where they are wrong, and cost where they are right.

    make bench ARGS="-k balance"

The demo's network. First a host and a node of an emulated fleet, with a core each and no quota, in steps of
about 20, 60 and 200 ms whose batch sizes are right, or 30% off: efficiency from step 40 on, with and without
trials.
Then a host and three nodes at 22% of a core with the batch sizes of `tune`: seconds of the steps, in pairs of
runs with and without trials. Prints figures, asserts no limits.
"""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks.running import EXAMPLES, csdctl, emulated_fleet, place_sample, write_plan

ROUNDS, PAIRS = 3, 10
BATCH_SIZES = (60, 180, 600)
"""Samples of each of two equal ranks in a step."""
WRONG, NUM_SKIPPED, STEPS = 0.3, 40, 160
QUOTA, QUOTA_STEPS = 0.22, 300
WITHOUT = "--no-rebalance"


def copy_job(directory: Path) -> None:
    """Copy the demo's job without its private data."""
    shutil.copytree(EXAMPLES / "fashion_mnist", directory, dirs_exist_ok=True)
    place_sample(directory, "fashion-mnist", "--private", "")
    job = yaml.load((directory / "job.yaml").read_text(), yaml.BaseLoader)  # `on` is a string here
    job["data"].pop("private", None)
    (directory / "job.yaml").write_text(yaml.safe_dump(job).replace("'", ""))


def train(directory: Path, steps: int, *options: str) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Return the report of a run of plan.yaml, and the Progress events of each rank in order."""
    command = ("train", "job.yaml", "--plan", "plan.yaml", "--max-steps", str(steps), "--skip-doctor")
    report = csdctl(directory, *command, *options)[-1]
    events = [json.loads(line) for line in (directory / report["path"] / "events.jsonl").open()]
    reports = [event for event in events if event["event"] in ("Progress", "EpochEnd")]
    return report, [[event for event in reports if event["rank"] == rank["rank"]] for rank in report["ranks"]]


def efficiency_from(ranks: list[list[dict[str, Any]]], first: int) -> tuple[float, float]:
    """Return efficiency and milliseconds of a step, from the first report after `first` steps on."""
    late = [
        [event for event in events if event["event"] == "Progress" and total_step(events, event) > first]
        for events in ranks
    ]
    totals = [
        {
            name: sum(event[name] for event in events)
            for name in ("steps", "samples", "compute_s", "wait_s", "global_samples")
        }
        for events in late
    ]
    step_s = (totals[0]["compute_s"] + totals[0]["wait_s"]) / totals[0]["steps"]
    rate = totals[0]["global_samples"] / totals[0]["steps"] / step_s
    apart = sum(its["samples"] / its["compute_s"] for its in totals)
    return rate / apart, 1000 * step_s


def total_step(events: list[dict[str, Any]], event: dict[str, Any]) -> int:
    """Return the number of steps of the run before those of `event`."""
    ended = sum(
        other["steps"] for other in events if other["event"] == "EpochEnd" and other["epoch"] < event["epoch"]
    )
    return int(ended + event["step"] - event["steps"])


def test_balance_of_wrong_batch_sizes(tmp_path: Path) -> None:
    copy_job(tmp_path)
    with emulated_fleet(tmp_path, 1, 1.0, host_threads=1):
        for size in BATCH_SIZES:
            for wrong in (0.0, WRONG, -WRONG):
                host = round(size * (1 + wrong))
                sizes = {"host": host, "csd0": 2 * size - host}
                ranks = [{"node": node, "batch_size": size, "threads": 1} for node, size in sizes.items()]
                write_plan(tmp_path, "job.yaml", ranks)
                for options in ((), (WITHOUT,)) if wrong else ((WITHOUT,),):
                    found = [
                        efficiency_from(train(tmp_path, STEPS, *options)[1], NUM_SKIPPED)
                        for _ in range(ROUNDS)
                    ]
                    efficiency, step_ms = (statistics.median(column) for column in zip(*found, strict=True))
                    print(
                        f"\n{sizes}{' without trials' if options else ''}: {efficiency:.3f} in steps of "
                        f"{step_ms:.0f} ms ({', '.join(f'{value:.3f}' for value, _ in found)})",
                        flush=True,
                    )


def test_balance_with_quotas(tmp_path: Path) -> None:
    copy_job(tmp_path)
    with emulated_fleet(tmp_path, 3, QUOTA, host_threads=1):
        csdctl(tmp_path, "tune", "job.yaml", "--strategy", "data-parallel")
        shutil.copy(tmp_path / ".csdctl" / "plans" / "job.yaml", tmp_path / "plan.yaml")
        ratios = []
        for _ in range(PAIRS):
            with_trials, without = (train(tmp_path, QUOTA_STEPS, *options)[0] for options in ((), (WITHOUT,)))
            ratios.append(without["samples_per_s"] / with_trials["samples_per_s"])
            tried, kept = with_trials["num_tried"], with_trials["num_rebalanced"]
            print(
                f"\ntime with trials over without: {ratios[-1]:.3f}; {tried} tried, {kept} kept", flush=True
            )
        print(f"median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)
