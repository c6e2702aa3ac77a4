"""A running mpirun: start it, read what the ranks print, watch its deadline, end it.

Events of the ranks are kept, all other lines go to the log files. Completion records decide whether a job
succeeded. mpirun's exit code does not: it exits with 0 when a node is lost.
"""

import contextlib
import math
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from csdctl.errors import CsdctlError, DeadlineError, RunError
from csdctl.fleet.model import HOST_NAME, SERVER_MARK, Fleet
from csdctl.runs.directory import CappedLog
from csdctl.transport.meter import LinkBytes, TrafficClass
from csdctl.transport.session import Conversation
from csdctl.worker.protocol.events import (
    ACTIVATIONS,
    EVENT_PREFIX,
    FROM_MPI,
    SAMPLES,
    STATE,
    SUMS,
    Event,
    Exited,
    Failed,
    Finished,
    Misbehaved,
    Ready,
    Traffic,
    check_event,
    event_from_line,
)
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.processes import list_connections, load_all, send_signal

_BANNER = re.compile(
    r"[-*=\s]*$|\[\S+\] plm:\w+: Warning: |.*(Per user-direction|thus causing|to be terminated\.)"
    r"|\d+ more process\w* ha\w+ sent help message"
)
"""No cause: lines around messages, words of each end, and a warning that a shell has no process group."""
_HARMLESS = re.compile(r"WARNING: An invalid value was given for oob_tcp_if_include\.")
_OF_HARMLESS = re.compile(r"value will be ignored\.$|(Local host|Value|Message): ")
"""PRRTE compares `network:` with one address of each interface, and takes all interfaces if none fits."""
CHECK_NODE = "check the node and train again"
MEMORY_REMEDY = "use a smaller batch size (--batch-size, or `csdctl tune`), or a machine with more memory"
_NO_CAUSE = ("Abort is in progress", "Killed")
_NOISE = ("All log messages before absl", "oneDNN custom operations are on", "rebuild TensorFlow with")
_ABORT = re.compile(r"\[\S+\] \*\*\* +(reported by|on a NULL|Unknown error|MPI_ERRORS_ARE|and MPI will)")
"""What MPI prints after the error with which a process ends."""


def host_word(node: str) -> str:
    """Return the name of a node as a part of mpirun's name of its machine."""
    return node.replace(SERVER_MARK, "-")


def is_noise(line: str) -> bool:
    """Return whether `line` is one that TensorFlow prints at every start, or MPI after every loss."""
    return bool(_ABORT.match(line)) or any(noise in line for noise in _NOISE)


def find_killed(outcome: "JobOutcome") -> Exited | None:
    """Return the end of the first process that a signal killed which mpirun itself does not send."""
    killed = (
        event
        for event in outcome.events
        if isinstance(event, Exited)
        and event.code > 128
        and event.code - 128 not in (signal.SIGTERM, signal.SIGINT)
    )
    return next(killed, None)


def find_cause(outcome: "JobOutcome") -> RunError:
    """Return why mpirun ended, and the node that is the cause, '' if that is unknown.

    mpirun numbers its daemons from 1, in the order of the nodes in its command line; 0 is mpirun itself.
    """
    if event := find_killed(outcome):
        message = f"rank {event.rank} was killed by signal {event.code - 128}"
        if event.code - 128 == signal.SIGKILL:
            return RunError(f"{message}, most likely out of memory", node=event.node, remedy=MEMORY_REMEDY)
        return RunError(message, node=event.node, remedy=CHECK_NODE)
    node, message = _read_cause(outcome.stderr_tail, outcome.nodes, outcome.starter)
    return RunError(message, node=node, remedy=CHECK_NODE)


def _read_cause(stderr_tail: Sequence[str], rank_nodes: Sequence[str], starter: str) -> tuple[str, str]:
    """Return the node and the cause that mpirun's messages name."""
    text = "\n".join(stderr_tail)
    remote = [node for node in rank_nodes if node != starter]
    if found := re.search(r"Remote daemon: *\[[^,\]]*,(\d+)\]", text):
        number = int(found[1])
        node = remote[number - 1] if 0 < number <= len(remote) else ""
        return node, "lost: its MPI daemon no longer answers (node down, link cut, or prted killed)"
    if found := re.search(r"process rank (\d+)", text):
        rank = int(found[1])
        node = rank_nodes[rank] if rank < len(rank_nodes) else ""
        if by_signal := re.search(r"exited on signal (\d+)", text):
            return node, f"rank {rank} was killed by signal {by_signal[1]}"
        return node, f"rank {rank} was lost, or exited because another rank was lost"
    if status := re.search(r"Daemon exit status: *(\d+)(.*)", text):
        found = re.search(r"Remote host: *rank\d+-(\S+)", text)
        node = next((node for node in remote if found and host_word(node) == found[1]), "")
        whose = "its MPI daemon" if node else "the MPI daemon of a node that mpirun does not name"
        return node, f"{whose} (prted) did not connect to mpirun and exited with {status[1]}{status[2]}"
    lines = [line for line in stderr_tail if not _BANNER.match(line) and not line.startswith(_NO_CAUSE)]
    return "", lines[0] if lines else "mpirun printed no message"


LogPath = Callable[[int | None], Path]
"""The log file of a rank; with None, the log file of mpirun itself."""

MAX_LINE_BYTES = 1 << 20
MAX_TAIL_LINES, MAX_TAIL_LINE_BYTES = 60, 1 << 12
EXPECTED = (*FROM_MPI, Ready, Traffic, Misbehaved, Finished, Failed)
"""The events of an MPI check; a link sends none but `Exited`."""
CHECK_WORKER = "check that machine: its worker is damaged or is not csdctl's"
_TAGGED = re.compile(rb"\[\d+,(\d{1,9})\]<(stdout|stderr)>: ?(.*)", re.DOTALL)
"""A line that mpirun passes on from a rank (--output tag)."""
REQUEST = "@csdctl-daemon "
"""mpirun's request for a daemon, before its name of the machine and a command.

A job's own request ends with a secret: mpirun also prints messages of its daemons on nodes.
"""


class MpiOutput:
    """Reads what mpirun prints, in one thread; others may `log` lines."""

    def __init__(self, log_path: LogPath, nodes: Sequence[str], request: str = REQUEST) -> None:
        """`nodes` are the machines of mpirun's ranks, in order; `request` as `REQUEST`."""
        self._log_path, self._request = log_path, request.encode()
        self._nodes = nodes
        self.events: list[Event] = []
        """Events in order of arrival: a rank reports each type once, but rank 0 up to 1,000 events."""
        self.last_event_s = time.monotonic()
        self._reported: set[tuple[int, type[Event]]] = set()
        self.tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        """The last lines that mpirun and its daemons printed."""
        self._logs: dict[int | None, CappedLog] = {}
        self.on_request: Callable[[str], None] = lambda text: None
        """Called with mpirun's name of the machine and a command."""
        self._pending = bytearray()
        self._is_harmless = False
        """Whether the latest line of mpirun or of a daemon belongs to a harmless message."""
        self._rank: int | None = None
        """Who has printed the latest line, None for mpirun itself."""
        self._is_whole = True
        self._lock = threading.Lock()
        self._is_closed = False

    def ranks_with(self, kind: type[Event]) -> set[int]:
        """Return the ranks that have sent an event of type `kind`."""
        return {rank for rank, reported in list(self._reported) if reported is kind}

    def feed(self, chunk: bytes) -> None:
        """Handle the next bytes, even when a log cannot be written: a full pipe would stop the run."""
        searched = len(self._pending)
        self._pending += chunk
        while (end := self._pending.find(b"\n", searched) + 1) or len(self._pending) >= MAX_LINE_BYTES:
            line = bytes(self._pending[: end or None])
            del self._pending[: len(line)]
            searched = 0
            self._handle(line)

    def close(self) -> None:
        """Close the logs; later lines of daemons are dropped."""
        self._handle(bytes(self._pending))
        with self._lock:
            self._is_closed = True
            for log in self._logs.values():
                log.close()

    def _handle(self, line: bytes) -> None:
        tagged = _TAGGED.match(line)
        if not self._is_whole:  # the rest of a long line, which has no tag of its own
            self._log(self._rank, line)
        elif not tagged or int(tagged[1]) >= len(self._nodes):
            self._rank = None
            if line.startswith(self._request):
                self.on_request(line.removeprefix(self._request).decode(errors="replace").rstrip("\n"))
            else:
                self._log(None, line)
        else:
            self._rank, text = int(tagged[1]), tagged[3]
            if tagged[2] == b"stdout" and text.startswith(EVENT_PREFIX.encode()):
                self._handle_event(self._rank, text.decode(errors="replace").rstrip("\r\n"))
            else:
                self._log(self._rank, text)
        self._is_whole = line.endswith(b"\n")

    def log(self, line: str) -> None:
        """Log a line that no rank has sent."""
        self._log(None, line.encode(errors="replace") + b"\n")

    def _handle_event(self, rank: int, line: str) -> None:
        """Keep the event in `line`; an invalid one means that the rank has failed."""
        try:
            event = event_from_line(line)
            if not isinstance(event, EXPECTED):
                raise ProtocolError(f"expected an event of an MPI check, received {type(event).__name__}")
            check_event(event, self._nodes, rank)
        except ProtocolError as error:
            self._log(rank, line.encode(errors="replace"))
            event = Failed(rank, self._nodes[rank], f"sent an invalid event: {error}", CHECK_WORKER)
        is_new = (rank, type(event)) not in self._reported
        if not self._is_closed and (is_new or (rank == 0 and len(self.events) < 1000)):
            self.events.append(event)
            self.last_event_s = time.monotonic()
            self._reported.add((rank, type(event)))

    def _log(self, rank: int | None, text: bytes) -> None:
        line = text[:MAX_TAIL_LINE_BYTES].decode(errors="replace").strip("\0 \t\r\n")
        if not line or is_noise(line):
            return
        with self._lock:
            if self._is_closed:
                return
            if rank is None:
                goes_on = self._is_harmless and _OF_HARMLESS.match(line)
                self._is_harmless = bool(_HARMLESS.match(line) or goes_on)
                if self._is_harmless or _BANNER.match(line):
                    return
                self.tail.append(line)
            if rank not in self._logs:
                name = "mpirun" if rank is None else self._nodes[rank]
                self._logs[rank] = CappedLog(self._log_path(rank), name)
            self._logs[rank].write(text)


def kill_session(session_id: int) -> None:
    """Kill every process of a session."""
    send_signal((pid for pid, stat in load_all().items() if stat.session == session_id), signal.SIGKILL)


MAX_SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_SHARE = 2.0, 0.1
"""Connections are sampled each time another tenth of the elapsed time has passed, at least this often."""


SANDBOX_S = 2.0
"""The time for the sandbox to kill its processes and remove its files."""

EventT = TypeVar("EventT", bound=Event)


@dataclass
class JobOutcome:
    """The result of a job."""

    events: list[Event]
    """The events of the ranks, in order of arrival."""
    nodes: tuple[str, ...] = ()
    """The machines of its ranks, in order."""
    starter: str = HOST_NAME
    """The machine on which mpirun ran."""
    exit_code: int | None = None
    is_overdue: bool = False
    """Whether the deadline ended the job."""
    connection_bytes: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Bytes sent and received on each TCP connection of mpirun, by local and peer address."""
    stderr_tail: list[str] = field(default_factory=list)
    """The last lines that mpirun and its daemons printed."""

    def of_type(self, kind: type[EventT]) -> dict[int, EventT]:
        """Return the first event of type `kind` of each rank, in order of arrival."""
        found: dict[int, EventT] = {}
        for event in self.events:
            if isinstance(event, kind):
                found.setdefault(event.rank, event)
        return found


StartDaemon = Callable[[str, str], Conversation]
"""Start a daemon in a sandbox, from mpirun's name of the machine and a command; raises CsdctlError."""

MAX_LINES = 1000
"""The limit of a daemon's lines that are passed on."""
CLOSE_S, END_DEADLINE_S = 1.0, 3.0
"""The time for a sandbox to end its processes; what is left then is killed."""


class Daemons:
    """The daemons of one mpirun, at most one for each machine."""

    def __init__(
        self, start: StartDaemon, on_line: Callable[[str], None], on_failure: Callable[[], None]
    ) -> None:
        """`on_line` gets the output of the daemons; `on_failure` is called when one fails."""
        self._start, self._on_line, self._on_failure = start, on_line, on_failure
        self._lock = threading.Lock()
        self._running: dict[str, Conversation] = {}
        """Daemons by mpirun's name of the machine."""
        self._is_closed = False

    def request(self, text: str) -> None:
        """Start the daemon that mpirun has asked for, with its name of the machine and a command."""
        host, _, command = text.partition(" ")
        threading.Thread(target=self._run, args=(host, command), daemon=True).start()

    def _run(self, host: str, command: str) -> None:
        """Run a daemon; mpirun would wait for ever for one that has failed."""
        code, said = 1, ""
        with contextlib.suppress(OSError, ValueError, EOFError):
            try:
                code, said = self._read(host, command)
            except CsdctlError as error:
                self._on_line(str(error))
        if code:
            time.sleep(1.0)  # mpirun may end by itself
            if not self._is_closed:  # `find_cause` expects what mpirun prints when its ssh fails
                self._on_line(f"Remote host: {host}")
                self._on_line(f"Daemon exit status: {code}{said}")
                self._on_failure()

    def _read(self, host: str, command: str) -> tuple[int, str]:
        """Start the daemon of `host`, pass on its output; return its exit code, and its last line after ': '.

        Raises CsdctlError.
        """
        with self._lock:
            if self._is_closed or host in self._running:
                raise CsdctlError(f"the daemon of {host} has been started already")
            conversation = self._running[host] = self._start(host, command)
        num_lines, latest = 0, ""
        while True:
            try:
                line = conversation.read_line(deadline_s=3600.0)
            except DeadlineError:
                continue
            except EOFError:
                break
            num_lines += 1
            if num_lines <= MAX_LINES:
                self._on_line(line)
                latest = line.strip(" -") or latest
        done = conversation.wait(deadline_s=END_DEADLINE_S)
        for error_line in done.stderr.decode(errors="replace").splitlines()[-MAX_LINES:]:
            self._on_line(error_line)
            latest = error_line.strip(" -") or latest
        return done.exit_code, f": {latest}" if latest else ""

    def close(self) -> None:
        """End all daemons, and start no more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        # Those of lost nodes are not waited for.
        threads = [threading.Thread(target=_end, args=(one,), daemon=True) for one in self._running.values()]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _end(conversation: Conversation) -> None:
    """Let the sandbox end its processes and remove its files; kill it if it does not."""
    with contextlib.suppress(CsdctlError, EOFError, OSError, ValueError):
        conversation.send_line("")
        conversation.wait(deadline_s=END_DEADLINE_S)
    with contextlib.suppress(CsdctlError):
        conversation.close()


class MpiJob:
    """One mpirun, from start to end. Call `run` once; `end` may be called from any thread."""

    def __init__(
        self,
        start: Callable[[], Conversation],
        nodes: Sequence[str],
        log_path: LogPath,
        start_daemon: StartDaemon,
        *,
        sandbox_s: float = SANDBOX_S,
        starter: str = HOST_NAME,
        request: str = REQUEST,
    ) -> None:
        """`start` starts mpirun on machine `starter`; `nodes` are those of its ranks, in order.

        Its standard input stays open until it is to end: it also ends with csdctl.
        """
        self._start, self._starter, self._nodes = start, starter, tuple(nodes)
        self._sandbox_s = sandbox_s
        self._output = MpiOutput(log_path, nodes, request)
        self._daemons = Daemons(start_daemon, self._output.log, self.end)
        self._output.on_request = self._daemons.request
        self._is_ended = False

    def run(self, deadline_s: float = math.inf) -> JobOutcome:
        """Start mpirun, and return when all processes of its machine have ended.

        `deadline_s` limits the time until all ranks are ready, and any silence after that.
        """
        outcome = JobOutcome(self._output.events, nodes=self._nodes, starter=self._starter)
        with contextlib.ExitStack() as stack:
            stack.callback(self._output.close)
            stack.callback(self._daemons.close)
            try:
                conversation = self._start()
                stack.callback(self._finish, conversation, outcome)
                self._watch(conversation, outcome, deadline_s)
            except (CsdctlError, EOFError, OSError, ValueError) as error:
                self._output.log(str(error))
        outcome.stderr_tail = list(self._output.tail)
        return outcome

    def end(self) -> None:
        """Let `run` end mpirun's sandbox, and with it all that mpirun has started."""
        self._is_ended = True

    def _watch(self, conversation: Conversation, outcome: JobOutcome, deadline_s: float) -> None:
        """Read until the output has ended, the job is to end, or only an orphan is left."""
        output = self._output
        started = last_sample = time.monotonic()
        exited: float | None = None
        while not self._is_ended and self._read(conversation):
            now = time.monotonic()
            if now - last_sample > min(MAX_SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_SHARE * (now - started)):
                last_sample = now
                if self._starter == HOST_NAME:
                    _sample_connections(conversation.running.stderr.group, outcome)
            if conversation.running.has_exited():
                exited = exited or now
                if now - exited > 1.0:
                    return  # mpirun was killed, and a process it started keeps its output open
            silent_s = now - output.last_event_s
            if len(output.ranks_with(Finished)) == len(self._nodes) and silent_s > 5.0:
                return  # a process that a rank left behind keeps mpirun's output open
            is_ready = len(output.ranks_with(Ready)) == len(self._nodes)
            if now - (output.last_event_s if is_ready else started) > deadline_s:
                outcome.is_overdue = True
                return

    def _read(self, conversation: Conversation) -> bool:
        """Handle the next output; return False at its end."""
        with contextlib.suppress(DeadlineError):
            chunk = conversation.read_bytes(deadline_s=0.2)
            self._output.feed(chunk)
            return bool(chunk)
        return True

    def _finish(self, conversation: Conversation, outcome: JobOutcome) -> None:
        """End mpirun's sandbox, and read what is left; kill what does not end.

        mpirun itself would wait for daemons that no longer answer.
        """
        with contextlib.suppress(CsdctlError, EOFError, ValueError):
            conversation.send_line("")
        with contextlib.suppress(CsdctlError, OSError, ValueError):
            end_s = time.monotonic() + self._sandbox_s
            while (is_open := self._read(conversation)) and time.monotonic() < end_s:
                pass
            if not is_open:
                outcome.exit_code = conversation.wait(deadline_s=END_DEADLINE_S).exit_code
        conversation.close()
        if self._starter == HOST_NAME and conversation.running.stderr.group:
            kill_session(conversation.running.stderr.group)  # local ranks have process groups of their own


def _sample_connections(session_id: int, outcome: JobOutcome) -> None:
    """Record the bytes on the connections of mpirun; the kernel drops them when it ends.

    These are to the daemons on nodes. Ranks report their own traffic.
    """
    for pid, stat in load_all().items():
        is_daemon = stat.session == session_id and stat.name in ("mpirun", "prterun")
        for tcp in list_connections(pid) if is_daemon else ():
            outcome.connection_bytes[tcp.local, tcp.peer] = tcp.num_sent, tcp.num_received


TRAFFIC_CLASSES = {
    SUMS: TrafficClass.GRADIENT,
    SAMPLES: TrafficClass.PUBLIC,
    STATE: TrafficClass.MODEL,
    ACTIVATIONS: TrafficClass.ACTIVATIONS,
}


def add_rank_traffic(
    traffic: Iterable[Traffic], nodes: Sequence[str], classes: Mapping[str, TrafficClass] = TRAFFIC_CLASSES
) -> LinkBytes:
    """Add up what the ranks sent to each other; `nodes` by rank.

    Counts are cumulative within a group of ranks: the last event of each generation counts.
    """
    last = {event.generation: event for event in traffic}
    added: Counter[tuple[str, str, str]] = Counter()
    for event in last.values():
        for row in event.sent:
            added[nodes[row.sender], nodes[row.receiver], classes[row.what]] += row.num_bytes
    return dict(added)


def add_mpirun_traffic(outcomes: Iterable[JobOutcome], fleet: Fleet) -> LinkBytes:
    """Add up the bytes on the connections of the host's mpiruns.

    Nodes that share an address (an emulated fleet) differ in their SSH ports alone.
    """
    added: Counter[tuple[str, str, str]] = Counter()
    for outcome in outcomes:
        for (_, peer), (num_sent, num_received) in outcome.connection_bytes.items():
            if name := _find_machine(peer, fleet):
                added[HOST_NAME, name, TrafficClass.CONTROL] += num_sent
                added[name, HOST_NAME, TrafficClass.CONTROL] += num_received
    return dict(added)


def _find_machine(peer: str, fleet: Fleet) -> str:
    """Return the node, or its jump host, with this 'address port'; '' for an unknown or ambiguous address."""
    address, _, port = peer.partition(" ")
    reached = [node for node in fleet.nodes if node.server in ("", node.name)]
    machines = [node.jump or node for node in reached] + reached
    candidates = {machine.name: machine for machine in machines if machine.address == address}
    by_port = [name for name, machine in candidates.items() if str(machine.port) == port]
    if by_port:
        return by_port[0]
    return next(iter(candidates)) if len(candidates) == 1 else ""
