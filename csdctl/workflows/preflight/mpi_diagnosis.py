"""The result of an MPI check from its events and mpirun's outcome; pure."""

from collections.abc import Sequence
from pathlib import Path

from csdctl.fleet.checks import FLEET_NAME, Check, Status
from csdctl.fleet.names import format_node_names
from csdctl.launch.diagnosis import find_cause
from csdctl.launch.mpi_job import JobOutcome
from csdctl.worker.protocol.events import Event, Misbehaved, MpiChecked, Started

TRY_PRTED = "run `prted --version` on the node, and check firewalls between node and host"
CHECK_CULPRIT = "look for failing memory, another version of csdctl, or an intruder there"
CHECK_WORKER = "check those machines: what runs there is damaged, or is not csdctl's worker"
CHECK_NETWORK = "check firewalls and `network:` in the fleet file"


def judge_mpi_check(
    machines: Sequence[str], events: Sequence[Event], outcome: JobOutcome, deadline_s: float, logs: Path
) -> Check:
    """Return the check of the fleet that follows from one MPI check; `machines` in order of rank."""
    results = [event for event in events if isinstance(event, MpiChecked)]
    if len(outcome.finished) == len(results) == len(machines) and not outcome.failed:
        return _judge_results(results)
    expected = f"a response over MPI from {len(machines)} machines within {deadline_s:g} s"
    found, remedy = _find_failure(machines, events, outcome, deadline_s)
    remedy = f"{remedy}; logs: {logs}"
    return Check(FLEET_NAME, "allreduce", Status.FAIL, found, expected, remedy)


def _judge_results(results: Sequence[MpiChecked]) -> Check:
    libraries = {event.mpi_library for event in results}
    if len(libraries) > 1:
        found = "; ".join(f"{event.node} uses {event.mpi_library}" for event in results)
        remedy = "install one version of openmpi everywhere"
        return Check(FLEET_NAME, "allreduce", Status.FAIL, found, "one MPI on all machines", remedy)
    slowest_s = max(event.sum_s for event in results)
    size = results[0].vector_bytes >> 20
    found = f"{len(results)} ranks, {libraries.pop()}, a sum of {size} MiB in {slowest_s * 1000:.1f} ms"
    return Check(FLEET_NAME, "allreduce", Status.OK, found)


def _find_failure(
    machines: Sequence[str], events: Sequence[Event], outcome: JobOutcome, deadline_s: float
) -> tuple[str, str]:
    """Return what went wrong, and the remedy."""
    for event in events:
        if isinstance(event, Misbehaved) and event.rank == 0 and 0 < event.culprit < len(machines):
            return f"{machines[event.culprit]}: {event.message}", CHECK_CULPRIT
    if outcome.failed:
        first = next(iter(outcome.failed.values()))
        return f"{first.node}: {first.message}", first.remedy
    summed = {event.node for event in events if isinstance(event, MpiChecked)}
    finished = {event.node for event in outcome.finished.values()}
    if silent := [name for name in machines if name in finished - summed]:
        return f"{', '.join(silent)} ended the check without the result of its sum", CHECK_WORKER
    started = {event.node for event in events if isinstance(event, Started)}
    missing = [name for name in machines if name not in started]
    if outcome.overdue and not started:
        found = f"no rank was started within {deadline_s:g} s: the MPI daemon (prted) of a node is missing"
        return found, TRY_PRTED
    if outcome.overdue and missing:
        return f"{format_node_names(missing)} never started a rank within {deadline_s:g} s", TRY_PRTED
    if outcome.overdue == "start":
        stuck = [name for rank, name in enumerate(machines) if rank not in outcome.ready]
        found = f"{', '.join(stuck)} started but did not complete MPI_Init within {deadline_s:g} s"
        return found, CHECK_NETWORK
    if outcome.overdue:
        return f"all ranks completed MPI_Init, but their sum hung for {deadline_s:g} s", CHECK_NETWORK
    cause = find_cause(outcome.stderr_tail, list(outcome.exited.values()), machines)
    where = f"{cause.node}: " if cause.node else ""
    never_started = f" ({format_node_names(missing)} never started a rank)" if missing else ""
    return f"{where}{cause.message}{never_started}", CHECK_NETWORK
