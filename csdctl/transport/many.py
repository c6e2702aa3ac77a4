"""Many machines in parallel: a bounded thread pool that keeps every outcome, and the sessions of a fleet.

A machine that fails never stops the others and never hides their results.
"""

import contextlib
import gc
import queue
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from csdctl.errors import (
    CsdctlError,
    InputError,
    NodeError,
    NoNodeReachableError,
    PartialError,
    UnreachableError,
)
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.transport.known_hosts import KnownHosts, known_hosts_paths
from csdctl.transport.local import LocalSession
from csdctl.transport.meter import LinkBytes, add_up
from csdctl.transport.session import Session, bounded

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

OnTraffic = Callable[[LinkBytes], None]

MAX_WORKERS = 128
"""Concurrent threads. They wait for machines, so there may be far more than cores; a connection has two
threads and takes 0.2 MB."""

_SPARE_FILES = 64


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


@dataclass
class Sessions:
    """The open sessions of a fleet by name (`host` is the host), and the errors of unreachable nodes."""

    reachable: dict[str, Session] = field(default_factory=dict)
    failed: dict[str, CsdctlError] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[str, Session]:
        """The sessions without that of the host."""
        return {name: session for name, session in self.reachable.items() if name != HOST_NAME}


def run_on_all(
    items: Mapping[str, ItemT],
    function: Callable[[ItemT], ResultT],
    *,
    max_workers: int = MAX_WORKERS,
    on_done: Callable[[Outcome[ResultT]], None] = lambda outcome: None,
) -> dict[str, Outcome[ResultT]]:
    """Call `function` for all `items` in parallel; return outcomes in the order of `items`.

    `on_done` is called in the calling thread as each item finishes. Unexpected exceptions become NodeError,
    with the original as cause. Ctrl-C cancels items that have not started and does not wait for the others.
    """
    if not items:
        return {}
    executor = ThreadPoolExecutor(min(max_workers, len(items)), thread_name_prefix="csdctl")
    outcomes: dict[str, Outcome[ResultT]] = {}
    finished: queue.SimpleQueue[Future[Outcome[ResultT]]] = queue.SimpleQueue()

    def take_finished() -> None:
        outcome = finished.get().result()
        outcomes[outcome.name] = outcome
        on_done(outcome)

    try:
        for name, item in items.items():
            executor.submit(_call, name, item, function).add_done_callback(finished.put)
            # Show first results while the last threads start, which takes seconds on a busy machine.
            while not finished.empty():
                take_finished()
        while len(outcomes) < len(items):
            take_finished()
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
    return {name: outcomes[name] for name in items}


def errors_of(outcomes: Mapping[str, Outcome[ResultT]]) -> dict[str, CsdctlError]:
    """Return the errors by machine; empty when none failed."""
    return {name: outcome.error for name, outcome in outcomes.items() if outcome.error}


def values_or_raise(outcomes: Mapping[str, Outcome[ResultT]], doing: str) -> dict[str, ResultT]:
    """Return all values; if machines failed, raise one error for all of them.

    Raises InputError when all errors are InputErrors, NoNodeReachableError when no machine could be reached,
    PartialError when some machines succeeded, CsdctlError when none did.
    """
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


def run_on_nodes(
    fleet: Fleet,
    function: Callable[[Session], ResultT],
    *,
    directory: Path,
    known_hosts: Sequence[Path] | None = None,
    connect_deadline_s: float = 10.0,
    max_workers: int = MAX_WORKERS,
    on_done: Callable[[Outcome[ResultT]], None] = lambda outcome: None,
    on_traffic: OnTraffic = lambda sent: None,
    host: Session | None = None,
) -> dict[str, Outcome[ResultT]]:
    """Connect to each node of `fleet`, call `function` with its session, and close the session.

    For fleets of any size: at most `max_workers` connections are open at a time. `known_hosts` and `on_done`
    are those of `open_sessions` and `run_on_all`; `on_traffic` gets the byte counts at the end. With `host`,
    `function` is called with this session too. Ctrl-C ends what runs on the machines.
    """
    connect, make_jump_hosts = _load_ssh()
    known = KnownHosts.load(fleet_known_hosts_paths(fleet, directory) if known_hosts is None else known_hosts)
    nodes = {node.name: node for node in fleet.nodes}
    num_at_once = min(len(nodes), max_workers, allow_open_files(len(nodes)))
    machines: dict[str, Node | Session] = {host.name: host} if host else {}
    sessions = _OpenSessions()
    with contextlib.closing(make_jump_hosts(known)) as jumps:

        def visit(machine: Node | Session) -> ResultT:
            if isinstance(machine, Node):
                session = connect(machine, known, connect_deadline_s=connect_deadline_s, jumps=jumps)
            else:
                session = machine
            with sessions.closing(session):
                return function(session)

        try:
            with _longer_thread_slices():
                workers = num_at_once + (host is not None)
                return run_on_all(machines | nodes, visit, max_workers=workers, on_done=on_done)
        except BaseException:
            sessions.close()  # before the jump hosts: what runs on nodes is ended over these sessions
            raise
        finally:
            on_traffic(add_up(jumps.opened))


class _OpenSessions:
    """The sessions that threads have open, for the thread that is interrupted."""

    def __init__(self) -> None:
        self._open: set[Session] = set()
        self._lock = threading.Lock()
        self._is_over = False

    @contextlib.contextmanager
    def closing(self, session: Session) -> Iterator[None]:
        """Close `session` at the end of the block; raises UnreachableError after `close`."""
        with contextlib.closing(session):
            with self._lock:
                if self._is_over:
                    raise UnreachableError("interrupted", node=session.name)
                self._open.add(session)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(session)

    def close(self) -> None:
        """End what runs on the machines, and close all sessions."""
        with self._lock:
            self._is_over = True
            still_open = {session.name: session for session in self._open}
        run_on_all(still_open, lambda session: session.close())


@contextlib.contextmanager
def open_sessions(
    fleet: Fleet,
    *,
    directory: Path,
    known_hosts: Sequence[Path] | None = None,
    connect_deadline_s: float = 10.0,
    max_workers: int = MAX_WORKERS,
    on_done: Callable[[Outcome[Session]], None] = lambda outcome: None,
    on_traffic: OnTraffic = lambda sent: None,
) -> Iterator[Sessions]:
    """Open one session to each node of `fleet`, and one to the host in `directory`; close all at exit.

    `known_hosts` None means csdctl's own file in `directory` and beside the fleet file, then the user's.
    `on_traffic` gets the byte counts at the end.

    Raises InputError when the system allows too few open files.
    """
    connect, make_jump_hosts = _load_ssh()
    num_allowed = allow_open_files(len(fleet.nodes))
    if num_allowed < len(fleet.nodes):
        num_files = len(fleet.nodes) + _SPARE_FILES
        raise InputError(
            f"{len(fleet.nodes)} concurrent connections are needed, but the system allows {num_allowed}",
            remedy=f"run `ulimit -n {num_files}` first, or use fewer nodes at a time with --limit",
        )
    known = KnownHosts.load(fleet_known_hosts_paths(fleet, directory) if known_hosts is None else known_hosts)
    jumps = make_jump_hosts(known)

    def open_node(node: Node) -> Session:
        return connect(node, known, connect_deadline_s=connect_deadline_s, jumps=jumps)

    nodes = {node.name: node for node in fleet.nodes}
    sessions = Sessions(reachable={HOST_NAME: LocalSession(HOST_NAME, directory)})
    opened: list[Session] = []

    def remember(outcome: Outcome[Session]) -> None:
        if outcome.value is not None:
            opened.append(outcome.value)
        on_done(outcome)

    try:
        for name, outcome in run_on_all(nodes, open_node, max_workers=max_workers, on_done=remember).items():
            if outcome.error:
                sessions.failed[name] = outcome.error
            else:
                sessions.reachable[name] = outcome.get()
        yield sessions
    finally:
        to_close = {
            str(number): session for number, session in enumerate([*opened, sessions.reachable[HOST_NAME]])
        }
        run_on_all(to_close, lambda session: session.close(), max_workers=max_workers)
        jumps.close()
        on_traffic(add_up(jumps.opened))


@contextlib.contextmanager
def open_session(
    fleet: Fleet,
    name: str,
    *,
    directory: Path,
    connect_deadline_s: float = 10.0,
    on_traffic: OnTraffic = lambda sent: None,
) -> Iterator[Session]:
    """Open a separate session to node `name`; raises the errors of `connect`."""
    connect, make_jump_hosts = _load_ssh()
    known = KnownHosts.load(fleet_known_hosts_paths(fleet, directory))
    with contextlib.closing(make_jump_hosts(known)) as jumps:
        try:
            session = connect(fleet.node(name), known, connect_deadline_s=connect_deadline_s, jumps=jumps)
            with contextlib.closing(session):
                yield session
        finally:
            on_traffic(add_up(jumps.opened))


def fleet_known_hosts_paths(fleet: Fleet, directory: Path) -> tuple[Path, ...]:
    """Return the known_hosts files for `fleet`, in order; mpirun's ssh must use the same files.

    The fleet file of an emulated fleet is inside a .csdctl directory, whose known_hosts is then used too.
    """
    own = fleet.path.absolute().parent
    enclosing = [parent.parent for parent in (own, *own.parents) if parent.name == ".csdctl"]
    return known_hosts_paths(directory, own, *enclosing)


def _load_ssh() -> tuple[Callable[..., Session], Callable[[KnownHosts], Any]]:
    """Import `ssh.connect` and `ssh_connect.make_jump_hosts` lazily: paramiko takes 0.1 s to load.

    Half of that time would be for invoke, which paramiko needs only for an ssh_config directive
    (`Match exec`) that csdctl never passes to it.
    """
    hides_invoke = "invoke" not in sys.modules
    if hides_invoke:
        sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        from csdctl.transport.ssh import connect
        from csdctl.transport.ssh_connect import make_jump_hosts
    finally:
        if hides_invoke:
            del sys.modules["invoke"]
    return connect, make_jump_hosts


@contextlib.contextmanager
def _longer_thread_slices() -> Iterator[None]:
    """Switch threads less often: with hundreds of threads, switching is a sixth of the work."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.1)
    gc.freeze()  # keeps the garbage collector from scanning all loaded modules again and again
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before_s)


def _call(name: str, item: ItemT, function: Callable[[ItemT], ResultT]) -> Outcome[ResultT]:
    try:
        return Outcome(name, value=function(item))
    except CsdctlError as error:
        return Outcome(name, error=error)
    except Exception as cause:
        unexpected = NodeError(bounded(f"unexpected {type(cause).__name__}: {cause}"), node=name)
        unexpected.__cause__ = cause
        return Outcome(name, error=unexpected)


def allow_open_files(num_connections: int) -> int:
    """Raise the soft limit of open files as far as needed and allowed; return how many connections fit."""
    num_needed = num_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_needed:
        return num_connections
    allowed = num_needed if hard == resource.RLIM_INFINITY else min(num_needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - _SPARE_FILES)
