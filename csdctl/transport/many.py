"""Many machines in parallel: a bounded thread pool that keeps every outcome, and the sessions of a fleet.

A machine that fails neither stops the other machines nor hides their results.
"""

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from csdctl.errors import (
    CsdctlError,
    InputError,
    NodeError,
    NoNodeReachableError,
    PartialError,
    UnreachableError,
)
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.local import LocalSession
from csdctl.transport.meter import LinkBytes, add_up
from csdctl.transport.session import Session, bounded
from csdctl.worker.protocol.limits import FILES, FILES_PER_NODE, RAISE, explain_error

if TYPE_CHECKING:
    from csdctl.transport.ssh import SshSession

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

OnTraffic = Callable[[LinkBytes], None]

MAX_WORKERS = 128
"""Concurrent threads. They wait for machines, so there may be far more than cores.

A connection has two threads and one more for each command, and takes 0.2 MB.
"""
CONNECT_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Outcome(Generic[ResultT]):
    """The result of one machine: a value or an error."""

    name: str
    value: ResultT | None = None
    error: CsdctlError | None = None

    def get(self) -> ResultT:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


@dataclass(frozen=True)
class Sessions:
    """The open sessions of a fleet by name (`host` is the host), and the errors of unreachable nodes."""

    reachable: dict[str, Session]
    failed: dict[str, CsdctlError]


def run_on_all(
    items: Mapping[str, ItemT],
    function: Callable[[ItemT], ResultT],
    *,
    max_workers: int = MAX_WORKERS,
    on_done: Callable[[Outcome[ResultT]], None] = lambda outcome: None,
) -> dict[str, Outcome[ResultT]]:
    """Call `function` for all `items` in parallel. Return outcomes in the order of `items`.

    `on_done` is called in the calling thread when an item has finished. Unexpected exceptions become
    NodeError, with the original as cause. Ctrl-C cancels items that have not started, and waits for no item.
    """
    if not items:
        return {}
    executor = ThreadPoolExecutor(min(max_workers, len(items)), thread_name_prefix="csdctl")
    try:
        calls = {name: executor.submit(_call, name, item, function) for name, item in items.items()}
        for call in as_completed(calls.values()):
            on_done(call.result())
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
    return {name: call.result() for name, call in calls.items()}


def errors_of(outcomes: Mapping[str, Outcome[ResultT]]) -> dict[str, CsdctlError]:
    """Return the errors by machine. Empty when none failed."""
    return {name: outcome.error for name, outcome in outcomes.items() if outcome.error}


def values_or_raise(outcomes: Mapping[str, Outcome[ResultT]], doing: str) -> dict[str, ResultT]:
    """Return all values. If machines failed, raise one error, of the type that all errors have."""
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    if not errors:
        return {name: outcome.get() for name, outcome in outcomes.items()}
    error_type: type[CsdctlError] = CsdctlError if len(errors) == len(outcomes) else PartialError
    if all(isinstance(error, InputError) for error in errors):
        error_type = InputError
    elif error_type is CsdctlError and all(isinstance(error, UnreachableError) for error in errors):
        error_type = NoNodeReachableError
    if len(errors) == 1 and error_type is not PartialError:
        raise errors[0]
    raise error_type(f"{doing} failed:\n" + "\n".join(f"  {error}" for error in errors)) from errors[0]


class Connections:
    """The connections of one command to a fleet. The caller closes it."""

    def __init__(
        self,
        fleet: Fleet,
        directory: Path,
        on_traffic: OnTraffic,
        connect_deadline_s: float = CONNECT_DEADLINE_S,
    ) -> None:
        """`on_traffic` gets the byte counts at the end."""
        from csdctl.transport import ssh  # paramiko takes 0.1 s to load

        self._connect = ssh.connect
        self._jumps = ssh.JumpHosts(KnownHosts.load(fleet_known_hosts_paths(fleet, directory)))
        self._connect_deadline_s = connect_deadline_s
        self._on_traffic = on_traffic
        self._open: set[Session] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def close(self) -> None:
        """End what runs on the machines, and close all connections."""
        with self._lock:
            self._is_over = True
            sessions = {str(number): session for number, session in enumerate(self._open)}
        # Before the jump hosts, because commands on nodes are ended over these sessions.
        run_on_all(sessions, lambda session: session.close())
        self._jumps.close()
        self._on_traffic(add_up(self._jumps.opened))

    def connect(self, node: Node) -> "SshSession":
        """Open a session to `node`. Raises UnreachableError, HostKeyError or AuthenticationError."""
        session = self._connect(node, self._jumps, connect_deadline_s=self._connect_deadline_s)
        self.keep(session)
        return session

    def keep(self, session: Session) -> Session:
        """Close `session` with the other connections. Raises UnreachableError if they are closed already."""
        with self._lock:
            if not self._is_over:
                self._open.add(session)
                return session
        session.close()
        raise UnreachableError("interrupted", node=session.name)

    def close_session(self, session: Session) -> None:
        """Close one session."""
        session.close()
        with self._lock:
            self._open.discard(session)


def run_on_nodes(
    fleet: Fleet,
    function: Callable[[Session], ResultT],
    *,
    directory: Path,
    connect_deadline_s: float = CONNECT_DEADLINE_S,
    on_done: Callable[[Outcome[ResultT]], None] = lambda outcome: None,
    on_traffic: OnTraffic = lambda sent: None,
    has_host: bool = False,
) -> dict[str, Outcome[ResultT]]:
    """Connect to each node of `fleet`, call `function` with its session, and close the session.

    At most MAX_WORKERS connections are open at a time. `on_done` as in `run_on_all`. `on_traffic` gets the
    byte counts at the end. `has_host`: also the host. Ctrl-C ends what runs on the machines.
    """
    nodes = {node.name: node for node in fleet.nodes}
    num_at_once = min(len(nodes), MAX_WORKERS, allow_open_files(len(nodes)))
    host: dict[str, Node | Session] = {HOST_NAME: _open_host(fleet, directory)} if has_host else {}
    connections = Connections(fleet, directory, on_traffic, connect_deadline_s)

    def visit(machine: Node | Session) -> ResultT:
        session = connections.connect(machine) if isinstance(machine, Node) else connections.keep(machine)
        try:
            return function(session)
        finally:
            connections.close_session(session)

    with contextlib.closing(connections):
        return run_on_all(host | nodes, visit, max_workers=num_at_once + has_host, on_done=on_done)


@contextlib.contextmanager
def open_sessions(
    fleet: Fleet,
    *,
    directory: Path,
    connect_deadline_s: float = CONNECT_DEADLINE_S,
    on_done: Callable[[Outcome[Session]], None] = lambda outcome: None,
    on_traffic: OnTraffic = lambda sent: None,
) -> Iterator[Sessions]:
    """Open one session to each node of `fleet`, and one to the host in `directory`. Close all at exit."""
    check_open_files(len(fleet.nodes))
    nodes = {node.name: node for node in fleet.nodes}
    with contextlib.closing(Connections(fleet, directory, on_traffic, connect_deadline_s)) as connections:
        host = connections.keep(_open_host(fleet, directory))
        outcomes = run_on_all(nodes, connections.connect, on_done=on_done)
        opened = {name: outcome.get() for name, outcome in outcomes.items() if not outcome.error}
        yield Sessions({HOST_NAME: host, **opened}, errors_of(outcomes))


def _open_host(fleet: Fleet, directory: Path) -> LocalSession:
    return LocalSession(HOST_NAME, directory, fleet.host.env)


def fleet_known_hosts_paths(fleet: Fleet, directory: Path) -> tuple[Path, ...]:
    """Return the known_hosts files for `fleet`, in order.

    csdctl's own files in `directory` and beside the fleet file come first, then ssh's files. An emulated
    fleet has a file of its own. If the fleet file is inside a .csdctl directory, known_hosts there counts.
    """
    beside = fleet.path.absolute().parent
    enclosing = [parent for parent in (beside, *beside.parents) if parent.name == ".csdctl"]
    states = [directory.absolute() / ".csdctl", beside / ".csdctl", *enclosing]
    folders = ("", "emulated") if fleet.emulated else ("",)
    paths = [state / folder / "known_hosts" for state in states for folder in folders]
    return tuple(dict.fromkeys([*paths, Path.home() / ".ssh/known_hosts", Path("/etc/ssh/ssh_known_hosts")]))


def _call(name: str, item: ItemT, function: Callable[[ItemT], ResultT]) -> Outcome[ResultT]:
    try:
        return Outcome(name, value=function(item))
    except CsdctlError as error:
        return Outcome(name, error=error)
    except Exception as cause:
        why = explain_error(str(cause))
        unexpected = NodeError(bounded(f"unexpected {type(cause).__name__}: {cause}{why}"), node=name)
        unexpected.__cause__ = cause
        return Outcome(name, error=unexpected)


def allow_open_files(num_connections: int) -> int:
    """Raise the soft limit of open files as far as allowed. Return how many connections fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return num_connections if hard == resource.RLIM_INFINITY else max(1, (hard - FILES) // FILES_PER_NODE)


def check_open_files(num_connections: int) -> None:
    """Raise InputError when the system allows too few open files for this many connections at a time."""
    if allow_open_files(num_connections) < num_connections:
        raise InputError(
            f"{num_connections} nodes need {FILES + FILES_PER_NODE * num_connections} open files, but "
            f"`ulimit -n` is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}",
            remedy=f"{RAISE}; or use fewer nodes at a time",
        )
