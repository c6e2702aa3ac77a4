"""`scale`: the weak and the strong scaling series, a run for each number of nodes that has none yet.

A run is a point of a series when it is done, followed the very plan of the point, and has as many steps. So
what was there before an interruption, or in the other series, is not trained again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.model import keep_nodes
from csdctl.reporting.results import read_results
from csdctl.reporting.scaling import ScalingSeries, build_scaling
from csdctl.reporting.summary import summarize_run
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.tuning.plan import Plan, load_plan, save_plan
from csdctl.tuning.series import choose_counts, plan_point
from csdctl.workflows.train.plan import build_equal_plan
from csdctl.workflows.train.resume import load_spec
from csdctl.workflows.train.train import TrainRequest, TrainResult
from csdctl.workflows.workspace.workspace import open_workspace


@dataclass(frozen=True)
class ScaleRequest:
    """The request of one `csdctl scale`."""

    training: TrainRequest
    """Of all nodes; each point has the first of them."""
    kinds: Sequence[str]
    """Of `tuning.series.KINDS`."""
    node_counts: Sequence[int] = ()
    """Numbers of nodes; without any: 0, 1, 2, 4 … and all."""


@dataclass(frozen=True)
class Point:
    """One number of nodes in one series."""

    kind: str
    num_nodes: int
    plan: Plan
    run: RunDirectory | None
    """None: it is still to be trained."""


def plan_points(request: ScaleRequest) -> list[Point]:
    """Return the points of the series with the runs that there are; raises CsdctlError."""
    plan, project = _load_plan(request.training), ProjectDirectory(request.training.directory)
    counts = request.node_counts or choose_counts(len(plan.ranks) - 1)
    if len(counts) < 2:
        raise InputError(
            f"a series needs at least two numbers of nodes, received {counts[0]}",
            remedy="--nodes 0,1,2",
        )
    points = [
        Point(kind, count, plan_point(plan, kind, count, max(counts)), None)
        for kind in request.kinds
        for count in counts
    ]
    return [replace(point, run=_find_run(project, point.plan, request.training)) for point in points]


def run_series(
    request: ScaleRequest, train: Callable[[Point, TrainRequest], TrainResult]
) -> dict[str, ScalingSeries]:
    """Call `train` for each point without a run; return the series by kind. Raises what `train` raises."""
    project = ProjectDirectory(request.training.directory)
    runs: dict[str, list[RunDirectory]] = {}
    for point in plan_points(request):
        run = point.run or _find_run(
            project, point.plan, request.training
        )  # the other series may have had it
        if run is None:
            run = train(point, _request_of(point, request.training, project)).directory
        runs.setdefault(point.kind, []).append(run)
    return {kind: build_scaling([read_results(run, []) for run in found]) for kind, found in runs.items()}


def _load_plan(request: TrainRequest) -> Plan:
    """Return the plan for all nodes: the tuned one without what is not in the fleet, or an equal one."""
    if request.batch_size:
        with open_workspace(request.directory, request.fleet, "scale") as space:
            return build_equal_plan(request.job, space.fleet, space.facts, request.batch_size)
    project = ProjectDirectory(request.directory)
    plan = load_plan(request.plan_path or project.plan(request.job.name))
    ranks = [rank for rank in plan.ranks if rank.node in request.fleet.machines]
    return plan.model_copy(update={"ranks": ranks})


def _request_of(point: Point, training: TrainRequest, project: ProjectDirectory) -> TrainRequest:
    """Return the request of one point, with its plan in a file."""
    path = project.plan(f"{point.plan.job}-{point.kind}-{point.num_nodes}")
    save_plan(path, point.plan)
    fleet = keep_nodes(training.fleet, {rank.node for rank in point.plan.ranks})
    return replace(training, fleet=fleet, plan_path=path, batch_size=None)


def _find_run(project: ProjectDirectory, plan: Plan, training: TrainRequest) -> RunDirectory | None:
    """Return the latest run that is done, with this plan and as many steps."""
    wanted = plan.model_dump()
    for run_id in reversed(project.run_ids()):
        try:
            run = project.find_run(run_id)
            if (
                Plan.model_validate(run.load_manifest()["plan"]).model_dump() == wanted
                and load_spec(run).max_steps == training.options.max_steps
                and summarize_run(run).state == "done"
            ):
                return run
        except (CsdctlError, ValueError, KeyError, TypeError):
            continue  # a run that nothing can be read of is no point
    return None
