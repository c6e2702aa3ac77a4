"""Cost of the sandbox for a run: the same fleet with and without, alternating.

    make bench ARGS="-k confinement"

The lab of bench_engine.
"""

import statistics
import sys
import time
from collections.abc import Sequence

import psutil
import pytest

from benchmarks.bench_engine import BATCH_SIZES, NUM_IMAGES, Running, nodes, project, rates, start, stop
from benchmarks.running import CLIENTS, CSDCTL
from benchmarks.slow_nodes import SMALL, write_job
from tests.lab.machines import LabNode
from tests.lab.project import Project

__all__ = ["nodes", "project"]

PROGRAMS = {"confined": (str(CSDCTL),), "unconfined": (sys.executable, str(CLIENTS / "unconfined.py"))}
ROUNDS = 3


def cpu_while_waiting(running: Running, nodes: Sequence[LabNode], frozen: LabNode) -> float:
    """Return the mean share of a core that a rank and its link use while all wait for a frozen node."""
    names = ["host", *(node.name for node in nodes if node != frozen)]
    marks = {f"csdctl-run={running.events_path.parent.name}/{name}" for name in names}
    with frozen.frozen():
        time.sleep(5)
        before_s = cpu_seconds(marks)
        time.sleep(10)
        return (cpu_seconds(marks) - before_s) / 10 / len(names)


def cpu_seconds(marks: set[str]) -> float:
    """Return the CPU time of all processes with one of `marks` among their arguments."""
    total_s = 0.0
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        words, times = process.info["cmdline"] or [""], process.info["cpu_times"]
        if times and marks.intersection(words) and words[0] != "sh":
            total_s += times.user + times.system
    return total_s


@pytest.mark.parametrize(
    ("job", "sizes", "steps"),
    [("small", (320, 64), 300), ("job", BATCH_SIZES, 20)],
    ids=["small", "mobilenet"],
)
def test_confinement(
    project: Project, nodes: list[LabNode], job: str, sizes: tuple[int, int], steps: int
) -> None:
    if job == "small":
        write_job(project, job, SMALL, NUM_IMAGES)
    efficiencies: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    shares: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(ROUNDS):
        order = list(PROGRAMS) if number % 2 == 0 else list(reversed(PROGRAMS))
        for name in order:
            running = start(project, job=f"{job}.yaml", batch_sizes=sizes, program=PROGRAMS[name])
            try:
                running.wait_for_steps(22)
                started = time.time()
                running.wait_for_steps(steps)
                together, apart = rates(running, started, time.time())
                efficiencies[name].append(together / apart)
                shares[name].append(cpu_while_waiting(running, nodes, frozen=nodes[2]))
            finally:
                stop(running)
            print(
                f"\n{job} {name}: {together:.0f} of {apart:.0f} samples/s, {together / apart:.3f}; "
                f"a waiting rank uses {shares[name][-1]:.2%}"
            )
    for name in PROGRAMS:
        print(
            f"{job} {name}: efficiency {statistics.median(efficiencies[name]):.3f}, "
            f"a waiting rank {statistics.median(shares[name]):.2%} of a core (medians of {ROUNDS})"
        )
