"""The report of a long run on 36 nodes: its time and memory, in a process of its own.

The log is that of a recorded real run, its lines repeated for 37 ranks and 100,000 steps.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parents[1] / "tests" / "unit" / "reporting" / "recorded"
NUM_NODES, NUM_STEPS, STEPS_PER_EPOCH = 36, 100_000, 1000
INTERVAL_S = (NUM_NODES + 1) / 20
"""Interval of the reports of a rank (`progress_interval_s`)."""
EVERY_STEP_S = 0.0
STEP_S = 0.1


@pytest.mark.parametrize("interval_s", [INTERVAL_S, EVERY_STEP_S])
def test_report_of_a_long_run(tmp_path: Path, interval_s: float) -> None:
    run = tmp_path / ".csdctl" / "runs" / "20260101-000000-000000"
    run.mkdir(parents=True, mode=0o700)
    nodes = ["host", *(f"csd{number}" for number in range(NUM_NODES))]
    (run / "manifest.json").write_text(json.dumps(wide_manifest(nodes)))
    with (run / "events.jsonl").open("w") as file:
        num_lines = sum(file.write(line) > 0 for line in long_log(nodes, STEP_S, interval_s))
        file.write('{"time":1e9,"event":"Prog')  # cut off
    began = time.monotonic()
    command = [sys.executable, "-m", "csdctl", "report", "--html", "report.html"]
    subprocess.run(command, cwd=tmp_path, check=True)
    took_s, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    size = (run / "events.jsonl").stat().st_size
    print(
        f"\n{num_lines:,} events, {size >> 20} MiB, steps of {STEP_S} s: {took_s:.1f} s, "
        f"{used.ru_utime + used.ru_stime:.1f} s of CPU, {used.ru_maxrss >> 10} MiB; "
        f"HTML of {(tmp_path / 'report.html').stat().st_size >> 10} KiB"
    )


def wide_manifest(nodes: list[str]) -> dict[str, Any]:
    """Return the recorded manifest with the second rank's entries for all nodes."""
    manifest: dict[str, Any] = json.loads((RECORDED / "manifest.json").read_text())
    plan, start = manifest["plan"], 0
    for entries in (plan["ranks"], manifest["placed"]):
        entries[:] = [entries[0], *(dict(entries[1]) for _ in nodes[1:])]
    for rank, node in enumerate(nodes):
        placed = manifest["placed"][rank]
        share = placed["public_stop"] - placed["public_start"]
        plan["ranks"][rank]["node"] = placed["name"] = node
        placed |= {"public_start": start, "public_stop": start + share}
        start += share
    return manifest


def long_log(nodes: list[str], step_s: float, interval_s: float) -> Iterator[str]:
    """Yield the lines of a log."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (RECORDED / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        found.setdefault((event["event"], min(event["rank"], 1)), event)
    per_report = max(1, round(interval_s / step_s))
    for rank, node in enumerate(nodes):
        yield as_line(1e9, found["Ready", min(rank, 1)], rank, node)
    for step in range(per_report, NUM_STEPS + 1, per_report):
        for rank, node in enumerate(nodes):
            time_s = 1e9 + step * step_s
            epoch = {"epoch": 1 + step // STEPS_PER_EPOCH, "wall_s": per_report * step_s}
            yield as_line(time_s, found["Progress", min(rank, 1)] | epoch, rank, node)
            if step // STEPS_PER_EPOCH > (step - per_report) // STEPS_PER_EPOCH:
                wall_s = {"wall_s": STEPS_PER_EPOCH * step_s, "epoch": step // STEPS_PER_EPOCH}
                yield as_line(time_s, found["EpochEnd", min(rank, 1)] | wall_s, rank, node)
    for rank, node in enumerate(nodes[:-1]):  # the last was lost
        yield as_line(1e9 + NUM_STEPS * step_s, found["Finished", min(rank, 1)], rank, node)


def as_line(time_s: float, event: dict[str, Any], rank: int, node: str) -> str:
    """Return a line of a log."""
    return json.dumps({**event, "time": time_s, "rank": rank, "node": node}, separators=(",", ":")) + "\n"
