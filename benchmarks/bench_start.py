"""The time of `csdctl --help`, against importing the two libraries that it needs."""

import statistics
import subprocess
import sys
import time

from benchmarks.running import CSDCTL

NUM_ROUNDS = 40
IMPORTS = [sys.executable, "-c", "import typer, rich"]


def test_help_against_importing_typer_and_rich() -> None:
    times = [(measure_s([str(CSDCTL), "--help"]), measure_s(IMPORTS)) for _ in range(NUM_ROUNDS)]
    ours_s, theirs_s = (min(column) for column in zip(*times, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in times)
    print(f"\ncsdctl --help {ours_s * 1000:.0f} ms, imports {theirs_s * 1000:.0f} ms (best of {NUM_ROUNDS})")
    print(f"ratio: {ratio:.2f} (median of {NUM_ROUNDS} pairs)")


def measure_s(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started
