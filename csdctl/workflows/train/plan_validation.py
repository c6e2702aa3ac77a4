"""Check whether a plan still fits the job and the machines as they are now."""

from collections.abc import Mapping, Sequence

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import classify_machine
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.job.values import describe_job, hash_own_files
from csdctl.tuning.plan import Plan
from csdctl.tuning.plan_fingerprint import PlanFingerprint, list_changes

RETUNE = "run `csdctl tune` again"
MAX_SHOWN = 8
UNKNOWN_CHANGE = "job, model or recipe changed since tuning"
"""The change to report for a plan without a fingerprint."""


def build_fingerprint(plan: Plan, job: Job, facts: Mapping[str, Facts]) -> PlanFingerprint:
    """Return the fingerprint of `job` and of the plan's machines that have facts, as they are now."""
    # The number of emulated nodes is not part of it: it changes when one of them is excluded.
    machines = {
        rank.node: classify_machine(facts[rank.node]).name for rank in plan.ranks if rank.node in facts
    }
    return PlanFingerprint(job=describe_job(job), files=hash_own_files(job), machines=machines)


def find_changes(plan: Plan, job: Job, facts: Mapping[str, Facts]) -> list[str]:
    """Return what has changed since `plan` was made, one line per change; empty when the plan fits."""
    changes = list_changes(plan.made_for, build_fingerprint(plan, job, facts)) if plan.made_for else []
    if plan.job_fingerprint != job.fingerprint() and not changes:
        return [UNKNOWN_CHANGE]
    return changes


def find_unplanned(plan: Plan, fleet: Fleet) -> list[str]:
    """Return the nodes of `fleet` that the plan neither uses nor leaves out."""
    known = {*(rank.node for rank in plan.ranks), *plan.left_out}
    return [node.name for node in fleet.nodes if node.name not in known]


def find_left_out(plan: Plan, fleet: Fleet) -> list[str]:
    """Return the nodes of `fleet` that the plan leaves out because training is faster without them."""
    planned = {rank.node for rank in plan.ranks}
    left_out = set(plan.left_out) - planned  # a rank that was added manually takes part
    return [node.name for node in fleet.nodes if node.name in left_out]


def check_plan(plan: Plan, job: Job, fleet: Fleet, facts: Mapping[str, Facts]) -> None:
    """Raise InputError for a plan that does not fit; the message lists what has changed."""
    if new := find_unplanned(plan, fleet):
        raise InputError(
            f"the plan does not include {', '.join(new)}",
            remedy=f"{RETUNE}, or train with --exclude {','.join(new)}",
        )
    if changes := find_changes(plan, job, facts):
        raise InputError(f"the plan does not fit {job.path}: {_list_changes(changes)}", remedy=RETUNE)


def _list_changes(changes: Sequence[str]) -> str:
    if list(changes) == [UNKNOWN_CHANGE]:
        return UNKNOWN_CHANGE
    shown = [*changes[:MAX_SHOWN]]
    if len(changes) > MAX_SHOWN:
        shown.append(f"and {len(changes) - MAX_SHOWN} more")
    return "".join(["changed since tuning:", *(f"\n  {change}" for change in shown)])
