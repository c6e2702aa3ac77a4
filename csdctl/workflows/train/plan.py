"""The plan that a run follows: the one on disk, if it still fits job and machines, or equal batch sizes."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from csdctl.errors import InputError, option
from csdctl.fleet.facts import Facts, facts_path, load_facts
from csdctl.fleet.hardware import choose_device, classify_machine
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job, describe_job, hash_own_files
from csdctl.notify import Say
from csdctl.tuning import plan as plans
from csdctl.tuning.plan import MAX_BATCH_SIZE, Plan, PlanFingerprint, RankPlan
from csdctl.worker.protocol.run_spec import Runtime

RETUNE = "run `csdctl tune` again"


def build_fingerprint(plan: Plan, job: Job, facts: Mapping[str, Facts]) -> PlanFingerprint:
    """Return the fingerprint of `job` and of the plan's machines that have facts, as they are now."""
    # The number of emulated nodes is not part of it: it changes when one of them is excluded.
    machines = {
        rank.node: classify_machine(facts[rank.node]).name for rank in plan.ranks if rank.node in facts
    }
    return PlanFingerprint(job=describe_job(job), files=hash_own_files(job), machines=machines)


def find_changes(plan: Plan, job: Job, facts: Mapping[str, Facts]) -> list[str]:
    """Return what has changed since `plan` was made.

    A changed number of epochs matters only if the plan compared strategies.
    """
    epochs = plan.made_for and plan.made_for.job.get("recipe.epochs")
    if isinstance(epochs, int) and sum(forecast.first_run_s is not None for forecast in plan.strategies) < 2:
        job = replace(job, recipe=replace(job.recipe, epochs=epochs))
    changes = plans.list_changes(plan.made_for, build_fingerprint(plan, job, facts)) if plan.made_for else []
    if plan.job_fingerprint != job.fingerprint() and not changes:
        return ["job, model or recipe"]
    return changes


def find_unplanned(plan: Plan, fleet: Fleet) -> list[str]:
    """Return the nodes of `fleet` that the plan neither uses nor leaves out."""
    planned = {*plan.nodes, *plan.left_out}
    return [node.name for node in fleet.nodes if node.name not in planned]


def find_left_out(plan: Plan, fleet: Fleet) -> list[str]:
    """Return the nodes of `fleet` that the plan leaves out because training is faster without them."""
    left_out = set(plan.left_out) - set(plan.nodes)  # a rank that was added manually takes part
    return [node.name for node in fleet.nodes if node.name in left_out]


def load_fitting_plan(path: Path, job: Job, fleet: Fleet, say: Say = lambda line: None) -> Plan:
    """Read a plan that fits the job and the fleet as they are now. Raises InputError that lists the changes.

    Machines are judged by the facts that `discover` saved. Ranks outside `fleet` are left out, and then the
    plan predicts nothing.
    """
    plan, facts = plans.load_plan(path), dict[str, Facts]()
    with suppress(InputError):  # damaged facts are collected again once the machines are connected
        saved = load_facts(fleet) if facts_path(fleet).exists() else {}
        facts = {name: machine for name, machine in saved.items() if not machine.problem}
    check_plan(plan, job, fleet, facts)
    ranks = [rank for rank in plan.ranks if rank.node in fleet.machines]
    if not any(rank.batch_size for rank in ranks):
        raise InputError("no selected machine trains in the plan", remedy=RETUNE)
    if absent := [rank.node for rank in plan.ranks if rank not in ranks]:
        say(f"{format_node_names(absent)} left out of the plan; others keep their batch sizes until you tune")
        plan = plan.with_ranks(ranks)
    return plan


def check_plan(plan: Plan, job: Job, fleet: Fleet, facts: Mapping[str, Facts]) -> None:
    """Raise InputError for a plan that does not fit. The message lists what has changed."""
    if new := find_unplanned(plan, fleet):
        problem = f"the plan does not include {', '.join(new)}"
        raise InputError(problem, remedy=f"{RETUNE}, or train with {option('exclude')} {','.join(new)}")
    if plan.ranks[0].batch_size and not fleet.host.trains:
        raise InputError(
            f"the plan trains on the host, but {fleet.path} says it does not train", remedy=RETUNE
        )
    changes = find_changes(plan, job, facts)
    for rank in plan.ranks:
        if rank.batch_size and rank.node in facts and rank.node in fleet.machines:
            device = choose_device(fleet, facts[rank.node])
            if device != rank.device:
                changes.append(f"{rank.node}: device {device}, was {rank.device} when tuned")
    if changes:
        lines = "\n  ".join(changes)
        raise InputError(
            f"the plan no longer fits {job.path}; changed since tuning:\n  {lines}", remedy=RETUNE
        )


def build_equal_plan(job: Job, fleet: Fleet, facts: Mapping[str, Facts], batch_size: int) -> Plan:
    """Return a plan of `batch_size` for host and nodes. Raises InputError if no plan may have that size."""
    if batch_size > MAX_BATCH_SIZE:
        raise InputError(f"batch size {batch_size:,} is too large", remedy=f"at most {MAX_BATCH_SIZE:,}")
    if not fleet.nodes and not fleet.host.trains:
        raise InputError("a host that does not train needs at least one node")
    return Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method="equal",
        emulated=fleet.emulated,
        ranks=[
            RankPlan.with_runtime(
                default_runtime(name, fleet, facts),
                node=name,
                batch_size=batch_size if fleet.host.trains or name != HOST_NAME else 0,
            )
            for name in fleet.machines
        ],
    )


def default_runtime(name: str, fleet: Fleet, facts: Mapping[str, Facts]) -> Runtime:
    """Return the runtime of a rank on machine `name` before any measurement: all cores it may use."""
    configured_threads = fleet.host.threads if name == HOST_NAME else None
    if name not in facts:
        return Runtime(configured_threads or 1)
    threads = configured_threads or min(facts[name].num_threads, plans.MAX_THREADS)
    return Runtime(threads, device=choose_device(fleet, facts[name]))
