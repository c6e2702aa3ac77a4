"""The basis of a forecast for the user's own job: what `tune` measured.

For the fleet as it is, the plan predicts the training: its batch sizes, and the result of its trial. Other
numbers of nodes follow from the stored measurements, with the batch sizes that `tune` would choose for them.
Without measurements the plan is used alone, with fixed batch sizes; without a plan, the measurements are.
A forecast is of data-parallel training: it does not use the batch sizes of a split.
"""

from collections.abc import Mapping
from dataclasses import replace

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts, facts_path, load_facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.perfmodel.published import Network
from csdctl.reporting.numbers import format_seconds
from csdctl.runs.directory import ProjectDirectory
from csdctl.tuning.plan import Plan, load_plan
from csdctl.tuning.strategies import DATA_PARALLEL, SPLIT
from csdctl.workflows.data.prepared_record import PreparedData, load_prepared
from csdctl.workflows.forecast.basis import ForecastBasis
from csdctl.workflows.forecast.measured_basis import measured_basis
from csdctl.workflows.forecast.plan_basis import plan_basis
from csdctl.workflows.forecast.recall import TUNE, Unknown, recall
from csdctl.workflows.train.plan import find_changes, find_unplanned

NO_FLEET = Unknown("there is no fleet file", f"write fleet.yaml and {TUNE}")


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
    and what building a new model raises.
    """
    data = load_prepared(project, job)
    facts = load_facts(fleet) if fleet and facts_path(fleet).exists() else {}
    plan, why_no_plan = _load_valid_plan(job, project, fleet, facts)
    if max_global_batch is not None:
        plan, why_no_plan = None, "another limit of the global batch is requested"
    known = recall(job, project, fleet, facts, data, say) if fleet else NO_FLEET
    notes = _describe_strategy(plan) if plan else {}
    if plan and plan.strategy == SPLIT:
        plan, why_no_plan = None, "its batch sizes are those of a model that is split"
    if plan and (isinstance(known, Unknown) or known.is_guessed):
        basis = plan_basis(job, plan)
        why_not = known.reason if isinstance(known, Unknown) else "only similar models were measured"
        notes["measurements"] = f"not used: {why_not}"
    elif isinstance(known, Unknown):
        raise _nothing_known(job, why_no_plan, known)
    else:
        assert fleet is not None  # nothing is recalled without a fleet
        samples = num_samples or (data.num_samples if data else None)
        basis = measured_basis(job, fleet, plan, known, samples, max_global_batch)
        if why_no_plan:
            notes["plan"] = f"not used: {why_no_plan}"
    if data:
        notes["samples"] = _describe_samples(data)
    return replace(basis, origins={**basis.origins, **notes}, num_samples=data.num_samples if data else None)


def _load_valid_plan(
    job: Job, project: ProjectDirectory, fleet: Fleet | None, facts: Mapping[str, Facts]
) -> tuple[Plan | None, str]:
    """Return the plan of `job` if training would follow it; else None and why, '' when there is none."""
    path = project.plan(job.name)
    if not path.exists():
        return None, ""
    plan = load_plan(path)
    nodes = [rank.node for rank in plan.ranks if rank.node != HOST_NAME]
    if plan.ranks[0].node != HOST_NAME:
        return None, f"{path}: the first rank is not `{HOST_NAME}`"
    if changes := find_changes(plan, job, facts):
        return None, f"the plan does not match {job.path}: {'; '.join(changes)}"
    is_for_fleet = fleet is None or (
        set(nodes) <= {node.name for node in fleet.nodes} and not find_unplanned(plan, fleet)
    )
    if not is_for_fleet:
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


def _nothing_known(job: Job, why_no_plan: str, known: Unknown) -> InputError:
    return InputError(
        f"cannot forecast {job.path}: {why_no_plan or 'there is no plan'}, and {known.reason}",
        remedy=f"{known.remedy}; or forecast with the paper's figures: --published {Network.MOBILENETV2}",
    )


def _describe_samples(data: PreparedData) -> str:
    private = sum(data.num_private.values())
    where = f" and {private:,} private on {len(data.num_private)} nodes" if data.num_private else ""
    return f"{data.public.num_samples:,} public{where}, as last prepared"
