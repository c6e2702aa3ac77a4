"""`doctor`: check whether a fleet is fit to train, with real connections and MPI, under a deadline.

In order: the host, the connection to every node, the state of each machine, the reachability of each pair,
and an MPI check over all machines that are fit so far. Later checks skip a machine that failed one.

Which pairs can connect, a small program on each machine finds, on all at once, over one conversation each:
listen, connect to the listeners of the others, exit.
"""

import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from csdctl.errors import (
    CsdctlError,
    DeadlineError,
    InputError,
    NodeError,
    NoNodeReachableError,
    PartialError,
)
from csdctl.facts.machine import collect_condition
from csdctl.fleet.checks import (
    FLEET_NAME,
    Check,
    ConnectAttempt,
    Status,
    failed_machines,
    judge_attempts,
    judge_error,
    judge_hostnames,
    judge_machine,
    judge_prefixes,
    pairs_to_try,
)
from csdctl.fleet.facts import Condition
from csdctl.fleet.model import HOST_NAME, Fleet, Level, keep_nodes
from csdctl.fleet.network import addresses_in, is_checked
from csdctl.launch.mpirun import find_mpirun, mpi_version
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger, record_traffic
from csdctl.transport.commands import build_program_command
from csdctl.transport.many import Outcome, errors_of, open_sessions, run_on_all
from csdctl.transport.program import MAX_TEXT_LENGTH, Patience, Program
from csdctl.transport.session import Deadline, Session
from csdctl.worker.protocol.json_codec import Between, MaxLength, ShortText
from csdctl.workflows.preflight.mpi_check import check_mpi
from csdctl.workflows.workspace.workspace import Workspace

CONNECT_DEADLINE_S = 3.0
MAX_LISTENERS = 2
FIRST_PORT, LAST_PORT = 1024, 65535
_DOING = "connecting to the other machines"
_REMEDY = "check its Python: `python3 -I -S -c 'import socket'`"

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
    program = Program(session, command, _DOING, patience, _REMEDY)
    try:
        request = {"name": session.name, "token": token, "address": address, "is_host": is_host}
        return PortListener(program, address, program.call(request, _Listening).ports)
    except BaseException:
        program.close()
        raise


def _connect(
    name: str, client: PortListener, others: Mapping[str, PortListener], deadline_s: float
) -> list[ConnectAttempt]:
    listeners = [(server, other.address, port) for server, other in others.items() for port in other.ports]
    request = {"listeners": listeners, "deadline_s": min(CONNECT_DEADLINE_S, deadline_s)}
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
    peer = fleet.node(level.machines[1] if name == HOST_NAME else name).address
    address = _local_address_towards(peer) if name == HOST_NAME else _resolve(peer)
    return address if address in own else next(iter(addresses_in("", own)), "127.0.0.1")


def _local_address_towards(address: str) -> str:
    """Return this machine's own address on the route to `address`, '' without a route; sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect((address, 9))
        return str(unsent.getsockname()[0])
    return ""


def _resolve(address: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(address)
    return ""


PROBE_DEADLINE_S = 60.0
REACHABILITY_DEADLINE_S = 20.0
REPAIR = "fix the red checks above"

OnCheck = Callable[[Check], None]


@dataclass
class Examination:
    """The checks so far; `on_check` is called with each of them as soon as it is known."""

    fleet: Fleet
    on_check: OnCheck
    checks: list[Check] = field(default_factory=list)
    overdue: str = ""
    """The part that was not finished when the deadline passed; '' when it did not pass."""

    def add(self, *checks: Check) -> None:
        """Record checks and pass each of them on."""
        for check in checks:
            self.checks.append(check)
            self.on_check(check)

    @property
    def red(self) -> list[str]:
        """The machines with a red check; including `fleet` when a check of the whole fleet is red."""
        return failed_machines(self.checks)

    def check(self) -> None:
        """Raise the error that determines the exit code; do nothing when no check is red."""
        nodes = [node.name for node in self.fleet.nodes]
        unreachable = [
            check.machine for check in self.checks if check.check == "reach" and check.status == Status.FAIL
        ]
        if set(nodes) <= set(unreachable):
            raise NoNodeReachableError(f"no node of {self.fleet.path} can be reached", remedy=REPAIR)
        if self.overdue:
            raise DeadlineError(
                f"the deadline passed while {self.overdue}", remedy="raise --timeout, or check fewer nodes"
            )
        if HOST_NAME in self.red:
            raise CsdctlError("the host is not fit to train", remedy=REPAIR)
        red = [name for name in nodes if name in self.red]
        if red and len(red) == len(nodes):
            raise CsdctlError(f"none of the {len(nodes)} nodes is fit to train", remedy=REPAIR)
        if FLEET_NAME in self.red:
            raise CsdctlError("the machines cannot train together", remedy=REPAIR)
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


@dataclass(frozen=True)
class DoctorOptions:
    """Deadlines in seconds: of the whole examination, of one connection, and of the MPI check."""

    deadline_s: float = 180.0
    connect_deadline_s: float = 10.0
    mpi_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in (
            ("timeout", self.deadline_s),
            ("connect-timeout", self.connect_deadline_s),
            ("mpi-timeout", self.mpi_deadline_s),
        ):
            if not value >= 1:
                raise InputError(f"--{name} must be at least 1 second, received {value:g}")


def examine(
    fleet: Fleet,
    directory: Path,
    options: DoctorOptions,
    on_check: OnCheck = lambda check: None,
    sessions: Mapping[str, Session] | None = None,
) -> Examination:
    """Examine the host and all nodes of `fleet`; red checks are in the result, not raised.

    `sessions` that are open to all of them; None: they are opened, which is a check too.
    """
    examination = Examination(fleet, on_check)
    clock = Deadline(options.deadline_s)
    _examine_host(examination)

    def on_connected(outcome: Outcome[Session]) -> None:
        examination.add(_judge_connection(outcome))
        _check_clock(clock, "connecting")

    try:
        with contextlib.ExitStack() as stack:
            if sessions is None:
                connections = open_sessions(
                    fleet,
                    directory=directory,
                    connect_deadline_s=min(options.connect_deadline_s, clock.left_s),
                    on_done=on_connected,
                    on_traffic=record_traffic(directory, "doctor"),
                )
                sessions = stack.enter_context(connections).reachable
            _examine_machines(examination, sessions, directory, options, clock)
    except DeadlineError as error:
        examination.overdue = error.message
    return examination


def _examine_machines(
    examination: Examination,
    sessions: Mapping[str, Session],
    directory: Path,
    options: DoctorOptions,
    clock: Deadline,
) -> None:
    """Examine each machine, then pairs, then all; raises DeadlineError that names the unfinished part."""
    fleet = examination.fleet
    conditions = _measure(examination, sessions, clock)
    for level in fleet.levels(name for name in conditions if name not in examination.red):
        examination.add(*judge_prefixes(conditions[name] for name in level.machines[1:]))
        if not fleet.emulated:
            examination.add(*judge_hostnames(conditions[name] for name in level.machines))
    fit = [name for name in conditions if name not in examination.red]
    for level in fleet.levels(fit):
        if is_checked(level.network):
            _check_clock(clock, "checking which machines can connect")
            deadline_s = min(REACHABILITY_DEADLINE_S, clock.left_s)
            examination.add(*check_reachability(level, fleet, sessions, conditions, deadline_s))
    if not fleet.nodes:
        return  # the host trains alone
    fit = [name for name in fit if name not in examination.red]
    if HOST_NAME not in fit or len(fit) == 1:
        why = "not tried: " + ("the host is red" if HOST_NAME not in fit else "no node is fit")
        examination.add(Check(FLEET_NAME, "allreduce", Status.WARN, why, remedy=REPAIR))
        return
    _check_clock(clock, "starting the MPI check")
    deadline_s = max(1.0, min(options.mpi_deadline_s, clock.left_s))
    project = ProjectDirectory(directory)
    ledger = Ledger(project.ledger, "doctor")
    space = Workspace(project, keep_nodes(fleet, fit), {**conditions}, {**sessions}, ledger)
    for check in check_mpi(space, deadline_s):
        examination.add(check)
    ledger.save()


def _examine_host(examination: Examination) -> None:
    """Check mpirun, which connects the ranks."""
    try:
        examination.add(Check(HOST_NAME, "mpirun", Status.OK, f"{find_mpirun()} ({mpi_version()})"))
    except CsdctlError as error:
        examination.add(judge_error(HOST_NAME, "mpirun", error))


def _judge_connection(outcome: Outcome[Session]) -> Check:
    if outcome.error:
        return judge_error(outcome.name, "reach", outcome.error)
    assert outcome.value is not None
    return Check(outcome.name, "reach", Status.OK, outcome.value.host_key_fingerprint)


def _measure(
    examination: Examination, sessions: Mapping[str, Session], clock: Deadline
) -> dict[str, Condition]:
    """Return the condition of every machine that responds; judge them once the host has responded."""
    fleet = examination.fleet
    found: dict[str, Condition] = {}
    judged: set[str] = set()

    def measure(session: Session) -> Condition:
        python = fleet.python_of(session.name)
        deadline_s = min(PROBE_DEADLINE_S, clock.left_s)
        return collect_condition(session, python, deadline_s=deadline_s)

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


def _check_clock(clock: Deadline, doing: str) -> None:
    if clock.has_passed:
        raise DeadlineError(doing)
