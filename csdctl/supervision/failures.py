"""Events and losses as errors, with their messages; pure."""

from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError, RunError
from csdctl.fleet.names import format_node_names
from csdctl.launch.diagnosis import find_cause
from csdctl.launch.mpi_job import JobOutcome
from csdctl.worker.protocol.events import Failed
from csdctl.worker.protocol.json_codec import ProtocolError

CHECK_WORKER = "check that machine: what runs there is damaged, or is not csdctl's worker"


def as_loss(failed: Failed) -> CsdctlError:
    """Return why a rank that failed on its own is lost."""
    return NodeError(failed.message, node=failed.node, remedy=failed.remedy)


def as_run_failure(failed: Failed) -> CsdctlError:
    """Return the error of a run that ends because a rank failed: an InputError stays one."""
    error = InputError if failed.exit_code == InputError.exit_code else RunError
    return error(failed.message, node=failed.node, remedy=failed.remedy)


def as_run_error(error: CsdctlError) -> CsdctlError:
    """Return the error of a run that ends because of `error`."""
    if isinstance(error, RunError):
        return error
    return RunError(error.message, node=error.node, remedy=error.remedy)


def at_fault(node: str, message: str) -> CsdctlError:
    """Return why a rank is lost that has sent the others what no rank may send."""
    return NodeError(
        message,
        node=node,
        remedy="look for failing memory, another version of csdctl or TensorFlow, or an intruder there",
    )


def misbehaved(node: str, violation: ProtocolError) -> CsdctlError:
    """Return why a rank is lost that sent what no worker sends."""
    return NodeError(
        f"sent an invalid event: {violation}",
        node=node,
        remedy=CHECK_WORKER,
    )


def finished_early(rank: int, node: str) -> CsdctlError:
    """Return why a rank is lost that reported completion while rank 0 was still training."""
    return NodeError(
        f"rank {rank} reported its completion before the run was complete", node=node, remedy=CHECK_WORKER
    )


def paused_early(rank: int, node: str) -> CsdctlError:
    """Return why a rank is lost that left its group unasked."""
    return NodeError(f"rank {rank} left the group without an order", node=node, remedy=CHECK_WORKER)


def keeps_failing(rank: int, node: str) -> CsdctlError:
    """Return why a rank is lost with which no group trains, although it answers."""
    return NodeError(
        f"rank {rank} does not join the others, or loses its link again and again",
        node=node,
        remedy="check the node and its network",
    )


def no_answer(rank: int, node: str) -> CsdctlError:
    """Return why a rank is lost that did not answer a ping after the loss of another rank."""
    return NodeError(
        f"lost: rank {rank} no longer answers (node down, link cut, or process stopped)",
        node=node,
        remedy="check the node",
    )


def stalled(rank: int, node: str) -> CsdctlError:
    """Return why a rank is lost that others wait for."""
    return NodeError(f"rank {rank} is stopped, or its machine hangs", node=node)


def nothing_sent(node: str) -> CsdctlError:
    """Return why a rank is lost that answers csdctl, but sends the other ranks nothing."""
    return NodeError(
        "has sent the other ranks nothing for too long, and all wait for it",
        node=node,
        remedy="look at the load of that machine, and at its network to the host; `csdctl doctor` tests it",
    )


def start_overdue(nodes: Sequence[str]) -> CsdctlError:
    """Return the error of a run in which `nodes` did not become ready."""
    return DeadlineError(
        f"{format_node_names(nodes)} did not start in time",
        remedy="raise --start-deadline, or check the log of the rank",
    )


def exit_overdue(nodes: Sequence[str], log_directory: Path) -> CsdctlError:
    """Return the error of a run in which `nodes` reported completion and did not exit."""
    return RunError(f"{format_node_names(nodes)} finished but did not exit", remedy=_logs(log_directory))


def silent(log_directory: Path) -> CsdctlError:
    """Return the error of a run without progress."""
    return DeadlineError(
        "no rank has completed a step for too long: the run hangs", remedy=f"see {_logs(log_directory)}"
    )


def no_group(reason: str, log_directory: Path) -> CsdctlError:
    """Return the error of a run that failed to form a new group."""
    return RunError(f"{reason}, and no new group could be formed", remedy=_logs(log_directory))


def incomplete(
    reason: str, loss: CsdctlError | None, missing: Sequence[str], log_directory: Path
) -> CsdctlError:
    """Return the error of a run in which some ranks finished and the nodes in `missing` cannot any more."""
    return RunError(
        f"{loss.message if loss else reason}\n"
        f"The run has no completion record from {format_node_names(missing)}",
        node=loss.node if loss else "",
        remedy=f"the model of the other ranks is in the run directory; {_logs(log_directory)}",
    )


def ranks_missing(num_ranks: int, losses: Sequence[CsdctlError]) -> CsdctlError:
    """Return the error of a run that cannot be resumed and has lost ranks it needs."""
    return RunError(
        f"all {num_ranks} ranks are required; lost:\n{_listed(losses)}",
        remedy="repair the lost nodes, then try again",
    )


def too_few_nodes(num_nodes: int, min_nodes: int, losses: Sequence[CsdctlError], run_id: str) -> CsdctlError:
    """Return the error of a run that has fewer nodes left than `--min-nodes`."""
    return RunError(
        f"nodes left: {num_nodes}, but --min-nodes is {min_nodes}; lost:\n{_listed(losses)}",
        remedy="repair the lost nodes, then resume from the last completed step: "
        f"csdctl train --resume {run_id}",
    )


def mpirun_failure(outcome: JobOutcome, rank_nodes: Sequence[str], log_directory: Path) -> CsdctlError:
    """Return why mpirun failed, from its stderr tail; `rank_nodes` are the machines of its ranks."""
    found = find_cause(outcome.stderr_tail, list(outcome.exited.values()), rank_nodes)
    return RunError(found.message, node=found.node, remedy=f"{found.remedy}; {_logs(log_directory)}")


def _listed(losses: Sequence[CsdctlError]) -> str:
    return "\n".join(f"  {error}" for error in losses)


def _logs(directory: Path) -> str:
    return f"logs: {directory}"
