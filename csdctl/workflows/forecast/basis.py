"""What a forecast is computed from: the figures of the paper, or what `tune` measured for the user's own job.

For the fleet as it is, the plan predicts the training: its batch sizes, and the result of its trial. Other
numbers of nodes follow from the stored measurements, with the batch sizes that `tune` would choose for them.
Without a plan, the measurements are used alone.
A forecast is of data-parallel training: it does not use the batch sizes of a split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from csdctl.errors import InputError
from csdctl.fleet.checks import is_ready
from csdctl.fleet.facts import Facts, facts_path, load_facts
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.perfmodel.prediction import CollectiveCost, RankModel, calibrate_overhead
from csdctl.perfmodel.published import (
    LARGEST_SPEEDUP,
    NEWPORT_POWER_W,
    NEWPORT_RING,
    NUM_NEWPORTS,
    NUM_PRIVATE,
    NUM_PUBLIC,
    SOURCE,
    TABLE_1,
    Network,
)
from csdctl.reporting.numbers import format_seconds
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import open_measurements
from csdctl.tuning.fits import fit_collective
from csdctl.tuning.fleet_model import RecalledTrial
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.plan import Plan, load_plan
from csdctl.tuning.scaling_curve import Choice, Costs, Power, choose_best, size_ranks
from csdctl.tuning.search import Limits, default_limits, read_limits
from csdctl.tuning.strategies import DATA_PARALLEL, SPLIT
from csdctl.workflows.data.model import describe_job_model
from csdctl.workflows.data.prepared_record import PreparedData, load_prepared
from csdctl.workflows.train.plan import find_changes, find_left_out, find_unplanned
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe

EMULATED = "emulated on one machine, which shows how ranks balance, not how fast a device is: "
NO_SUM = "unknown, counted as 0 s: an upper bound (--sum-seconds)"
NO_POWER = "unknown (--host-watts, --node-watts)"
TUNE = "run `csdctl tune`"
NOT_PREPARED = ""
"""The recipe hash of a job whose data was never prepared: nothing was measured with it."""


@dataclass(frozen=True)
class ForecastBasis:
    """What a forecast is computed from."""

    title: str
    source: Literal["published", "measured", "emulated"]
    host: RankModel
    nodes: tuple[RankModel, ...]
    """The fleet's nodes in order; a larger fleet repeats them."""
    num_nodes: int
    """Number of nodes of the fleet."""
    costs: Costs
    origins: Mapping[str, str]
    """The origins of `speeds`, `sum`, `power` and more, as sentences; assumptions are marked as such."""
    power: Power | None = None
    num_samples: int | None = None
    """Samples of an epoch; None: unknown."""
    epochs: int = 1
    choice: Choice | None = None
    """How batch sizes are chosen for other numbers of nodes; None: they are fixed."""


def published_basis(network: Network) -> ForecastBasis:
    """Return the paper's host and Newports; its data set is 84,000 images."""
    row = TABLE_1[network]
    measured_with = TABLE_1[Network.MOBILENETV2]
    host_w, node_w, alone_w = NEWPORT_POWER_W
    sum_origin = f"a ring, fitted to the published speed-up of {LARGEST_SPEEDUP}"
    power_origin = (
        f"{host_w:.0f} W and {node_w:.2f} W for each CSD that trains, fitted to the published "
        f"Table II; the host alone is another server, with 24 ordinary SSDs: {alone_w:.0f} W; "
        f"assumption: all {NUM_NEWPORTS} CSDs are in the server, however many of them train"
    )
    if row is not measured_with:
        sum_origin += f" of {measured_with.title}; assumption: {row.title} takes the same time for a byte"
        power_origin += f"; measured with {measured_with.title}; almost the same with others (section V.B)"
    return ForecastBasis(
        title=f"{row.title} on a server with Newport CSDs",
        source="published",
        host=row.host,
        nodes=(row.node,),
        num_nodes=NUM_NEWPORTS,
        costs=Costs(NEWPORT_RING, row.gradient_bytes),
        origins={
            "speeds": f"published, {SOURCE}, Table I; nothing was measured here",
            "sum": sum_origin,
            "power": power_origin,
        },
        power=Power(host_w, node_w, alone_w),
        num_samples=NUM_PUBLIC + NUM_PRIVATE,
    )


@dataclass(frozen=True)
class Recalled:
    """The measurements of one model on one fleet."""

    ranks: Sequence[RankModel]
    """The host, then the nodes in the order of the fleet."""
    speeds: str
    """Where the step times come from, as a sentence."""
    vector_bytes: int
    """Bytes that each rank contributes to a sum."""
    sums: Sequence[CollectiveMeasurement]
    trial: RecalledTrial | None
    """The newest."""


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
        plan, why_no_plan = None, "another limit of the global batch is requested"
    notes = _describe_strategy(plan) if plan else {}
    if plan and plan.strategy == SPLIT:
        plan, why_no_plan = None, "its batch sizes are those of a model that is split"
    if fleet is None:
        raise _unknown("there is no fleet file", f"write fleet.yaml and {TUNE}")
    known = _recall(job, project, fleet, facts, data, say)
    samples = num_samples or (data.num_samples if data else None)
    basis = _measured_basis(job, fleet, plan, known, samples, max_global_batch)
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
    """Return the plan of `job` if training would follow it; else None and why, '' when there is none."""
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
    of_strategy = [
        strategy
        for strategy in plan.strategies
        if strategy.strategy == plan.strategy and (plan.strategy != SPLIT or strategy.cut == plan.cut)
    ]
    seconds = next((strategy.first_run_s for strategy in of_strategy), None)
    took = "" if seconds is None else f", which by the plan takes {format_seconds(seconds)} in all"
    return {"strategy": f"data-parallel; `csdctl train` follows the plan's strategy, {plan.strategy}{took}"}


def _measured_basis(
    job: Job,
    fleet: Fleet,
    plan: Plan | None,
    known: Recalled,
    num_samples: int | None,
    max_global_batch: int | None,
) -> ForecastBasis:
    """Return a basis with the plan's batch sizes for the fleet as it is, and the best for other sizes.

    `num_samples` of an epoch, None: unknown. `max_global_batch` applies without a plan; None: the default
    of `tune`.
    """
    given = read_limits(plan.method_arguments) if plan else Limits(max_global_batch)
    is_required = job.private_path is not None

    def limits(num_nodes: int) -> Limits:
        num_required = 1 + num_nodes if is_required else 1
        return default_limits(given, job.recipe.reference_batch, num_samples, num_required)

    sum_cost = fit_collective(known.sums)
    overhead_factor, in_step = _overhead_factor(plan, known, sum_cost)
    costs = Costs(sum_cost, known.vector_bytes, overhead_factor)
    host, *nodes = known.ranks
    if plan:
        idle = {rank.node for rank in plan.ranks if not rank.batch_size} | {*find_left_out(plan, fleet)}
        choice = Choice(limits, is_required, is_planned=True, idle=frozenset(idle))
        sizes = {rank.node: rank.batch_size for rank in plan.ranks}
    else:
        choice = Choice(limits, is_required)
        sizes = choose_best(host, nodes, len(nodes), choice, costs).batch_sizes
    host, *nodes = size_ranks(known.ranks, sizes)
    return ForecastBasis(
        title=job.name,
        source="emulated" if fleet.emulated else "measured",
        host=host,
        nodes=tuple(nodes),
        num_nodes=len(nodes),
        costs=costs,
        origins={
            "speeds": (EMULATED if fleet.emulated else "") + known.speeds,
            "batch_sizes": _describe_choice(choice, len(nodes)),
            "sum": _describe_sums(known.sums),
            "in_step": in_step,
            "power": NO_POWER,
        },
        epochs=job.recipe.epochs,
        choice=choice,
    )


def _overhead_factor(plan: Plan | None, known: Recalled, sum_cost: CollectiveCost) -> tuple[float, str]:
    """Return the ratio of a step without the sum to the slowest rank's step alone, and its origin."""
    tried = known.trial
    source = "the newest trial of this model on such a fleet"
    if plan and (prediction := plan.prediction):
        step_times = {rank.node: rank.step_time for rank in known.ranks}
        tried = [(step_times[rank.node], rank.batch_size) for rank in plan.ranks], prediction.step_s
        source = "the plan's trial"
    if tried is None:
        return 1.0, "no trial of all ranks: no overhead is counted"
    ranks, step_s = tried
    factor = calibrate_overhead(ranks, step_s, sum_cost.at(known.vector_bytes, len(ranks)))
    return (
        factor,
        f"a step of all ranks takes {factor:.2f} times as long as the slowest rank alone, by {source}",
    )


def _describe_choice(choice: Choice, num_nodes: int) -> str:
    limits = choice.limits(num_nodes)
    at_most = "" if limits.global_batch else "at most "
    best = f"the best with a global batch of {at_most}{limits.largest_global_batch:,}"
    if choice.is_planned:
        return f"for {num_nodes} nodes those of the plan, for others {best}"
    return f"for each number of nodes {best}"


def _describe_sums(sums: Sequence[CollectiveMeasurement]) -> str:
    if not sums:
        return NO_SUM
    ranks = [measurement.num_ranks for measurement in sums]
    counts = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
    return f"measured: a line fitted to {len(sums)} sums over {counts} ranks on such a fleet"


def _unknown(reason: str, remedy: str) -> InputError:
    """Return the error for a fleet or job without the measurements that a forecast needs."""
    published = f"or forecast with the paper's figures: --published {Network.MOBILENETV2}"
    return InputError(f"cannot forecast: {reason}", remedy=f"{remedy}; {published}")


def _recall(
    job: Job,
    project: ProjectDirectory,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    data: PreparedData | None,
    say: Say,
) -> Recalled:
    """Recall the measurements of `project`; raises InputError, and what building a new model raises."""
    if undiscovered := [name for name in fleet.machines if name not in facts or not is_ready(facts[name])]:
        raise _unknown(f"the facts of {format_node_names(undiscovered)} are unknown", "run `csdctl discover`")
    if not project.measurements.exists():
        raise _unknown("there are no measurements yet", TUNE)
    features = describe_job_model(job, project.root, say)
    recipe = hash_recipe(job, data.public) if data else NOT_PREPARED
    with open_measurements(project.measurements, say) as store:
        return _read(FleetMeasurements(features, recipe, fleet, facts, store), fleet.machines)


def _read(measurements: FleetMeasurements, machines: Sequence[str]) -> Recalled:
    classes = measurements.recall_classes()
    model_name = measurements.features.short_name
    if unknown := [name for known in classes.values() if not known.points for name in known.machines]:
        raise _unknown(
            f"{model_name}, with this recipe and form of data, was not measured on "
            f"{format_node_names(unknown)}",
            TUNE,
        )
    step_times = {name: known.step_time() for name, known in classes.items()}
    class_of = {machine: name for name, known in classes.items() for machine in known.machines}
    num_probes = sum(len(known.points) for known in classes.values())
    return Recalled(
        [RankModel(machine, step_times[class_of[machine]]) for machine in machines],
        f"measured: {num_probes} probes and trials of {model_name} on machines like these",
        measurements.features.vector_bytes,
        measurements.collectives(),
        measurements.recall_trial(step_times),
    )
