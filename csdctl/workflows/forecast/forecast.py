"""The forecast: the curve over the number of nodes that follows from a basis, and its verdict.

A `ForecastBasis` holds the figures that `tune` measured for the user's job, and their origins. For the
fleet as it is, the plan predicts the training: its batch sizes, and the result of its trial. Other numbers of
nodes follow from the stored measurements, with the batch sizes that `tune` would choose for them. Without a
plan, only the measurements are used. A forecast is of data-parallel training: it does not use the batch
sizes of a split. Nothing here connects to a machine.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from csdctl.errors import InputError, option
from csdctl.fleet.checks import is_ready
from csdctl.fleet.facts import Facts, facts_path, load_facts
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job, load_job
from csdctl.notify import Say
from csdctl.perfmodel.prediction import calibrate_overhead
from csdctl.perfmodel.spread import Range, Spread
from csdctl.reporting.numbers import format_seconds
from csdctl.reporting.results import list_forecast_errors
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import MeasurementStore
from csdctl.tuning import scaling_curve
from csdctl.tuning.fleet_model import fit_collective
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT, Plan, load_plan
from csdctl.tuning.scaling_curve import CurvePoint, CurveVerdict, Power, ScalableFleet
from csdctl.tuning.search import Limits, default_limits, read_limits
from csdctl.workflows.data.files import prepare_code
from csdctl.workflows.data.prepare import PreparedData, load_prepared
from csdctl.workflows.train.plan import find_changes, find_left_out, find_unplanned
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe

EMULATED = "emulated on one machine, which shows how ranks balance, not how fast a device is: "
"""Before the origin of the speeds of an emulated fleet."""
TUNE = "run `csdctl tune`"
MAX_NODES = 10_000
MAX_COUNTS = 60
"""Numbers of nodes in one forecast, evenly. Each takes a line, and a search for its batch sizes."""


@dataclass(frozen=True)
class ForecastRequest:
    """The numbers of nodes to forecast, and figures that replace figures of the basis."""

    node_counts: Sequence[int] | None = None
    """None: 0 to all nodes of the basis."""
    epochs: int | None = None
    num_samples: int | None = None
    power: Power | None = None
    max_global_batch: int | None = None
    """Replaces the limit that the plan was tuned with, so that the plan is not used."""


@dataclass(frozen=True)
class ForecastBasis:
    """The input of a forecast."""

    title: str
    source: Literal["measured", "emulated"]
    fleet: ScalableFleet
    origins: Mapping[str, str]
    """The origins of `speeds`, `sum`, `power` and more, as sentences. Assumptions are marked as such."""
    spread: Spread
    power: Power | None = None
    num_samples: int | None = None
    """Samples of an epoch. None: unknown."""
    epochs: int = 1
    planned_range: Range | None = None
    """The range of the plan for the fleet as it is, from its trial."""

    def range_of(self, num_nodes: int, rate: float) -> Range | None:
        """Return the range around the forecast rate with this number of nodes."""
        is_as_it_is = num_nodes == len(self.fleet.nodes)
        if self.planned_range and is_as_it_is:
            return self.planned_range
        return self.spread.range_of(rate) if self.source == "measured" or is_as_it_is else None


@dataclass(frozen=True)
class Forecast:
    """A curve over the number of nodes."""

    basis: ForecastBasis
    points: list[CurvePoint]
    """For each number of nodes that was requested, or about MAX_COUNTS up to the largest."""
    verdict: CurveVerdict | None
    """On the largest number of nodes. None for a host alone."""

    @property
    def num_samples(self) -> int | None:
        """Samples of all epochs. None: unknown."""
        return None if self.basis.num_samples is None else self.basis.num_samples * self.basis.epochs


def forecast_job(
    job_path: Path, fleet: Fleet | None, directory: Path, request: ForecastRequest, say: Say
) -> Forecast:
    """Forecast a job of the project in `directory`. Raises what `tuned_basis` raises."""
    if not job_path.exists():
        raise InputError(f"{job_path} does not exist", remedy="pass a job that was tuned")
    basis = tuned_basis(load_job(job_path), ProjectDirectory(directory), fleet, request, say)
    return forecast(basis, request)


def forecast(basis: ForecastBasis, request: ForecastRequest) -> Forecast:
    """Forecast what `request` asks for. Raises InputError when this basis does not allow it."""
    num_nodes = len(basis.fleet.nodes)
    counts = range(num_nodes + 1) if request.node_counts is None else request.node_counts
    most = max(counts)
    if most and not num_nodes:
        problem = "the fleet has only the host: the gain from nodes is unknown"
        raise InputError(problem, remedy="run `csdctl tune` with at least one node")
    basis = _with_request(basis, request, most)
    judged = [round(part * most / MAX_COUNTS) for part in range(MAX_COUNTS + 1)]
    counts = judged if len(counts) > MAX_COUNTS else counts
    curve = {
        point.num_nodes: replace(
            point, samples_per_s_range=basis.range_of(point.num_nodes, point.samples_per_s)
        )
        for point in scaling_curve.predict_curve(basis.fleet, sorted({*counts, *judged}), basis.power)
    }
    verdict = scaling_curve.judge(list(curve.values()), basis.fleet.nodes) if most else None
    return Forecast(basis, [curve[count] for count in counts], verdict)


def _with_request(basis: ForecastBasis, request: ForecastRequest, most: int) -> ForecastBasis:
    origins = dict(basis.origins)
    if request.num_samples is not None:
        origins["samples"] = "as given on the command line"
    if request.power is not None:
        origins["power"] = "assumption: as given on the command line"
    if most > (num_nodes := len(basis.fleet.nodes)):
        origins["reach"] = (
            f"assumption: with more nodes than {num_nodes}, speeds, sum and power are extrapolated"
        )
    return replace(
        basis,
        origins=origins,
        epochs=basis.epochs if request.epochs is None else request.epochs,
        num_samples=basis.num_samples if request.num_samples is None else request.num_samples,
        power=request.power or basis.power,
    )


def tuned_basis(
    job: Job, project: ProjectDirectory, fleet: Fleet | None, request: ForecastRequest, say: Say
) -> ForecastBasis:
    """Return the basis of a forecast for `job` on `fleet`, which is None without a fleet file.

    Raises InputError when nothing was measured, TuningError when the limits allow no plan.
    """
    if fleet is None:
        raise _unknown("there is no fleet file", f"write fleet.yaml and {TUNE}")
    facts = load_facts(fleet) if facts_path(fleet).exists() else {}
    plan, why_no_plan = _load_valid_plan(job, project, fleet, facts)
    if request.max_global_batch is not None:
        plan, why_no_plan = None, "a different limit of the global batch is requested"
    notes = _describe_strategy(plan) if plan else {}
    if plan and plan.strategy == SPLIT:
        plan, why_no_plan = None, "its batch sizes are those of a model that is split"
    if why_no_plan:
        notes["plan"] = f"not used: {why_no_plan}"
    data = load_prepared(project, job)
    if data:
        where, num_nodes = "", len(data.num_private)
        if data.num_private:
            where = f" and {sum(data.num_private.values()):,} private on {num_nodes} nodes"
        notes["samples"] = f"{data.public.num_samples:,} public{where}, as last prepared"
    measurements = _find_measurements(job, project, fleet, facts, data=data, say=say)
    sums = measurements.collectives()
    num_samples = data.num_samples if data else None
    given = read_limits(plan.method_arguments) if plan else Limits(request.max_global_batch)
    scalable, num_probes = _scale(job, measurements, plan, given, request.num_samples or num_samples)
    power, power_origin = _stated_power(fleet), f"constant watts of {fleet.path}"
    speeds = f"measured: {num_probes} probes and trials of {_name(measurements)} on machines like these"
    return ForecastBasis(
        title=job.name,
        source="emulated" if fleet.emulated else "measured",
        fleet=scalable,
        origins={
            "speeds": (EMULATED if fleet.emulated else "") + speeds,
            "sum": _describe_sums(sums),
            "power": power_origin if power else "unknown (--host-watts, --node-watts)",
            **notes,
        },
        power=power,
        num_samples=num_samples,
        epochs=job.recipe.epochs,
        spread=measurements.forecast_errors().spread,
        planned_range=plan.predicted_range if plan else None,
    )


def _scale(
    job: Job, measurements: FleetMeasurements, plan: Plan | None, given: Limits, num_samples: int | None
) -> tuple[ScalableFleet, int]:
    """Return the fleet with the plan's batch sizes, or the best in the limits, and the number of probes."""
    is_private, nodes_of_fleet = job.private_path is not None, measurements.fleet.machines[1:]
    model = measurements.recall_fleet(required=nodes_of_fleet if is_private else ())
    classes = model.classes.values()
    if unknown := [name for members in classes if not members.points for name in members.machines]:
        missing = f"{_name(measurements)}, with this recipe and form of data, was not measured on "
        raise _unknown(missing + format_node_names(unknown), TUNE)
    model = replace(model, collective_cost=fit_collective(measurements.collectives()))
    overhead_factor = measurements.recall_overhead(model) or 1.0
    if plan and (prediction := plan.prediction):
        step_times, num_ranks = model.step_times(), len(plan.ranks)
        ranks = [(step_times[rank.node], rank.batch_size) for rank in plan.ranks]
        overhead_factor = calibrate_overhead(ranks, prediction.step_s, model.sum_s(num_ranks))

    def limits(num_nodes: int) -> Limits:
        num_required = 1 + num_nodes if is_private else 1
        return default_limits(given, job.recipe.reference_batch, num_samples, num_required)

    host, *nodes = model.candidates()
    scalable = ScalableFleet(
        host,
        tuple(nodes),
        sum_cost=model.collective_cost,
        vector_bytes=model.vector_bytes,
        overhead_factor=overhead_factor,
        limits=limits,
    )
    if plan:
        idle = {rank.node for rank in plan.ranks if not rank.batch_size}
        idle |= {*find_left_out(plan, measurements.fleet)}
        scalable = replace(scalable, is_planned=True, idle=frozenset(idle))
        sizes = {rank.node: rank.batch_size for rank in plan.ranks}
    else:
        sizes = scalable.plan(len(nodes)).batch_sizes
    host, *nodes = scaling_curve.size_ranks([host, *nodes], sizes)
    return replace(scalable, host=host, nodes=tuple(nodes)), sum(len(members.points) for members in classes)


def _name(measurements: FleetMeasurements) -> str:
    return measurements.model.name.removeprefix("keras.applications:").rpartition("/")[2]


def _load_valid_plan(
    job: Job, project: ProjectDirectory, fleet: Fleet, facts: Mapping[str, Facts]
) -> tuple[Plan | None, str]:
    path = project.plan(job.name)
    if not path.exists():
        return None, ""
    plan = load_plan(path)
    if changes := find_changes(plan, job, facts):
        return None, f"the plan does not match {job.path}: {'; '.join(changes)}"
    nodes = [rank.node for rank in plan.ranks[1:]]
    if {*nodes} - {node.name for node in fleet.nodes} or find_unplanned(plan, fleet):
        return None, f"the plan is for other nodes: {format_node_names(nodes)}"
    return plan, ""


def _describe_strategy(plan: Plan) -> dict[str, str]:
    if plan.strategy == DATA_PARALLEL:
        return {}
    ranges = [
        forecast.first_run_s_range
        for forecast in plan.strategies
        if forecast.strategy == plan.strategy and (plan.strategy != SPLIT or forecast.cut == plan.cut)
    ]
    took = ""
    if ranges and ranges[0]:
        took = f", which by the plan takes {' to '.join(map(format_seconds, ranges[0]))} in all"
    return {"strategy": f"data-parallel; `csdctl train` follows the plan's strategy, {plan.strategy}{took}"}


def _describe_sums(sums: Sequence[CollectiveMeasurement]) -> str:
    if not sums:
        return "unknown, counted as 0 s: an upper bound"
    ranks = [timed.num_ranks for timed in sums]
    counts = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
    return f"measured: a line fitted to {len(sums)} sums over {counts} ranks on such a fleet"


def _unknown(reason: str, remedy: str) -> InputError:
    return InputError(f"cannot forecast: {reason}", remedy=remedy)


def _find_measurements(
    job: Job,
    project: ProjectDirectory,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    *,
    data: PreparedData | None,
    say: Say,
) -> FleetMeasurements:
    if undiscovered := [name for name in fleet.machines if name not in facts or not is_ready(facts[name])]:
        raise _unknown(f"the facts of {format_node_names(undiscovered)} are unknown", "run `csdctl discover`")
    if not project.measurements.exists():
        raise _unknown("there are no measurements yet", TUNE)
    _, model = prepare_code(job, project.root, say)
    return FleetMeasurements(
        model.describe(),
        hash_recipe(job, data.public) if data else "",  # nothing was measured with it
        fleet,
        facts,
        store=MeasurementStore(project.measurements, say),
        errors=list_forecast_errors(project),
    )


def _stated_power(fleet: Fleet) -> Power | None:
    """Return the power of the host and the mean of the nodes, if fleet.yaml states it for all of them."""
    powers = [fleet.power_of(name) for name in fleet.machines]
    stated = [power for power in powers if power and power.watts is not None]
    if not fleet.nodes or len(stated) < len(powers) or stated[0].includes_nodes or not stated[0].watts:
        return None
    idle_w = [power.idle_watts or 0.0 for power in stated[1:]]
    busy_w = [(power.watts or 0.0) - idle for power, idle in zip(stated[1:], idle_w, strict=True)]
    return Power(stated[0].watts + sum(idle_w), fmean(busy_w))


def given_power(host_watts: float | None, node_watts: float | None) -> Power | None:
    """Return the powers given on the command line. Raises InputError when a value is missing or invalid."""
    if host_watts is None and node_watts is None:
        return None
    if host_watts is None or node_watts is None:
        missing = option("host_watts" if host_watts is None else "node_watts")
        raise InputError(f"energy requires {missing} too", remedy=f"add {missing}")
    if not all(math.isfinite(watts) and watts >= 0 for watts in (host_watts, node_watts)) or host_watts == 0:
        problem = f"invalid power: {host_watts:g} W, {node_watts:g} W"
        raise InputError(problem, remedy="pass the power during training in watts, as a meter shows it")
    return Power(host_watts, node_watts)


def parse_node_counts(text: str) -> list[int]:
    """Parse numbers of nodes from `24`, `1..36` or `4,8,16`. Raises InputError."""
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= MAX_NODES:
            raise InputError(
                f"invalid {option('nodes')} {text!r}",
                remedy=f"use a number up to {MAX_NODES}, a range such as 1..36, or several: 4,8,16",
            )
        counts.update(range(first, last + 1))
    return sorted(counts)
