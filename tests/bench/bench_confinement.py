"""What the sandbox costs a run: the same fleet with and without, alternating, in one sitting.

    make bench ARGS="-k confinement"

The lab of test_engine. Prints figures, asserts no limits.
"""

import statistics
import sys
import time
from pathlib import Path

import pytest

from tests.bench.bench_engine import (
    BATCH_SIZES,
    NUM_IMAGES,
    cpu_while_waiting,
    nodes,
    project,
    rates,
    start,
    stop,
)
from tests.bench.running import CSDCTL
from tests.bench.slow_nodes import SMALL, write_job
from tests.lab.machines import LabNode
from tests.lab.project import Project

__all__ = ["nodes", "project"]

PROGRAMS = {
    "confined": (str(CSDCTL),),
    "unconfined": (sys.executable, str(Path(__file__).parent / "clients" / "unconfined.py")),
}
ROUNDS = 3


@pytest.mark.bench
@pytest.mark.timeout(5400)
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
                used = cpu_while_waiting(running, nodes, frozen=nodes[2])
                shares[name].append(statistics.mean(used.values()))
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
