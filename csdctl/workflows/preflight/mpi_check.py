"""The MPI check: a real mpirun, with the options of training, over ranks that only call MPI_Init and sum.

Also mpirun for a run: which machines can confine MPI, and what is said where one cannot.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from csdctl.errors import CsdctlError, RunError
from csdctl.fleet.checks import FLEET_NAME, Check, Status, judge_error
from csdctl.fleet.model import HOST_NAME, Fleet, Level
from csdctl.fleet.names import format_node_names
from csdctl.launch.leftovers import end_run
from csdctl.launch.mpi_job import JobOutcome, add_mpirun_traffic, add_rank_traffic, find_cause
from csdctl.launch.mpirun import Mpirun, RankCommand, list_peers, rank_marker
from csdctl.runs.directory import RunDirectory
from csdctl.runs.ledger import Ledger
from csdctl.shipping.deliver import Delivery, deliver
from csdctl.shipping.payload import pack_payload
from csdctl.shipping.store import StoredFile, store_bytes
from csdctl.shipping.worker_calls import build_worker_command, call_worker
from csdctl.shipping.worker_zip import pack_worker
from csdctl.transport.many import errors_of, run_on_all
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import within
from csdctl.transport.session import Session
from csdctl.worker.protocol.events import (
    SUMS,
    CollectiveTimed,
    Event,
    Failed,
    Finished,
    Misbehaved,
    MpiChecked,
    Ready,
    Started,
    Traffic,
)
from csdctl.worker.protocol.orders import STAR
from csdctl.worker.protocol.sandbox import SandboxCheck, SandboxRequest
from csdctl.workflows.workspace.workspace import Workspace

CHECK_DEADLINE_S = 30.0


def prepare_mpirun(
    space: Workspace,
    run: RunDirectory,
    sessions: Mapping[str, Session],
    worker_path: str,
    obstacles: Mapping[str, str],
    link_key: str = "",
) -> Mpirun:
    """Return mpirun for ranks on the machines of `sessions`; `obstacles` as found by `find_obstacles`.

    A session that is replaced in `sessions`, after a lost connection, is used from then on.
    """
    fleet = space.fleet

    def build_command(machine: str, arguments: Sequence[str]) -> list[str]:
        return build_worker_command(fleet.python_of(machine), worker_path, arguments)

    return Mpirun(fleet, space.facts, run, sessions, worker_path, build_command, obstacles, link_key)


def find_obstacles(fleet: Fleet, sessions: Mapping[str, Session], worker_path: str) -> dict[str, str]:
    """Return the machines of `sessions` that cannot run MPI in a sandbox, and why.

    The worker must have been delivered to them.
    """
    checks = check_sandboxes(fleet, sessions, worker_path)
    return {name: check.obstacle for name, check in checks.items() if check.obstacle}


def check_sandboxes(
    fleet: Fleet, sessions: Mapping[str, Session], worker_path: str
) -> dict[str, SandboxCheck]:
    """Return what each machine of `sessions` can do for a sandbox; the worker must have been delivered."""
    levels = fleet.levels(fleet.machines)

    def check(session: Session) -> SandboxCheck:
        networks = [level.network for level in levels if session.name in level.machines] or [fleet.network]
        request = SandboxRequest(tuple(peer for network in networks for peer in list_peers(network)))
        return call_worker(
            session,
            fleet.python_of(session.name),
            worker_path,
            "sandbox-check",
            request,
            SandboxCheck,
            doing="checking the sandbox",
            patience=within(CHECK_DEADLINE_S),
        )

    outcomes = run_on_all(sessions, check)
    return {name: outcome.value or SandboxCheck(str(outcome.error)) for name, outcome in outcomes.items()}


def judge_sandbox(machine: str, check: SandboxCheck) -> Check:
    """Return the check of one machine: a warning when it cannot run a sandbox."""
    if not check.obstacle:
        return Check(machine, "sandbox", Status.OK, "MPI is confined")
    remedy = (
        "trust every node, or leave the machine out: with it, a run takes the connections of anybody who "
        "reaches its ports, which are open at all addresses there (docs/explanation/security.md)"
    )
    return Check(machine, "sandbox", Status.WARN, check.obstacle, "MPI in a sandbox", remedy)


def judge_listeners(fleet: Fleet, checks: Mapping[str, SandboxCheck]) -> list[Check]:
    """Return a warning for each machine, or for the fleet, whose MPI listens outside of `network:` too."""
    expected = "MPI's ports closed outside of `network:`"
    if not all(level.network for level in fleet.levels(fleet.machines)):
        found = "no `network:`: MPI's ports answer at all addresses, and a token alone keeps strangers out"
        remedy = "set `network:` in the fleet file to the network that all machines share"
        return [Check(FLEET_NAME, "listeners", Status.WARN, found, expected, remedy)]
    remedy = (
        "set `network:` to one that has a single address of the machine, or close other ways by a firewall"
    )
    return [
        Check(name, "listeners", Status.WARN, check.why_open, expected, remedy)
        for name, check in checks.items()
        if check.why_open and not fleet.emulated
    ]


SINGLE_DEADLINE_S = 15.0
MAX_SINGLE_CHECKS = 8
"""Nodes that are checked one by one, at the same time."""
SUMS_DEADLINE_S = 120.0

TRY_PRTED = "run `prted --version` on the node, and check firewalls between node and host"
CHECK_CULPRIT = "look for failing memory, another version of csdctl, or an intruder there"
CHECK_WORKER = "check those machines: what runs there is damaged, or is not csdctl's worker"
CHECK_NETWORK = "check firewalls and `network:` in the fleet file"


def check_mpi(space: Workspace, deadline_s: float) -> Iterator[Check]:
    """Start a rank on the host and on every node of `space`, sum, and yield the resulting checks.

    `deadline_s` limits MPI_Init, and again the sums. No process is left running.
    """
    fleet = space.fleet
    worker = store_bytes(pack_worker(), ".pyz", space.project.root, TrafficClass.CODE)
    payload = pack_payload([worker])

    def send(session: Session) -> Delivery:
        return deliver(session, payload, python=fleet.python_of(session.name))

    sessions = {name: space.sessions[name] for name in fleet.machines}
    nodes = {name: session for name, session in sessions.items() if name != HOST_NAME}
    if errors := errors_of(run_on_all(nodes, send)):
        yield from (judge_error(name, "deploy", error) for name, error in errors.items())
        return
    sandboxes = check_sandboxes(fleet, sessions, worker.path)
    for name in fleet.machines:
        yield judge_sandbox(name, sandboxes[name])
    yield from judge_listeners(fleet, sandboxes)
    obstacles = {name: found.obstacle for name, found in sandboxes.items() if found.obstacle}
    for level in fleet.levels(fleet.machines):
        yield from _check_level(space, worker, obstacles, level, deadline_s)


def _check_level(
    space: Workspace, worker: StoredFile, obstacles: Mapping[str, str], level: Level, deadline_s: float
) -> Iterator[Check]:
    """Check the machines of `level` together and, when no rank starts, each of the others alone."""
    check, has_started = _check_machines(space, worker, obstacles, level, level.machines, deadline_s)
    if len(space.fleet.levels(space.fleet.machines)) > 1:
        check = replace(check, found=f"{level.name}: {check.found}")
    yield check
    nodes = level.machines[1:]
    if not has_started and len(nodes) > 1:
        # mpirun starts no rank before every daemon has connected, and does not name the missing one.
        single_s = min(deadline_s, SINGLE_DEADLINE_S)

        def check_alone(name: str) -> Check:
            ledger = Ledger(space.project.ledger, "doctor")  # one of its own: it is of one thread
            own_space = replace(space, ledger=ledger)
            check, _ = _check_machines(own_space, worker, obstacles, level, (name,), single_s)
            ledger.save()
            return replace(check, machine=name, found=f"alone: {check.found}")

        outcomes = run_on_all({name: name for name in nodes}, check_alone, max_workers=MAX_SINGLE_CHECKS)
        alone = [outcome.value for outcome in outcomes.values() if outcome.value]
        yield from (check for check in alone if check.status != Status.OK)


def measure_sums(space: Workspace, sizes: Sequence[tuple[int, int]]) -> list[CollectiveTimed]:
    """Time sums over (the first N ranks, N bytes each) for each pair in `sizes`; the host is rank 0.

    Of several servers, that of the largest tunnel, with at most N ranks, and that of the servers are added.
    The worker must have been delivered. Raises RunError when a rank fails, CsdctlError without mpirun.
    """
    fleet = space.fleet
    levels = fleet.levels(fleet.machines) or (Level(HOST_NAME, fleet.machines, fleet.network),)
    timed: dict[tuple[int, int], float] = dict.fromkeys(sizes, 0.0)
    for level in {max(levels[:-1] or levels, key=lambda one: len(one.machines)), levels[-1]}:
        limited = {pair: (min(pair[0], len(level.machines)), pair[1]) for pair in timed}
        found = _measure_level(space, level, sorted(set(limited.values())))
        timed = {pair: timed[pair] + found[limited[pair]] for pair in timed if limited[pair] in found}
    return [
        CollectiveTimed(0, HOST_NAME, num_ranks, num_bytes, STAR, sum_s)
        for (num_ranks, num_bytes), sum_s in timed.items()
    ]


def _measure_level(
    space: Workspace, level: Level, sizes: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Return the seconds of those sums of `sizes` that were not too long to be timed."""
    fleet = space.fleet
    worker = store_bytes(pack_worker(), ".pyz", space.project.root, TrafficClass.CODE)
    obstacles = find_obstacles(fleet, {name: space.sessions[name] for name in fleet.machines}, worker.path)
    sums = ",".join(f"{num_ranks}:{num_bytes}" for num_ranks, num_bytes in sizes)
    arguments = ["--sums", sums] if sums else []
    check, events = _run_check(space, worker, obstacles, level, level.machines, SUMS_DEADLINE_S, arguments)
    if check.status != Status.OK:
        raise RunError(f"sums over the ranks could not be measured: {check.found}", remedy=check.remedy)
    timed = (event for event in events if isinstance(event, CollectiveTimed))
    return {(event.num_ranks, event.num_bytes): event.sum_s for event in timed}


def _check_machines(
    space: Workspace,
    worker: StoredFile,
    obstacles: Mapping[str, str],
    level: Level,
    machines: Sequence[str],
    deadline_s: float,
) -> tuple[Check, bool]:
    """Run mpirun over `machines`; return the check, and False when mpirun ran without starting a rank."""
    try:
        check, events = _run_check(space, worker, obstacles, level, machines, deadline_s)
    except CsdctlError as error:
        return judge_error(FLEET_NAME, "allreduce", error), True
    return check, bool(events)


def _run_check(
    space: Workspace,
    worker: StoredFile,
    obstacles: Mapping[str, str],
    level: Level,
    machines: Sequence[str],
    deadline_s: float,
    arguments: Sequence[str] = (),
) -> tuple[Check, list[Event]]:
    """Run the worker's MPI check over `machines` of `level`, in order of rank; return its result, all events.

    The machines have the worker. No process is left running on any machine; logs stay when the result is not
    OK. Raises CsdctlError.
    """
    scratch = space.project.new_scratch()
    sessions = {name: space.sessions[name] for name in {*machines, level.machines[0]}}
    mpirun = prepare_mpirun(space, scratch, sessions, worker.path, obstacles)
    pythons = {name: space.fleet.python_of(name) for name in machines}
    commands = []
    for rank, name in enumerate(machines):
        command = ["mpi-check", "--rank", str(rank), "--size", str(len(machines)), "--node", name]
        command += [*arguments, "--marker", rank_marker(scratch.run_id, name)]
        commands.append(
            RankCommand(rank, name, tuple(build_worker_command(pythons[name], worker.path, command)))
        )
    job = mpirun.build_job(commands, level)
    try:
        outcome = job.run(deadline_s)
        traffic = [event for event in outcome.events if isinstance(event, Traffic)]
        space.ledger.add(add_rank_traffic(traffic, machines, {SUMS: TrafficClass.CONTROL}))
        space.ledger.add(add_mpirun_traffic([outcome], space.fleet))
    finally:
        end_run(scratch.run_id, {name: space.sessions[name] for name in machines}, pythons)
    check = judge_mpi_check(machines, outcome, deadline_s, scratch.logs)
    if check.status == Status.OK:
        shutil.rmtree(scratch.path, ignore_errors=True)
    return check, outcome.events


def judge_mpi_check(machines: Sequence[str], outcome: JobOutcome, deadline_s: float, logs: Path) -> Check:
    """Return the check of the fleet that follows from one MPI check; `machines` in order of rank."""
    results = [event for event in outcome.events if isinstance(event, MpiChecked)]
    is_whole = len(outcome.of_type(Finished)) == len(results) == len(machines)
    if is_whole and not outcome.of_type(Failed):
        return _judge_results(results)
    expected = f"a response over MPI from {len(machines)} machines within {deadline_s:g} s"
    found, remedy = _find_failure(machines, outcome, deadline_s)
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


def _find_failure(machines: Sequence[str], outcome: JobOutcome, deadline_s: float) -> tuple[str, str]:
    """Return what went wrong, and the remedy."""

    def without(kind: type[Event]) -> list[str]:
        """Return the machines of which no event of this type has come."""
        found = outcome.of_type(kind)
        return [name for rank, name in enumerate(machines) if rank not in found]

    for event in outcome.events:
        if isinstance(event, Misbehaved) and event.rank == 0 and 0 < event.culprit < len(machines):
            return f"{machines[event.culprit]}: {event.message}", CHECK_CULPRIT
    for failed in outcome.of_type(Failed).values():
        return f"{failed.node}: {failed.message}", failed.remedy
    unfinished = without(Finished)
    if silent := [name for name in without(MpiChecked) if name not in unfinished]:
        return f"{', '.join(silent)} ended the check without the result of its sum", CHECK_WORKER
    missing = without(Started)
    if outcome.is_overdue and len(missing) == len(machines):
        found = f"no rank was started within {deadline_s:g} s: the MPI daemon (prted) of a node is missing"
        return found, TRY_PRTED
    if outcome.is_overdue and missing:
        return f"{format_node_names(missing)} never started a rank within {deadline_s:g} s", TRY_PRTED
    if outcome.is_overdue and (stuck := without(Ready)):
        found = f"{', '.join(stuck)} started but did not complete MPI_Init within {deadline_s:g} s"
        return found, CHECK_NETWORK
    if outcome.is_overdue:
        return f"all ranks completed MPI_Init, but their sum hung for {deadline_s:g} s", CHECK_NETWORK
    cause = find_cause(outcome.stderr_tail, outcome.events, machines, outcome.starter)
    where = f"{cause.node}: " if cause.node else ""
    never_started = f" ({format_node_names(missing)} never started a rank)" if missing else ""
    return f"{where}{cause.message}{never_started}", CHECK_NETWORK
