"""Choose the plan to follow: the checked plan on disk, or the same batch size on every rank."""

from collections.abc import Mapping
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.tuning.plan import MAX_BATCH_SIZE, MAX_THREADS, Plan, RankPlan, load_plan
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.train.plan_validation import check_plan, find_left_out
from csdctl.workflows.workspace.workspace import Workspace

GIVE_ONE = "give one of them"


def check_one_source(path: Path | None, batch_size: int | None) -> None:
    """Raise InputError for a plan and a batch size for all ranks at once."""
    if path and batch_size:
        raise InputError(
            "--plan and --batch-size contradict each other: a plan has the batch size of each rank",
            remedy=GIVE_ONE,
        )


def resolve_plan(
    job: Job, space: Workspace, say: Say, *, path: Path | None = None, batch_size: int | None = None
) -> Plan:
    """Return the plan at `path` (default: the job's own), or one with `batch_size` on every rank.

    Reports the nodes that the plan leaves out. Raises InputError for a plan that is missing or does not fit.
    """
    if batch_size:
        return build_equal_plan(job, space.fleet, space.facts, batch_size)
    plan = load_checked_plan(path or space.project.plan(job.name), job, space)
    if left_out := find_left_out(plan, space.fleet):
        say(f"the plan leaves out {format_node_names(left_out)}: training is faster without them")
    return plan


def load_checked_plan(path: Path, job: Job, space: Workspace) -> Plan:
    """Read a plan and check that it fits the job and the fleet as they are now; raises InputError."""
    plan = load_plan(path)
    check_plan(plan, job, space.fleet, space.facts)
    return plan


def build_equal_plan(job: Job, fleet: Fleet, facts: Mapping[str, Facts], batch_size: int) -> Plan:
    """Return a plan without tuning: `batch_size` on the host and on every node of `fleet`.

    Raises InputError for a batch size that no plan may have.
    """
    if batch_size > MAX_BATCH_SIZE:
        raise InputError(f"batch size {batch_size:,} is too large", remedy=f"at most {MAX_BATCH_SIZE:,}")
    return Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method="equal",
        emulated=fleet.emulated,
        ranks=[
            RankPlan(node=name, batch_size=batch_size, threads=default_runtime(name, fleet, facts).threads)
            for name in fleet.machines
        ],
    )


def default_runtime(name: str, fleet: Fleet, facts: Mapping[str, Facts]) -> Runtime:
    """Return the runtime of a rank on machine `name` before any measurement: all cores it may use."""
    if name == HOST_NAME and fleet.host.threads:
        return Runtime(fleet.host.threads)
    return Runtime(min(facts[name].num_threads, MAX_THREADS) if name in facts else 1)
