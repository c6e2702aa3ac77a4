"""`doctor`: check whether a fleet is fit to train, with real connections and MPI, under a deadline.

In order: the host, the connection to every node, the state of each machine, the reachability of each pair,
and an MPI check over all machines that are fit so far. Later checks skip a machine that failed one.

Which pairs can connect, a small program on each machine finds, on all at once, over one conversation each:
listen, connect to the listeners of the others, exit. The MPI check is a real mpirun, with the options of
training, over ranks that only call MPI_Init and sum. A run gets its mpirun here, too: which machines can
confine MPI, and what is said where one cannot.
"""

import contextlib
import ipaddress
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from csdctl.errors import CsdctlError, DeadlineError, NodeError, NoNodeReachableError, PartialError, RunError
from csdctl.facts.machine import CONDITION_FACTS, collect
from csdctl.fleet.checks import (
    FLEET_NAME,
    LARGE_PACKETS,
    Check,
    ConnectAttempt,
    Status,
    judge_addresses,
    judge_attempts,
    judge_error,
    judge_hostnames,
    judge_machine,
    judge_prefixes,
    pairs_to_try,
)
from csdctl.fleet.facts import Condition
from csdctl.fleet.model import HOST_NAME, Fleet, Level, keep_nodes
from csdctl.fleet.names import format_node_names
from csdctl.fleet.network import addresses_in, is_checked, resolve
from csdctl.launch.leftovers import end_run
from csdctl.launch.mpi_job import JobOutcome, add_mpirun_traffic, add_rank_traffic, find_cause
from csdctl.launch.mpirun import Mpirun, find_mpirun, list_peers, mpi_version
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger, record_traffic
from csdctl.shipping.deliver import Delivery, deliver
from csdctl.shipping.payload import pack_payload
from csdctl.shipping.store import StoredFile, store_bytes
from csdctl.shipping.worker_calls import call_worker
from csdctl.shipping.worker_zip import pack_worker
from csdctl.transport.commands import build_program_command
from csdctl.transport.many import Outcome, errors_of, open_sessions, run_on_all
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import MAX_TEXT_LENGTH, Patience, Program, within
from csdctl.transport.session import Deadline, Session
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
from csdctl.worker.protocol.json_codec import Between, MaxLength, ShortText
from csdctl.worker.protocol.orders import STAR
from csdctl.worker.protocol.sandbox import SandboxCheck, SandboxRequest
from csdctl.workflows.workspace.workspace import Workspace

MAX_LISTENERS = 2
GREETING_BYTES = 1 << 16  # it fills packets
FIRST_PORT, LAST_PORT = 1024, 65535

Port = Annotated[int, Between(FIRST_PORT, LAST_PORT)]
"""Never one below those that ranks use: the other machines connect to it."""


@dataclass(frozen=True)
class _Listening:
    """The answer of the program that listens."""

    ports: Annotated[tuple[Port, ...], MaxLength(MAX_LISTENERS)]


@dataclass(frozen=True)
class _Attempted:
    """The answer of the program that connects: name, port, and reason of failure of each attempt."""

    attempts: tuple[tuple[ShortText, Port, str], ...]


@dataclass(frozen=True)
class PortListener:
    """The program on one machine, and the address and ports where it listens."""

    program: Program
    address: str
    ports: tuple[int, ...]


def check_reachability(
    level: Level,
    fleet: Fleet,
    sessions: Mapping[str, Session],
    conditions: Mapping[str, Condition],
    deadline_s: float,
    ledger: Ledger,
) -> list[Check]:
    """Return a check for every machine of `level`: whether the pairs that connect in training can."""
    token = secrets.token_hex(8)

    def start(session: Session) -> PortListener:
        address = _listen_address(session.name, level, fleet, conditions)
        return _start_listener(session, fleet.python_of(session.name), address, token, deadline_s)

    outcomes = run_on_all({name: sessions[name] for name in level.machines}, start)
    listeners = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
    servers = pairs_to_try(level.machines)

    def connect_to_others(name: str) -> list[ConnectAttempt]:
        others = {server: listeners[server] for server in servers[name] if server in listeners}
        return _connect(name, listeners[name], others, deadline_s)

    try:
        tried = run_on_all({name: name for name in listeners}, connect_to_others)
    finally:
        run_on_all(listeners, lambda listener: listener.program.close())
    errors = errors_of(outcomes) | errors_of(tried)
    attempts = [attempt for outcome in tried.values() for attempt in outcome.value or ()]
    for tried_pair in (attempt for attempt in attempts if not attempt.reason):
        ledger.add({(tried_pair.server, tried_pair.client, TrafficClass.CONTROL): GREETING_BYTES})
    judged = judge_attempts(list(listeners), attempts)
    return [judge_error(name, "ports", error) for name, error in errors.items()] + [
        check for check in judged if check.machine not in errors or check.status != Status.OK
    ]


def _start_listener(
    session: Session, python: str, address: str, token: str, deadline_s: float
) -> PortListener:
    is_host = session.name == HOST_NAME
    patience = Patience(deadline_s, 2 * deadline_s, 2 * deadline_s)  # for two requests
    command = build_program_command(python, "reachability")
    remedy = "check its Python: `python3 -I -S -c 'import socket'`"
    program = Program(session, command, "connecting to the other machines", patience, remedy)
    try:
        request = {"name": session.name, "token": token, "address": address, "is_host": is_host}
        request["num_bytes"] = GREETING_BYTES
        return PortListener(program, address, program.call(request, _Listening).ports)
    except BaseException:
        program.close()
        raise


def _connect(
    name: str, client: PortListener, others: Mapping[str, PortListener], deadline_s: float
) -> list[ConnectAttempt]:
    listeners = [(server, other.address, port) for server, other in others.items() for port in other.ports]
    request = {"listeners": listeners, "deadline_s": min(3.0, deadline_s)}
    attempts = client.program.call(request, _Attempted).attempts
    if [attempt[:2] for attempt in attempts] != [listener[::2] for listener in listeners]:
        problem = f"received {len(attempts)} attempts to connect that are not the {len(listeners)} wanted"
        raise client.program.error(problem)
    return [
        ConnectAttempt(name, server, address, port, reason[:MAX_TEXT_LENGTH])
        for (server, address, port), (_, _, reason) in zip(listeners, attempts, strict=True)
    ]


def _listen_address(name: str, level: Level, fleet: Fleet, conditions: Mapping[str, Condition]) -> str:
    """Return an address in `network:`, else the one that the machine is reached at, else any of its own."""
    own = conditions[name].addresses or ()
    if level.network:
        return next(iter(addresses_in(level.network, own)), "0.0.0.0")
    head = level.machines[0]
    peer = fleet.node(level.machines[1] if name == head else name).address
    if name == HOST_NAME:
        address = _local_address_towards(peer)
    elif name == head:  # another server, in its tunnel
        address = _nearest_address(peer, own)
    else:
        address = resolve(peer)
    return address if address in own else next(iter(addresses_in("", own)), "127.0.0.1")


def _local_address_towards(address: str) -> str:
    """Return this machine's own address on the route to `address`, '' without a route; sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect((address, 9))
        return str(unsent.getsockname()[0])
    return ""


def _nearest_address(address: str, own: Iterable[str]) -> str:
    """Return which of a machine's `own` IPv4 addresses shares the most leading bits with `address`."""
    with contextlib.suppress(ValueError):
        wanted = int(ipaddress.IPv4Address(address))
        found = addresses_in("", own)
        return min(found, key=lambda one: int(ipaddress.IPv4Address(one)) ^ wanted, default="")
    return ""


REPAIR = "fix the red checks above"


@dataclass
class Examination:
    """The checks so far; `on_check` is called with each of them as soon as it is known."""

    fleet: Fleet
    on_check: Callable[[Check], None]
    checks: list[Check] = field(default_factory=list)
    overdue: str = ""
    """The part that was not finished when the deadline passed; '' when it did not pass."""

    def add(self, *checks: Check) -> None:
        """Record checks and pass each of them on."""
        for check in checks:
            self.checks.append(check)
            self.on_check(check)

    @property
    def red(self) -> dict[str, CsdctlError]:
        """The first red check of each machine that has one; and of `fleet`, the whole fleet."""
        return {
            check.machine: NodeError(describe(check), remedy=check.remedy)
            for check in reversed(self.checks)
            if check.status == Status.FAIL
        }

    def check(self) -> None:
        """Raise the error that determines the exit code; do nothing when no check is red."""
        nodes = [node.name for node in self.fleet.nodes]
        unreachable = [
            check.machine for check in self.checks if check.check == "reach" and check.status == Status.FAIL
        ]
        if set(nodes) <= set(unreachable):
            names = format_node_names(nodes)
            raise NoNodeReachableError(f"cannot reach {names} of {self.fleet.path}", remedy=REPAIR)
        if self.overdue:
            raise DeadlineError(
                f"the deadline passed while {self.overdue}", remedy="raise --timeout, or check fewer nodes"
            )
        red = [name for name in nodes if name in self.red]
        if self.red.keys() - {*red} or (red and len(red) == len(nodes)):  # the host, all nodes, or MPI
            raise CsdctlError(f"not fit to train: {format_node_names(self.red)}", remedy=REPAIR)
        if red:
            raise PartialError(
                f"{len(red)} of {len(nodes)} nodes are not fit to train: {', '.join(red)}",
                remedy=f"{REPAIR}, or leave them out: --exclude {','.join(red)}",
            )

    def check_before_training(self) -> None:
        """Raise one error that lists all red checks; for a command that shows no table."""
        red = [check for check in self.checks if check.status == Status.FAIL]
        if len(red) == 1 and red[0].machine != FLEET_NAME:
            raise NodeError(describe(red[0]), node=red[0].machine, remedy=red[0].remedy)
        if red:
            listed = "\n".join(
                f"  {check.machine}: {describe(check)}" + (f"\n    → {check.remedy}" if check.remedy else "")
                for check in red
            )
            raise CsdctlError(
                f"the preflight found problems that would make the run fail:\n{listed}",
                remedy="fix them, leave nodes out with --exclude, or train anyway with --skip-doctor",
            )
        if self.overdue:
            raise DeadlineError(
                f"the preflight's deadline passed while {self.overdue}", remedy="--skip-doctor"
            )


def describe(check: Check) -> str:
    """Return a check in one line, without machine and remedy."""
    return f"{check.check}: {check.found}" + (f" (expected {check.expected})" if check.expected else "")


def examine(
    fleet: Fleet,
    directory: Path,
    on_check: Callable[[Check], None] = lambda check: None,
    sessions: Mapping[str, Session] | None = None,
    *,
    deadline_s: float = 180.0,
    connect_deadline_s: float = 10.0,
    mpi_deadline_s: float = 60.0,
) -> Examination:
    """Examine the host and all nodes of `fleet`; red checks are in the result, not raised.

    `sessions` that are open to all of them; None: they are opened, which is a check too. Deadlines are of the
    whole examination, of one connection, and of the MPI check.
    """
    examination = Examination(fleet, on_check)
    clock = Deadline(deadline_s)
    try:
        examination.add(Check(HOST_NAME, "mpirun", Status.OK, f"{find_mpirun()} ({mpi_version()})"))
    except CsdctlError as error:
        examination.add(judge_error(HOST_NAME, "mpirun", error))

    def on_connected(outcome: Outcome[Session]) -> None:
        if outcome.error:
            examination.add(judge_error(outcome.name, "reach", outcome.error))
        else:
            key = outcome.get().host_key_fingerprint
            examination.add(Check(outcome.name, "reach", Status.OK, key))
        _check_clock(clock, "connecting")

    try:
        with contextlib.ExitStack() as stack:
            if sessions is None:
                connections = open_sessions(
                    fleet,
                    directory=directory,
                    connect_deadline_s=min(connect_deadline_s, clock.left_s),
                    on_done=on_connected,
                    on_traffic=record_traffic(directory, "doctor"),
                )
                sessions = stack.enter_context(connections).reachable
            _examine_machines(examination, sessions, directory, mpi_deadline_s, clock)
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def _examine_machines(
    examination: Examination,
    sessions: Mapping[str, Session],
    directory: Path,
    mpi_deadline_s: float,
    clock: Deadline,
) -> None:
    """Examine each machine, then pairs, then all; raises DeadlineError that names the unfinished part."""
    fleet = examination.fleet
    conditions = _measure(examination, sessions, clock)
    examination.add(*judge_addresses(node for node in fleet.nodes if node.name in conditions))
    for level in fleet.levels(name for name in conditions if name not in examination.red):
        examination.add(*judge_prefixes(conditions[name] for name in level.machines[1:]))
        if not fleet.emulated:
            examination.add(*judge_hostnames(conditions[name] for name in level.machines))
    fit = [name for name in conditions if name not in examination.red]
    project = ProjectDirectory(directory)
    ledger = Ledger(project.ledger, "doctor")
    for level in fleet.levels(fit):
        if is_checked(level.network):
            _check_clock(clock, "checking which machines can connect")
            deadline_s = min(20.0, clock.left_s)
            examination.add(*check_reachability(level, fleet, sessions, conditions, deadline_s, ledger))
    ledger.save()
    if not fleet.nodes:
        return  # the host trains alone
    fit = [name for name in fit if name not in examination.red]
    if HOST_NAME not in fit or len(fit) == 1:
        why = "not tried: " + ("the host is red" if HOST_NAME not in fit else "no node is fit")
        examination.add(Check(FLEET_NAME, "allreduce", Status.WARN, why, remedy=REPAIR))
        return
    _check_clock(clock, "starting the MPI check")
    deadline_s = max(1.0, min(mpi_deadline_s, clock.left_s))
    space = Workspace(project, keep_nodes(fleet, fit), {**conditions}, {**sessions}, ledger)
    for check in check_mpi(space, deadline_s):
        examination.add(check)
    ledger.save()


def _measure(
    examination: Examination, sessions: Mapping[str, Session], clock: Deadline
) -> dict[str, Condition]:
    """Return the condition of every machine that responds; judge them once the host has responded."""
    fleet = examination.fleet
    found: dict[str, Condition] = {}
    judged: set[str] = set()

    def measure(session: Session) -> Condition:
        python = fleet.python_of(session.name)
        try:  # full packets, in both directions
            session.run(["cat"], stdin=bytes(1 << 16), deadline_s=min(20.0, clock.left_s))
        except DeadlineError as error:
            message = f"64 KiB did not come back: {error.message}"
            raise NodeError(message, node=session.name, remedy=LARGE_PACKETS) from None
        deadline_s = min(60.0, clock.left_s)
        return collect(session, python, CONDITION_FACTS, Condition, deadline_s)

    def on_measured(outcome: Outcome[Condition]) -> None:
        if outcome.value:
            found[outcome.name] = outcome.value
        elif outcome.error:
            examination.add(judge_error(outcome.name, "probe", outcome.error))
        if HOST_NAME in found:
            for name in [name for name in found if name not in judged]:
                judged.add(name)
                examination.add(*judge_machine(found[name], found[HOST_NAME], fleet))
        _check_clock(clock, "probing the machines")

    run_on_all(sessions, measure, on_done=on_measured)
    return {name: found[name] for name in sessions if name in found}


def explain_failure(error: CsdctlError, space: Workspace) -> None:
    """Add to the error of a run what is wrong now with its node, or with any machine if it names none."""
    examination = Examination(space.fleet, on_check=lambda check: None)
    names = {HOST_NAME, error.node} if error.node else {*space.sessions}
    with contextlib.suppress(DeadlineError):
        _measure(examination, {name: space.sessions[name] for name in names}, Deadline(20.0))
    for check in examination.checks:
        is_wrong = check.status == Status.FAIL or (check.check, check.status) == ("limits", Status.WARN)
        if is_wrong and check.check != "probe" and check.machine == (error.node or check.machine):
            error.message += f"; probably because of this, on {check.machine}: {describe(check)}"
            error.remedy = f"{check.remedy}; {error.remedy}"


def _check_clock(clock: Deadline, doing: str) -> None:
    if clock.has_passed:
        raise DeadlineError(doing)


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
            patience=within(30.0),
        )

    outcomes = run_on_all(sessions, check)
    return {name: outcome.value or SandboxCheck(str(outcome.error)) for name, outcome in outcomes.items()}


def judge_sandbox(machine: str, check: SandboxCheck) -> Check:
    """Return the check of one machine: a warning when it cannot run a sandbox."""
    if not check.obstacle:
        return Check(machine, "sandbox", Status.OK, "MPI is sandboxed")
    remedy = (
        "exclude the machine, or accept the risk: without a sandbox, MPI there accepts connections from "
        "anyone who can reach its ports"
    )
    return Check(machine, "sandbox", Status.WARN, check.obstacle, "MPI in a sandbox", remedy)


def judge_listeners(fleet: Fleet, checks: Mapping[str, SandboxCheck]) -> list[Check]:
    """Return a warning for each machine, or for the fleet, whose MPI listens outside of `network:` too."""
    expected = "MPI's ports closed outside of `network:`"
    if not all(level.network for level in fleet.levels(fleet.machines)):
        found = "no `network:`: MPI listens on all addresses, and only a token keeps others out"
        remedy = "set `network:` in the fleet file to the network that all machines share"
        return [Check(FLEET_NAME, "listeners", Status.WARN, found, expected, remedy)]
    remedy = (
        "set `network:` to one that has a single address of the machine, or block the others with a firewall"
    )
    return [
        Check(name, "listeners", Status.WARN, check.why_open, expected, remedy)
        for name, check in checks.items()
        if check.why_open and not fleet.emulated
    ]


SUMS_DEADLINE_S = 120.0

TRY_PRTED = "run `prted --version` on the node, and check firewalls between node and host"
CHECK_CULPRIT = "check that machine for failing memory, another version of csdctl, or an intruder"
CHECK_WORKER = "check those machines: their workers are damaged or are not csdctl's"
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

    def check_machines(space: Workspace, machines: Sequence[str], deadline_s: float) -> tuple[Check, bool]:
        """Run mpirun over `machines`; return the check, and False when it ran without starting a rank."""
        try:
            check, events = _run_check(space, worker, obstacles, level, machines, deadline_s)
        except CsdctlError as error:
            return judge_error(FLEET_NAME, "allreduce", error), True
        return check, bool(events)

    check, has_started = check_machines(space, level.machines, deadline_s)
    if len(space.fleet.levels(space.fleet.machines)) > 1:
        check = replace(check, found=f"{level.name}: {check.found}")
    yield check
    nodes = level.machines[1:]
    if not has_started and len(nodes) > 1:
        # mpirun starts no rank before every daemon has connected, and does not name the missing one.
        single_s = min(deadline_s, 15.0)

        def check_alone(name: str) -> Check:
            ledger = Ledger(space.project.ledger, "doctor")  # one of its own: it is of one thread
            own_space = replace(space, ledger=ledger)
            check, _ = check_machines(own_space, (name,), single_s)
            ledger.save()
            return replace(check, machine=name, found=f"alone: {check.found}")

        outcomes = run_on_all({name: name for name in nodes}, check_alone, max_workers=8)
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
    mpirun = Mpirun(space.fleet, space.facts, scratch, sessions, worker.path, obstacles)
    commands = []
    for rank, name in enumerate(machines):
        command = ["mpi-check", "--rank", str(rank), "--size", str(len(machines)), "--node", name, *arguments]
        commands.append((rank, name, command))
    job = mpirun.build_job(commands, level)
    try:
        outcome = job.run(deadline_s)
        traffic = [event for event in outcome.events if isinstance(event, Traffic)]
        space.ledger.add(add_rank_traffic(traffic, machines, {SUMS: TrafficClass.TEST_SUMS}))
        space.ledger.add(add_mpirun_traffic([outcome], space.fleet))
    finally:
        end_run(scratch.run_id, {name: space.sessions[name] for name in machines}, space.fleet)
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
        return f"all ranks completed MPI_Init, but their sum hung for {deadline_s:g} s", LARGE_PACKETS
    cause = find_cause(outcome)
    where = f"{cause.node}: " if cause.node else ""
    never_started = f" ({format_node_names(missing)} never started a rank)" if missing else ""
    return f"{where}{cause.message}{never_started}", CHECK_NETWORK
