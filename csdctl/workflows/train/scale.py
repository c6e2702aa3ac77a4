"""`scale`: the weak and the strong scaling series, a run for each number of nodes that has none yet.

A completed run counts as a point if it used exactly that plan and number of steps, so interrupted series
resume.

Section V of the STANNIS paper, figures 6 and 7. Weak: every rank keeps its batch size. Strong: all ranks
together keep the batch size of the whole plan, divided in proportion to the plan's batch sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from csdctl.errors import CsdctlError, InputError, option
from csdctl.fleet.model import keep_nodes
from csdctl.reporting.results import COMPLETED, read_results
from csdctl.reporting.tables import WEAK, ScalingSeries, build_scaling
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.tuning.plan import Plan, load_plan, save_plan
from csdctl.worker.protocol.equation1 import public_shares
from csdctl.workflows.train.plan import build_equal_plan
from csdctl.workflows.train.request import TrainRequest
from csdctl.workflows.train.resume import load_spec
from csdctl.workflows.train.train import TrainResult
from csdctl.workflows.workspace.workspace import open_workspace


@dataclass(frozen=True)
class SeriesPoint:
    """One number of nodes in one series."""

    kind: str
    num_nodes: int
    plan: Plan
    run: RunDirectory | None
    """None: it is still to be trained."""


def plan_points(
    training: TrainRequest, kinds: Sequence[str], node_counts: Sequence[int]
) -> list[SeriesPoint]:
    """Return the points of the series with the runs that there are. Raises CsdctlError.

    `training` of all nodes. Each point has the first of them. Without `node_counts`: 0 if the host trains, 1,
    2, 4 … and all. `kinds` are of KINDS.
    """
    plan, project = _load_plan(training), ProjectDirectory(training.directory)
    counts = node_counts or choose_counts(len(plan.ranks) - 1, with_0=plan.ranks[0].batch_size > 0)
    if len(counts) < 2:
        problem = f"a series needs at least two numbers of nodes, received {len(counts)}"
        raise InputError(problem, remedy=f"{option('nodes')} 0,1,2")
    points = []
    for kind in kinds:
        for count in counts:
            planned = plan_point(plan, kind, count, max(counts))
            points.append(SeriesPoint(kind, count, planned, _find_run(project, planned, training)))
    return points


def run_series(
    training: TrainRequest,
    points: Sequence[SeriesPoint],
    train: Callable[[SeriesPoint, TrainRequest], TrainResult],
) -> dict[str, ScalingSeries]:
    """Call `train` for each point without a run. Return the series by kind. Raises what `train` raises."""
    project = ProjectDirectory(training.directory)
    runs: dict[str, list[RunDirectory]] = {}
    for point in points:
        run = point.run or _find_run(project, point.plan, training)  # the other series may have had it
        if run is None:
            path = project.plan(f"{point.plan.job}-{point.kind}-{point.num_nodes}")
            save_plan(path, point.plan)
            fleet = keep_nodes(training.fleet, set(point.plan.nodes))
            request = replace(training, fleet=fleet, plan_path=path, batch_size=None)
            run = train(point, request).directory
        runs.setdefault(point.kind, []).append(run)
    return {
        kind: build_scaling([read_results(run) for run in of_kind], kind) for kind, of_kind in runs.items()
    }


def _load_plan(request: TrainRequest) -> Plan:
    """Return the plan for all nodes: the tuned one without what is not in the fleet, or an equal one."""
    if request.batch_size:
        with open_workspace(request.directory, request.fleet, "scale") as space:
            return build_equal_plan(request.job, space.fleet, space.facts, request.batch_size)
    project = ProjectDirectory(request.directory)
    plan = load_plan(request.plan_path or project.plan(request.job.name))
    ranks = [rank for rank in plan.ranks if rank.node in request.fleet.machines]
    return plan.model_copy(update={"ranks": ranks})


def _find_run(project: ProjectDirectory, plan: Plan, training: TrainRequest) -> RunDirectory | None:
    """Return the latest completed run with this plan and number of steps."""
    for run_id in reversed(project.run_ids()):
        try:
            run = project.find_run(run_id)
            if (
                run.read_manifest().plan.model_dump() == plan.model_dump()
                and load_spec(run).max_steps == training.options.max_steps
                and read_results(run).summary.state == COMPLETED
            ):
                return run
        except (CsdctlError, ValueError, KeyError, TypeError):
            continue  # skip unreadable runs
    return None


def choose_counts(most: int, *, with_0: bool) -> tuple[int, ...]:
    """Return the default numbers of nodes of a series: 0 if `with_0`, 1, 2, 4 … and `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    counts = sorted({0, *powers, most})
    return tuple(counts if with_0 else counts[1:])


def plan_point(plan: Plan, kind: str, num_nodes: int, most: int) -> Plan:
    """Return the plan of one point of the series of `plan` that ends with `most` nodes.

    Raises InputError if the plan has fewer nodes or no rank would train, or a share does not fit in memory.
    """
    ranks = plan.ranks[: num_nodes + 1]
    if num_nodes >= len(plan.ranks):
        problem = f"received {num_nodes} nodes, but the plan has {len(plan.ranks) - 1}"
        raise InputError(problem, remedy=f"use fewer with {option('nodes')}, or run `csdctl tune` for more")
    if not any(rank.batch_size for rank in ranks):
        problem = "the host does not train in this plan: there is no run with 0 nodes"
        raise InputError(problem, remedy=f"leave 0 out of {option('nodes')}")
    if kind == WEAK:
        return plan.with_ranks(ranks)
    global_batch = sum(rank.batch_size for rank in plan.ranks[: most + 1])
    sizes = public_shares([rank.batch_size for rank in ranks], [0] * len(ranks), global_batch)
    for rank, size in zip(ranks, sizes, strict=True):
        if rank.max_batch_size and size > rank.max_batch_size:
            raise InputError(
                f"{rank.node} would take {size:,} of the {global_batch:,} samples of a step with "
                f"{num_nodes} nodes, but at most {rank.max_batch_size:,} fit in its memory",
                remedy=f"start the strong series with more {option('nodes')}, or with smaller batch sizes",
            )
    return plan.with_ranks([replace(rank, batch_size=size) for rank, size in zip(ranks, sizes, strict=True)])
