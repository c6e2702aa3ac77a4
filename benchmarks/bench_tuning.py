"""Tuning in the lab: against a grid of batch sizes and Algorithm 1, and its prediction against training.

    make bench ARGS="-k grid"          one model, a host and four nodes at 22% of a core
    make bench ARGS="-k kinds"         two models, three nodes with alike facts at 50%, 20% and 10% of a core
    make bench ARGS="-k predicted"     three models; that fleet and a fleet with three classes of nodes
    make bench ARGS="-k tuning"        all

Needs an idle machine. CSDCTL_BENCH_SMOKE=1 only checks that it works; its
figures mean nothing. Batch sizes are printed as host + nodes.
"""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grid import Visits, grid_points, unequal_grid_points, visit, with_between
from benchmarks.running import read_documents
from benchmarks.slow_nodes import CPU, DENSE, MOBILENET, SMALL, write_fleet, write_job
from csdctl.tuning.plan import load_plan
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import Project

MAX_GLOBAL_BATCH = 512
NUM_IMAGES = {"mobilenet": 6_000, "small": 40_000, "dense": 40_000}
"""MobileNetV2's steps stay short without a given limit, because an epoch has at least ten of them."""
WORKS = {"mobilenet": MOBILENET, "small": SMALL, "dense": DENSE}
CPUS = {
    "equal": {f"slow{number}": CPU for number in range(4)},
    "kinds": {"half": 0.5, "fifth": 0.2, "tenth": 0.1},
    "unequal": {"weak0": 0.12, "middle0": 0.2, "middle1": 0.2, "strong0": 0.3},
}
"""Fleets, and the share of a core of each node."""
VISIT_S = 6.0
FIT_VISITS = 4
"""Number of times that the fit's plan is measured between the points of the grid."""
FINALISTS, ROUNDS = 3, 2
"""The best of many noisy figures is biased: the best points run again, alternately with the fit's plan."""
TRAIN_S = 30.0
FLEET_FILES = {name: f"{name}.yaml" for name in CPUS} | {"equal": "fleet.yaml"}


@dataclass(frozen=True)
class Tuned:
    """The plan from the command's JSON output, and how it was measured."""

    plan: dict[str, Any]
    messages: str
    """The command's messages."""
    wall_s: float

    @property
    def num_trials(self) -> int:
        return self.messages.count("trying the plan")

    def print(self, name: str) -> None:
        print(
            f"{name}: {self.plan['num_probes']} probes, {self.num_trials} trials, "
            f"{self.plan['measuring_s']:.1f} s of measuring, {self.wall_s:.0f} s in all; "
            f"batch sizes {[rank['batch_size'] for rank in self.plan['ranks']]}"
        )


def tune(project: Project, *arguments: str) -> Tuned:
    """Tune, and echo each message with the seconds since the start."""
    start = time.monotonic()
    messages = ""
    with project.start("tune", *arguments, "--json") as running:
        assert running.stdout
        assert running.stderr
        for line in running.stderr:
            messages += line
            print(f"    {time.monotonic() - start:5.0f} s  {line}", end="", flush=True)
        documents = read_documents(running.stdout.read())
    assert running.returncode == 0, messages
    return Tuned(documents[-1], messages, time.monotonic() - start)


def run_csdctl(project: Project, *arguments: str) -> tuple[list[Any], str]:
    """Run csdctl on the lab's host; return its documents and its messages."""
    done = project.csdctl(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return read_documents(done.stdout), done.stderr


def plan_path(project: Project, job: str) -> Path:
    return project.path / ".csdctl" / "plans" / f"{job}.yaml"


@pytest.fixture(scope="module")
def project(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with a file for each fleet and each job; the nodes of both fleets are up."""
    project = Project(lab, tmp_path_factory.mktemp("tuning"))
    all_nodes: list[LabNode] = []
    with ExitStack() as stack:
        for name, cpus in CPUS.items():
            nodes = [
                stack.enter_context(lab.node(node, 40 + len(all_nodes) + number, cpu=cpu))
                for number, (node, cpu) in enumerate(cpus.items())
            ]
            write_fleet(project, nodes, FLEET_FILES[name])
            all_nodes += nodes
        project.trust(*all_nodes)
        for name, work in WORKS.items():
            write_job(project, name, work, NUM_IMAGES[name])
        yield project


def test_tuning_against_a_grid(project: Project) -> None:
    job, limit = "mobilenet", str(MAX_GLOBAL_BATCH)
    print(f"\nMobileNetV2 64×64×3, host and {len(CPUS['equal'])} nodes at {CPU:.0%}, global batch ≤ {limit}")
    stannis = tune(project, f"{job}.yaml", "--method", "stannis", "--fresh")
    fit = tune(project, f"{job}.yaml", "--fresh", "--max-global-batch", limit)
    fit_path = shutil.copy(plan_path(project, job), project.path / "fit.yaml")
    repeated = tune(project, f"{job}.yaml", "--max-global-batch", limit)
    stannis.print("Algorithm 1")
    fit.print("fit")
    repeated.print("fit again")
    ratio = fit.plan["measuring_s"] / stannis.plan["measuring_s"]
    print(f"measuring, fit / Algorithm 1: {ratio:.2f}; the commands: {fit.wall_s / stannis.wall_s:.2f}")

    points = grid_points(MAX_GLOBAL_BATCH, len(CPUS["equal"]))
    compare_with_grid(project, job, FLEET_FILES["equal"], fit_path, points)


@pytest.mark.parametrize("job", ["mobilenet", "small"])
def test_kinds_against_a_grid(project: Project, job: str) -> None:
    fleet, shares = FLEET_FILES["kinds"], CPUS["kinds"].values()
    print(f"\n{job}, host and nodes with {', '.join(f'{share:.0%}' for share in shares)} of a core")
    options = ("--fresh", "--strategy", "data-parallel", "--max-global-batch", str(MAX_GLOBAL_BATCH))
    tuned = tune(project, f"{job}.yaml", "--fleet", fleet, *options)
    tuned.print("fit")
    points = unequal_grid_points(MAX_GLOBAL_BATCH, [*shares])
    compare_with_grid(project, job, fleet, plan_path(project, job), points)


def compare_with_grid(
    project: Project, job: str, fleet: str, path: Path, points: list[tuple[int, ...]]
) -> None:
    """Print the speed of the plan in `path` and of `points`, then of the best again, alternately."""
    planned = tuple(rank.batch_size for rank in load_plan(path).ranks)
    start = time.monotonic()
    grid = visit(project, job, fleet, path, with_between(points, planned, FIT_VISITS), VISIT_S)
    print(f"the grid, {time.monotonic() - start:.0f} s; the fit's plan is {planned}:")
    print_against(planned, grid)
    best = grid.best(FINALISTS, excluded=planned)
    finals = visit(project, job, fleet, path, [*[planned, *best] * ROUNDS, planned], VISIT_S)
    print("the best points again, alternately with the fit's plan:")
    print_against(planned, finals)


def print_against(planned: tuple[int, ...], visits: Visits) -> None:
    visits.print()
    ours, best = visits.median(planned), visits.median(visits.best(1, excluded=planned)[0])
    print(f"fit {ours:.1f} samples/s, best of the grid {best:.1f}: fit / best {ours / best:.3f}")


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Lines that are printed together after all measurements."""
    lines: list[str] = []
    yield lines
    print("\n" + "\n".join(lines))


@pytest.mark.parametrize("fleet", CPUS)
@pytest.mark.parametrize("job", WORKS)
def test_tuning_predicted(project: Project, table: list[str], job: str, fleet: str) -> None:
    chosen = (f"{job}.yaml", "--fleet", FLEET_FILES[fleet])
    print(f"\n{job}, {fleet} fleet")
    tuned = tune(project, *chosen, "--fresh")
    tuned.print("fit")
    steps = math.ceil(TRAIN_S / tuned.plan["predicted"]["step_s"])
    run_csdctl(project, "train", *chosen, "--skip-doctor", "--max-steps", str(steps))
    report = run_csdctl(project, "report")[0][-1]
    predicted, achieved = report["predicted_samples_per_s"], report["samples_per_s"]
    table.append(
        f"{job:10} {fleet:8} predicted {predicted:8.1f}, achieved {achieved:8.1f} samples/s, "
        f"predicted / achieved − 1: {predicted / achieved - 1:+.1%} "
        f"({report['steps']} steps in {report['training_s']:.0f} s, "
        f"batch sizes changed {report['num_rebalanced']} times)"
    )
    print(table[-1])
