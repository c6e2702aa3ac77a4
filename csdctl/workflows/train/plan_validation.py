"""Whether a plan still fits: what it was made for, and what the job and the machines are now."""

from collections.abc import Mapping, Sequence

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.machine_class import classify_machine
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.job.values import describe_job, hash_own_files
from csdctl.tuning.plan import Plan
from csdctl.tuning.plan_fingerprint import PlanFingerprint, list_changes

RETUNE = "run `csdctl tune` again"
MOST_SHOWN = 8
UNTOLD = "job, model or recipe changed since tuning"
"""When the plan does not say what it was made for."""


def describe_made_for(plan: Plan, job: Job, facts: Mapping[str, Facts]) -> PlanFingerprint:
    """What the plan's ranks and `job` are now; machines without facts are not in it."""
    # Without the number of emulated nodes: it is another one as soon as one of them stays out.
    machines = {
        rank.node: classify_machine(facts[rank.node]).name for rank in plan.ranks if rank.node in facts
    }
    return PlanFingerprint(job=describe_job(job), files=hash_own_files(job), machines=machines)


def find_changes(plan: Plan, job: Job, facts: Mapping[str, Facts]) -> list[str]:
    """What has changed since `plan` was made, a line each; none when it fits."""
    changes = list_changes(plan.made_for, describe_made_for(plan, job, facts)) if plan.made_for else []
    if plan.job_fingerprint != job.fingerprint() and not changes:
        return [UNTOLD]
    return changes


def find_unplanned(plan: Plan, fleet: Fleet) -> list[str]:
    """Nodes of `fleet` that the plan says nothing of, neither what they do nor that they stay out."""
    known = {*(rank.node for rank in plan.ranks), *plan.left_out}
    return [node.name for node in fleet.nodes if node.name not in known]


def find_left_out(plan: Plan, fleet: Fleet) -> list[str]:
    """Nodes of `fleet` that the plan leaves out: they would cost more time than they bring."""
    planned = {rank.node for rank in plan.ranks}
    left_out = set(plan.left_out) - planned  # a rank that was written in by hand takes part
    return [node.name for node in fleet.nodes if node.name in left_out]


def check_plan(plan: Plan, job: Job, fleet: Fleet, facts: Mapping[str, Facts]) -> None:
    """Refuse a plan that was made for something else; raises InputError that says for what."""
    if new := find_unplanned(plan, fleet):
        raise InputError(
            f"the plan has nothing for {', '.join(new)}",
            remedy=f"{RETUNE}, or train with --exclude {','.join(new)}",
        )
    if changes := find_changes(plan, job, facts):
        raise InputError(f"the plan does not fit {job.path}: {_list_changes(changes)}", remedy=RETUNE)


def _list_changes(changes: Sequence[str]) -> str:
    if list(changes) == [UNTOLD]:
        return UNTOLD
    shown = [*changes[:MOST_SHOWN]]
    if len(changes) > MOST_SHOWN:
        shown.append(f"and {len(changes) - MOST_SHOWN} more")
    return "".join(["changed since tuning:", *(f"\n  {one}" for one in shown)])
