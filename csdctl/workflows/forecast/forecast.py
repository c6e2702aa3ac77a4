"""The forecast: the curve over the number of nodes that follows from a basis, and its verdict.

A `ForecastBasis` holds the figures that `tune` measured for the user's own job, and their origins. For the
fleet as it is, the plan predicts the training: its batch sizes, and the result of its trial. Other numbers of
nodes follow from the stored measurements, with the batch sizes that `tune` would choose for them. Without a
plan, the measurements are used alone. A forecast is of data-parallel training: it does not use the batch
sizes of a split. Nothing here connects to a machine.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from csdctl.errors import InputError
from csdctl.fleet.checks import is_ready
from csdctl.fleet.facts import Facts, facts_path, load_facts
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job, load_job
from csdctl.notify import Say
from csdctl.perfmodel.prediction import CollectiveCost, RankModel, calibrate_overhead
from csdctl.perfmodel.spread import Range, Spread
from csdctl.reporting.numbers import format_seconds
from csdctl.reporting.results import list_forecast_errors
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import MeasurementStore
from csdctl.tuning.fleet_model import RecalledTrial, fit_collective
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT, Plan, load_plan
from csdctl.tuning.scaling_curve import (
    Choice,
    Costs,
    CurvePoint,
    Power,
    Verdict,
    choose_best,
    judge,
    predict_curve,
    size_ranks,
)
from csdctl.tuning.search import Limits, default_limits, read_limits
from csdctl.workflows.data.files import prepare_code
from csdctl.workflows.data.prepare import PreparedData, load_prepared
from csdctl.workflows.train.plan import find_changes, find_left_out, find_unplanned
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe

EMULATED = "emulated on one machine, which shows how ranks balance, not how fast a device is: "
TUNE = "run `csdctl tune`"
MAX_NODES = 10_000
MAX_COUNTS = 60


@dataclass(frozen=True)
class ForecastBasis:
    """What a forecast is computed from."""

    title: str
    source: Literal["measured", "emulated"]
    host: RankModel
    nodes: tuple[RankModel, ...]
    """The fleet's nodes in order; a larger fleet repeats them."""
    costs: Costs
    origins: Mapping[str, str]
    """The origins of `speeds`, `sum`, `power` and more, as sentences; assumptions are marked as such."""
    choice: Choice
    """How batch sizes are chosen for other numbers of nodes."""
    spread: Spread
    """The error of the forecast."""
    power: Power | None = None
    num_samples: int | None = None
    """Samples of an epoch; None: unknown."""
    epochs: int = 1
    planned_range: Range | None = None
    """The range of the plan for the fleet as it is, from its trial."""

    def range_of(self, num_nodes: int, rate: float) -> Range | None:
        """Return the range around the forecast rate with this number of nodes."""
        if self.planned_range and num_nodes == len(self.nodes):
            return self.planned_range
        if self.source == "emulated" and num_nodes != len(self.nodes):
            return None
        return self.spread.range_of(rate)


def tuned_basis(
    job: Job,
    project: ProjectDirectory,
    fleet: Fleet | None,
    say: Say,
    num_samples: int | None = None,
    max_global_batch: int | None = None,
) -> ForecastBasis:
    """Return the basis of a forecast for `job` on `fleet`, which is None without a fleet file.

    `num_samples` of an epoch, None: as prepared. `max_global_batch` replaces the limit that the plan was
    tuned with, so that the plan is not used. Raises InputError with a remedy when nothing was measured,
    TuningError when the limits allow no plan, and what building a new model raises.
    """
    data = load_prepared(project, job)
    facts = load_facts(fleet) if fleet and facts_path(fleet).exists() else {}
    plan, why_no_plan = _load_valid_plan(job, project, fleet, facts)
    if max_global_batch is not None:
        plan, why_no_plan = None, "a different limit of the global batch is requested"
    notes = _describe_strategy(plan) if plan else {}
    if plan and plan.strategy == SPLIT:
        plan, why_no_plan = None, "its batch sizes are those of a model that is split"
    if fleet is None:
        raise _unknown("there is no fleet file", f"write fleet.yaml and {TUNE}")
    measured = _find_measurements(job, project, fleet, facts, data, say)
    samples = num_samples or (data.num_samples if data else None)
    basis = _measured_basis(job, fleet, plan, measured, samples, max_global_batch)
    if why_no_plan:
        notes["plan"] = f"not used: {why_no_plan}"
    if data:
        private = sum(data.num_private.values())
        where = f" and {private:,} private on {len(data.num_private)} nodes" if data.num_private else ""
        notes["samples"] = f"{data.public.num_samples:,} public{where}, as last prepared"
    return replace(basis, origins={**basis.origins, **notes}, num_samples=data.num_samples if data else None)


def _load_valid_plan(
    job: Job, project: ProjectDirectory, fleet: Fleet | None, facts: Mapping[str, Facts]
) -> tuple[Plan | None, str]:
    """Return the plan of `job` if training would follow it. Else None and why, '' when there is none."""
    path = project.plan(job.name)
    if not path.exists():
        return None, ""
    plan = load_plan(path)
    if changes := find_changes(plan, job, facts):
        return None, f"the plan does not match {job.path}: {'; '.join(changes)}"
    nodes = [rank.node for rank in plan.ranks[1:]]
    if fleet and (set(nodes) - {node.name for node in fleet.nodes} or find_unplanned(plan, fleet)):
        return None, f"the plan is for other nodes: {format_node_names(nodes)}"
    return plan, ""


def _describe_strategy(plan: Plan) -> dict[str, str]:
    """Return what the plan says of its strategy, where that is not the one of a forecast."""
    if plan.strategy == DATA_PARALLEL:
        return {}
    of_strategy = [one for one in plan.strategies if one.strategy == plan.strategy]
    of_cut = [one for one in of_strategy if plan.strategy != SPLIT or one.cut == plan.cut]
    seconds = of_cut[0].first_run_s_range if of_cut else None
    took = f", which by the plan takes {' to '.join(map(format_seconds, seconds))} in all" if seconds else ""
    return {"strategy": f"data-parallel; `csdctl train` follows the plan's strategy, {plan.strategy}{took}"}


def _measured_basis(
    job: Job,
    fleet: Fleet,
    plan: Plan | None,
    measured: FleetMeasurements,
    num_samples: int | None,
    max_global_batch: int | None,
) -> ForecastBasis:
    """Return a basis with the plan's batch sizes for the fleet as it is, and the best for other sizes.

    `num_samples` of an epoch, None: unknown. `max_global_batch` applies without a plan. None: the default
    of `tune`.
    """
    known, sums, errors = measured.recall_fleet(), measured.collectives(), measured.forecast_errors()
    classes = known.classes.values()
    model_name = measured.features.name.removeprefix("keras.applications:").rpartition("/")[2]
    if unknown := [name for one in classes if not one.points for name in one.machines]:
        missing = f"{model_name}, with this recipe and form of data, was not measured on "
        raise _unknown(missing + format_node_names(unknown), TUNE)
    num_probes = sum(len(one.points) for one in classes)
    speeds = f"measured: {num_probes} probes and trials of {model_name} on machines like these"
    ranks = [
        RankModel(name, step_time, is_required=name in known.required)
        for name, step_time in known.machine_step_times().items()
    ]
    given = read_limits(plan.method_arguments) if plan else Limits(max_global_batch)
    is_required = job.private_path is not None

    def limits(num_nodes: int) -> Limits:
        num_required = 1 + num_nodes if is_required else 1
        return default_limits(given, job.recipe.reference_batch, num_samples, num_required)

    sum_cost = fit_collective(sums)
    trial = measured.recall_trial(known.step_times())
    overhead_factor = _overhead_factor(plan, trial, ranks, sum_cost, known.vector_bytes)
    costs = Costs(sum_cost, known.vector_bytes, overhead_factor)
    host, *nodes = ranks
    if plan:
        idle = {rank.node for rank in plan.ranks if not rank.batch_size} | {*find_left_out(plan, fleet)}
        choice = Choice(limits, is_required, is_planned=True, idle=frozenset(idle))
        sizes = {rank.node: rank.batch_size for rank in plan.ranks}
    else:
        choice = Choice(limits, is_required)
        sizes = choose_best(host, nodes, len(nodes), choice, costs).batch_sizes
    host, *nodes = size_ranks(ranks, sizes)
    return ForecastBasis(
        title=job.name,
        source="emulated" if fleet.emulated else "measured",
        host=host,
        nodes=tuple(nodes),
        costs=costs,
        origins={
            "speeds": (EMULATED if fleet.emulated else "") + speeds,
            "sum": _describe_sums(sums),
            "power": "unknown (--host-watts, --node-watts)",
        },
        epochs=job.recipe.epochs,
        choice=choice,
        spread=errors.spread,
        planned_range=plan.predicted_range if plan else None,
    )


def _overhead_factor(
    plan: Plan | None,
    tried: RecalledTrial | None,
    ranks: Sequence[RankModel],
    sum_cost: CollectiveCost,
    vector_bytes: int,
) -> float:
    """Return the ratio of a step without the sum to the slowest rank's step alone, by the latest trial."""
    if plan and (prediction := plan.prediction):
        step_times = {rank.node: rank.step_time for rank in ranks}
        tried = [(step_times[rank.node], rank.batch_size) for rank in plan.ranks], prediction.step_s
    return calibrate_overhead(*tried, sum_cost.at(vector_bytes, len(tried[0]))) if tried else 1.0


def _describe_sums(sums: Sequence[CollectiveMeasurement]) -> str:
    if not sums:
        return "unknown, counted as 0 s: an upper bound"
    ranks = [measurement.num_ranks for measurement in sums]
    counts = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
    return f"measured: a line fitted to {len(sums)} sums over {counts} ranks on such a fleet"


def _unknown(reason: str, remedy: str) -> InputError:
    """Return the error for a fleet or job without the measurements that a forecast needs."""
    return InputError(f"cannot forecast: {reason}", remedy=remedy)


def _find_measurements(
    job: Job,
    project: ProjectDirectory,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    data: PreparedData | None,
    say: Say,
) -> FleetMeasurements:
    """Return the measurements of `project`. Raises InputError, and what building a new model raises."""
    if undiscovered := [name for name in fleet.machines if name not in facts or not is_ready(facts[name])]:
        raise _unknown(f"the facts of {format_node_names(undiscovered)} are unknown", "run `csdctl discover`")
    if not project.measurements.exists():
        raise _unknown("there are no measurements yet", TUNE)
    _, model = prepare_code(job, project.root, say)
    recipe = hash_recipe(job, data.public) if data else ""  # nothing was measured with it
    store = MeasurementStore(project.measurements, say)
    errors = list_forecast_errors(project)
    return FleetMeasurements(model.describe(), recipe, fleet, facts, store, errors)


@dataclass(frozen=True)
class ForecastRequest:
    """The numbers of nodes to forecast, and figures that replace those of the basis."""

    node_counts: Sequence[int] | None = None
    """None: 0 to all nodes of the basis."""
    epochs: int | None = None
    num_samples: int | None = None
    """Samples of an epoch."""
    power: Power | None = None


def given_power(host_watts: float | None, node_watts: float | None) -> Power | None:
    """Return the powers given on the command line. Raises InputError when a value is missing or invalid."""
    if host_watts is None and node_watts is None:
        return None
    if host_watts is None or node_watts is None:
        options = {"--host-watts": host_watts, "--node-watts": node_watts}
        missing = " and ".join(name for name, watts in options.items() if watts is None)
        raise InputError(f"energy requires {missing} too", remedy=f"add {missing}")
    if not all(math.isfinite(watts) and watts >= 0 for watts in (host_watts, node_watts)) or host_watts == 0:
        raise InputError(
            f"invalid power: {host_watts:g} W, {node_watts:g} W",
            remedy="pass the power during training in watts, as a meter shows it",
        )
    return Power(host_watts, node_watts)


def parse_node_counts(text: str) -> list[int]:
    """Parse numbers of nodes from `24`, `1..36` or `4,8,16`. Raises InputError."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part, re.ASCII)
        if not found or int(found[2] or found[1]) > MAX_NODES or int(found[2] or found[1]) < int(found[1]):
            raise InputError(
                f"invalid --nodes {text!r}",
                remedy=f"use a number up to {MAX_NODES}, a range such as 1..36, or several: 4,8,16",
            )
        counts.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return sorted(set(counts))


"""Numbers of nodes in one forecast, evenly: each takes a line, and a search for its batch sizes."""


@dataclass(frozen=True)
class Forecast:
    """A curve over the number of nodes, and what it is computed from."""

    basis: ForecastBasis
    points: list[CurvePoint]
    """For each number of nodes that was requested, or about MAX_COUNTS up to the largest."""
    verdict: Verdict | None
    """On the largest number of nodes; None for a host alone."""

    @property
    def num_samples(self) -> int | None:
        """Samples of all epochs. None: unknown."""
        return None if self.basis.num_samples is None else self.basis.num_samples * self.basis.epochs


def forecast(basis: ForecastBasis, request: ForecastRequest) -> Forecast:
    """Forecast what `request` asks for. Raises InputError when this basis does not allow it."""
    counts = range(len(basis.nodes) + 1) if request.node_counts is None else request.node_counts
    basis = _with_request(basis, request, max(counts))
    if max(counts) and not basis.nodes:
        raise InputError(
            "the fleet has only the host: the gain from nodes is unknown",
            remedy="run `csdctl tune` with at least one node",
        )
    most = max(counts)
    if len(counts) > MAX_COUNTS:
        counts = [round(part * most / MAX_COUNTS) for part in range(MAX_COUNTS + 1)]
    judged = {round(part * most / MAX_COUNTS) for part in range(MAX_COUNTS + 1)}
    searched = sorted({*counts, *judged})
    points = [
        replace(point, samples_per_s_range=basis.range_of(point.num_nodes, point.samples_per_s))
        for point in predict_curve(basis.host, basis.nodes, searched, basis.costs, basis.choice, basis.power)
    ]
    curve = {point.num_nodes: point for point in points}
    verdict = judge(list(curve.values()), basis.nodes) if max(counts) else None
    return Forecast(basis, [curve[count] for count in counts], verdict)


def _with_request(basis: ForecastBasis, request: ForecastRequest, max_nodes: int) -> ForecastBasis:
    """Return the basis with the figures of the request, and with the assumptions that remain."""
    origins = dict(basis.origins)
    if request.epochs is not None:
        basis = replace(basis, epochs=request.epochs)
    if request.num_samples is not None:
        origins["samples"] = "as given on the command line"
        basis = replace(basis, num_samples=request.num_samples)
    if request.power is not None:
        origins["power"] = "assumption: as given on the command line"
        basis = replace(basis, power=request.power)
    if max_nodes > len(basis.nodes):
        origins["reach"] = (
            f"assumption: with more nodes than {len(basis.nodes)}, speeds, sum and power are extrapolated"
        )
    return replace(basis, origins=origins)


def forecast_job(
    job_path: Path,
    fleet: Fleet | None,
    request: ForecastRequest,
    directory: Path,
    say: Say,
    max_global_batch: int | None,
) -> Forecast:
    """Forecast a job of the project in `directory`. Raises what `tuned_basis` raises."""
    if not job_path.exists():
        raise InputError(f"{job_path} does not exist", remedy="pass a job that was tuned")
    job, project = load_job(job_path), ProjectDirectory(directory)
    basis = tuned_basis(job, project, fleet, say, request.num_samples, max_global_batch)
    if fleet and (power := _stated_power(fleet)):
        origins = {**basis.origins, "power": f"constant watts of {fleet.path}"}
        basis = replace(basis, power=power, origins=origins)
    return forecast(basis, request)


def _stated_power(fleet: Fleet) -> Power | None:
    """Return the power of host and nodes if fleet.yaml states it for all of them. The mean of the nodes."""
    known = [one for one in map(fleet.power_of, fleet.machines) if one and one.watts is not None]
    if not fleet.nodes or len(known) < len(fleet.machines) or known[0].includes_nodes or not known[0].watts:
        return None
    idle_w = [one.idle_watts or 0.0 for one in known[1:]]
    busy_w = [(one.watts or 0.0) - idle for one, idle in zip(known[1:], idle_w, strict=True)]
    return Power(known[0].watts + sum(idle_w), fmean(busy_w))
