"""Efficiency of steps of 30 and 60 ms: a host and a node with one thread and one core each.

    make bench ARGS="-k short_steps"

The demo's network on an emulated fleet. Efficiency is the throughput over the sum of the ranks' samples by
compute time in the same steps. Prints figures, asserts no limits.
"""

import shutil
import statistics
from pathlib import Path

import yaml

from benchmarks.running import EXAMPLES, csdctl, emulated_fleet, place_sample

ROUNDS, STEPS = 5, 200
BATCH_SIZES = (110, 240)


def test_short_steps(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "fashion_mnist", tmp_path, dirs_exist_ok=True)
    with emulated_fleet(tmp_path, 1, 1.0, host_threads=1):
        place_sample(tmp_path, "fashion-mnist", "--private", "")
        job = yaml.load((tmp_path / "job.yaml").read_text(), yaml.BaseLoader)  # `on` is a string here
        job["data"].pop("private", None)
        (tmp_path / "short.yaml").write_text(yaml.safe_dump(job).replace("'", ""))
        for size in BATCH_SIZES:
            found = []
            for _ in range(ROUNDS):
                options = ("--batch-size", str(size), "--max-steps", str(STEPS), "--skip-doctor")
                report = csdctl(tmp_path, "train", "short.yaml", *options)[-1]
                ranks, steps = report["ranks"], report["steps"]
                apart = sum(size * steps / rank["compute_s"] for rank in ranks)
                found.append(report["samples_per_s"] / apart)
                waits = ", ".join(
                    f"{rank['node']} computes {1000 * rank['compute_s'] / steps:.1f} ms, "
                    f"waits {1000 * rank['wait_s'] / steps:.1f} ms"
                    for rank in ranks
                )
                print(f"\nbatch size {size}: {found[-1]:.3f} of its ranks alone; {waits}", flush=True)
            low, high = min(found), max(found)
            print(f"batch size {size}: median {statistics.median(found):.3f} ({low:.3f} to {high:.3f})")
