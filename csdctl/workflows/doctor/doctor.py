"""`doctor`: connect to every node, and examine all machines under a deadline."""

from collections.abc import Callable
from pathlib import Path

from csdctl.errors import CsdctlError, DeadlineError, NoNodeReachableError, PartialError, option
from csdctl.fleet.checks import Check, Status, judge_error
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import format_node_names
from csdctl.runs.ledger import record_traffic
from csdctl.transport.many import Outcome, open_sessions
from csdctl.transport.session import Deadline, Session
from csdctl.workflows.preflight.examination import REPAIR, Examination, check_clock, examine


def examine_fleet(
    fleet: Fleet,
    directory: Path,
    on_check: Callable[[Check], None],
    *,
    deadline_s: float = 180.0,
    connect_deadline_s: float = 10.0,
    mpi_deadline_s: float = 60.0,
) -> Examination:
    """Examine host and nodes. Red checks are in the result."""
    examination = Examination(fleet, on_check)
    clock = Deadline(deadline_s)

    def on_connected(outcome: Outcome[Session]) -> None:
        if outcome.error:
            examination.add(judge_error(outcome.name, "reach", outcome.error))
        else:
            key = outcome.get().host_key_fingerprint
            examination.add(Check(outcome.name, "reach", Status.OK, key))
        check_clock(clock, "connecting")

    try:
        connections = open_sessions(
            fleet,
            directory=directory,
            connect_deadline_s=min(connect_deadline_s, clock.left_s),
            on_done=on_connected,
            on_traffic=record_traffic(directory, "doctor"),
        )
        with connections as opened:
            examine(examination, directory, opened.reachable, clock, mpi_deadline_s=mpi_deadline_s)
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def check_fitness(examination: Examination) -> None:
    """Raise the error that determines the exit code. Do nothing when no check is red."""
    nodes = [node.name for node in examination.fleet.nodes]
    unreachable = {check.machine for check in examination.failed if check.check == "reach"}
    if unreachable.issuperset(nodes):
        problem = f"cannot reach {format_node_names(nodes)} of {examination.fleet.path}"
        raise NoNodeReachableError(problem, remedy=REPAIR)
    if examination.overdue:
        remedy = f"raise {option('timeout')}, or check fewer nodes"
        raise DeadlineError(f"the deadline passed while {examination.overdue}", remedy=remedy)
    red = [name for name in nodes if name in examination.red]
    if examination.red.keys() - {*red} or (red and len(red) == len(nodes)):  # the host, all nodes, or MPI
        raise CsdctlError(f"not fit to train: {format_node_names(examination.red)}", remedy=REPAIR)
    if red:
        raise PartialError(
            f"{len(red)} of {len(nodes)} nodes are not fit to train: {', '.join(red)}",
            remedy=f"{REPAIR}, or leave them out: {option('exclude')} {','.join(red)}",
        )
