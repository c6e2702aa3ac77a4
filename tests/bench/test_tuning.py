"""Tuning in the lab: against a grid of batch sizes and Algorithm 1, and its prediction against training.

    make bench ARGS="-k grid"          one model, a host and four nodes at 22% of a core
    make bench ARGS="-k predicted"     three models, that fleet and one of three kinds of nodes
    make bench ARGS="-k tuning"        both

Prints figures and judges nothing; needs a quiet machine. CSDCTL_BENCH_SMOKE=1 does as little as shows that it
works, with figures that mean nothing. Batch sizes are printed as host + nodes.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.bench.grid import Visits, grid_points, visit, with_between
from tests.bench.slow_nodes import CPU, DENSE, MOBILENET, SMALL, write_fleet, write_job
from tests.bench.tuned import plan_path, run_csdctl, tune
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import Project

IS_SMOKE = os.environ.get("CSDCTL_BENCH_SMOKE") == "1"
MAX_GLOBAL_BATCH = 64 if IS_SMOKE else 512
NUM_IMAGES = {"mobilenet": 6_000, "small": 40_000, "dense": 40_000}
"""MobileNetV2's steps stay short without a limit given, because an epoch keeps ten of them."""
WORKS = {"mobilenet": MOBILENET, "small": SMALL, "dense": DENSE}
CPUS = {
    "equal": {f"slow{number}": CPU for number in range(4)},
    "unequal": {"weak0": 0.12, "middle0": 0.2, "middle1": 0.2, "strong0": 0.3},
}
"""Fleets, and the share of a core of each node."""
VISIT_S = 1.0 if IS_SMOKE else 6.0
FIT_VISITS = 2 if IS_SMOKE else 4
"""How often the remove_stale_labs over the grid measures the fit's plan, between its points."""
FINALISTS, ROUNDS = (2, 1) if IS_SMOKE else (3, 2)
"""The best of many noisy figures is too good: the best points run again, in turns with the fit's plan."""
TRAIN_S = 4.0 if IS_SMOKE else 30.0
FLEET_FILES = {name: f"{name}.yaml" for name in CPUS} | {"equal": "fleet.yaml"}

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def project(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A file for each fleet and each job; nodes of both fleets are up."""
    project = Project(lab, tmp_path_factory.mktemp("tuning"))
    every: list[LabNode] = []
    with ExitStack() as stack:
        for name, cpus in CPUS.items():
            nodes = [
                stack.enter_context(lab.node(node, 40 + len(every) + number, cpu=cpu))
                for number, (node, cpu) in enumerate(cpus.items())
            ]
            write_fleet(project, nodes, FLEET_FILES[name])
            every += nodes
        project.trust(*every)
        for name, work in WORKS.items():
            write_job(project, name, work, NUM_IMAGES[name])
        yield project


def test_tuning_against_a_grid(project: Project) -> None:
    job, limit = "mobilenet", str(MAX_GLOBAL_BATCH)
    print(f"\nMobileNetV2 64×64×3, host and {len(CPUS['equal'])} nodes at {CPU:.0%}, global batch ≤ {limit}")
    of_paper = tune(project, f"{job}.yaml", "--method", "stannis", "--fresh")
    fit = tune(project, f"{job}.yaml", "--fresh", "--max-global-batch", limit)
    fit_path = shutil.copy(plan_path(project, job), project.path / "fit.yaml")
    again = tune(project, f"{job}.yaml", "--max-global-batch", limit)
    of_paper.tell("Algorithm 1")
    fit.tell("fit")
    again.tell("fit again")
    ratio = fit.plan["measuring_s"] / of_paper.plan["measuring_s"]
    print(f"measuring, fit / Algorithm 1: {ratio:.2f}; the commands: {fit.wall_s / of_paper.wall_s:.2f}")

    planned = tuple(rank["batch_size"] for rank in fit.plan["ranks"])
    points = grid_points(MAX_GLOBAL_BATCH, len(planned) - 1)
    began = time.monotonic()
    remove_stale_labs = visit(project, job, fit_path, with_between(points, planned, FIT_VISITS), VISIT_S)
    print(f"the grid, {time.monotonic() - began:.0f} s; the fit's plan is {planned}:")
    tell_against(planned, remove_stale_labs)
    best = remove_stale_labs.best(FINALISTS, but=planned)
    finals = visit(project, job, fit_path, [*[planned, *best] * ROUNDS, planned], VISIT_S)
    print("the best points again, in turns with the fit's plan:")
    tell_against(planned, finals)


def tell_against(planned: tuple[int, ...], visits: Visits) -> None:
    visits.tell()
    ours, best = visits.middle(planned), visits.middle(visits.best(1, but=planned)[0])
    print(f"fit {ours:.1f} samples/s, best of the grid {best:.1f}: fit / best {ours / best:.3f}")


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Lines that are printed together when all is measured."""
    lines: list[str] = []
    yield lines
    print("\n" + "\n".join(lines))


@pytest.mark.parametrize("fleet", CPUS)
@pytest.mark.parametrize("job", WORKS)
def test_tuning_predicted(project: Project, table: list[str], job: str, fleet: str) -> None:
    chosen = (f"{job}.yaml", "--fleet", FLEET_FILES[fleet])
    print(f"\n{job}, {fleet} fleet")
    smaller = ["--max-global-batch", str(MAX_GLOBAL_BATCH)] if IS_SMOKE else []
    tuned = tune(project, *chosen, "--fresh", *smaller)
    tuned.tell("fit")
    steps = math.ceil(TRAIN_S / tuned.plan["predicted"]["step_s"])
    run_csdctl(project, "train", *chosen, "--skip-doctor", "--max-steps", str(steps))
    report = run_csdctl(project, "report")[0][-1]
    predicted, achieved = report["predicted_samples_per_s"], report["step_samples_per_s"]
    table.append(
        f"{job:10} {fleet:8} predicted {predicted:8.1f}, achieved {achieved:8.1f} samples/s, "
        f"predicted / achieved − 1: {predicted / achieved - 1:+.1%} "
        f"({report['steps']} steps in {report['training_s']:.0f} s, "
        f"batch sizes changed {report['num_rebalanced']} times)"
    )
    print(table[-1])
