"""The mpirun of one link: start it and its daemon on the node, read what they print, end them.

Their output concerns only this link, even if a program on the node has printed it.
"""

import contextlib
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from csdctl.errors import CsdctlError, DeadlineError, NodeError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.runs.directory import CappedLog
from csdctl.transport.meter import LinkBytes, TrafficClass
from csdctl.transport.session import Conversation
from csdctl.worker.protocol.events import ACTIVATIONS, SAMPLES, STATE, SUMS, Traffic
from csdctl.worker.protocol.processes import list_connections, load_all, send_signal
from csdctl.worker.protocol.sandbox import CONNECTED, NO_CONNECTION

_BANNER = re.compile(
    r"[-*=\s]*$|\[\S+\] plm:\w+: Warning: |.*(Per user-direction|thus causing|to be terminated\.)"
    r"|\d+ more process\w* ha\w+ sent help message|\[\S+\] \*\*\* |Abort is in progress|Killed"
)
"""Lines that are no cause: rulers, what mpirun says at every end, and a warning about process groups."""
ENDED = "@csdctl-ended "
"""The shell of a link's end prints this before its machine and exit code, if the code is not 0."""
REQUEST = "@csdctl-daemon "
"""mpirun's request for its daemon. Then come mpirun's name of the machine and a command.

The request of a job also has a secret, because mpirun prints messages of its daemon on the node, too.
"""
CHECK_LINK = "check firewalls and routes between the machine and the host, and `network:` in the fleet file"
BLANK = "\0 \t\r\n"
MAX_TAIL_LINES, MAX_TAIL_LINE_CHARS = 60, 1 << 12
"""The last lines of mpirun that are kept as possible causes, and the size of such a line."""
SANDBOX_S = 2.0
"""The time for a sandbox to kill its processes and remove its files."""
END_DEADLINE_S = 3.0
"""The time for mpirun or a daemon to exit after its sandbox has ended."""
MAX_SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_SHARE = 2.0, 0.1
"""Connections are sampled when another tenth of the elapsed time has passed, and at least this often."""
TRAFFIC_CLASSES = {
    SUMS: TrafficClass.GRADIENT,
    SAMPLES: TrafficClass.PUBLIC,
    STATE: TrafficClass.MODEL,
    ACTIVATIONS: TrafficClass.ACTIVATIONS,
}


@dataclass
class JobOutcome:
    """How a link has ended."""

    lines: list[str] = field(default_factory=list)
    is_connected: bool = False
    is_clean: bool = False
    """Whether mpirun has exited with 0 and said nothing: both ends have left in order."""
    connection_bytes: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Bytes sent and received on each TCP connection of mpirun, by local and peer address."""


def explain_link(outcome: JobOutcome, node: str, logs: str) -> CsdctlError:
    """Return why the link of `node` has ended: a signal that killed a process, or what MPI said."""
    what = "its link was lost" if outcome.is_connected else "its link did not connect"
    remedy = "check the node and its network" if outcome.is_connected else CHECK_LINK
    return NodeError(f"{what}: {_find_cause(outcome)}", node=node, remedy=f"{remedy}; {logs}")


def _find_cause(outcome: JobOutcome) -> str:
    messages = [line for line in outcome.lines if not line.startswith(ENDED)]
    refusals = [line for line in messages if line.startswith(NO_CONNECTION)]
    for line in outcome.lines:
        ended = re.match(rf"{ENDED}(\S+) (\d+)$", line)
        # mpirun itself sends these signals to the other end, which exits with 1.
        if ended and int(ended[2]) not in (1, 128 + signal.SIGTERM, 128 + signal.SIGINT):
            code = int(ended[2])
            how = f"was killed by signal {code - 128}" if code > 128 else f"exited with {code}"
            return f"its process on {ended[1]} {how}"
    if refusals and not outcome.is_connected:
        return refusals[0]
    text = "\n".join(messages)
    if status := re.search(r"Daemon exit status: *(\d+)(.*)", text):
        return f"its MPI daemon (prted) did not connect to mpirun and exited with {status[1]}{status[2]}"
    if "Remote daemon:" in text:
        return "its MPI daemon no longer answers (node down, link cut, or prted killed)"
    errors = [line for line in messages if re.match(r"[\w.]+(Error|Exception)\b", line)]  # of a traceback
    return (errors or messages or ["mpirun printed nothing"])[0]


class JobOutput:
    """Reads what mpirun and its daemon print, line by line, into the log of the node's rank."""

    def __init__(self, log: CappedLog, request: str, on_request: Callable[[str], None]) -> None:
        """`request`: as REQUEST. `on_request` gets mpirun's name of the machine and a command."""
        self._log, self._request, self._on_request = log, request, on_request
        self.is_connected = False
        self.tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._lock = threading.Lock()
        self._is_closed = False

    def take(self, line: str) -> None:
        """Handle the next line of mpirun's output."""
        line = line.strip(BLANK)
        if line.startswith(self._request):
            self._on_request(line.removeprefix(self._request))
        elif line == CONNECTED:
            self.is_connected = True
        else:
            self.log(line)

    def log(self, line: str) -> None:
        """Log a line, and keep it as a possible cause."""
        line = line[:MAX_TAIL_LINE_CHARS].strip(BLANK)
        with self._lock:
            if line and not (self._is_closed or _BANNER.match(line)):
                self.tail.append(line)
                self._log.write(f"link: {line}".encode(errors="replace"))

    def close(self) -> None:
        """Close the log. Later lines are dropped."""
        with self._lock:
            self._is_closed = True
            self._log.close()


def kill_session(session_id: int) -> None:
    """Kill every process of a session."""
    send_signal((pid for pid, stat in load_all().items() if stat.session == session_id), signal.SIGKILL)


class MpiJob:
    """One mpirun, from start to end. Call `run` once. `end` may be called from any thread."""

    def __init__(
        self,
        start: Callable[[], Conversation],
        log: CappedLog,
        start_daemon: Callable[[str, str], Conversation],
        *,
        starter: str = HOST_NAME,
        request: str = REQUEST,
    ) -> None:
        """`start` starts mpirun on `starter`. It ends with its standard input, and so with csdctl.

        `start_daemon` gets mpirun's name of the machine and a command. Raises CsdctlError.
        """
        self._start, self._start_daemon, self._starter = start, start_daemon, starter
        self._output = JobOutput(log, request, self._request_daemon)
        self._daemon: threading.Thread | None = None
        self._conversation: Conversation | None = None
        self._is_ended = False

    @property
    def is_connected(self) -> bool:
        """Whether both ends of the link are connected."""
        return self._output.is_connected

    def run(self) -> JobOutcome:
        """Start mpirun, and return when all processes of its machine have ended."""
        outcome = JobOutcome()
        with contextlib.ExitStack() as stack:
            stack.callback(self._output.close)
            stack.callback(self._end_daemon)
            try:
                conversation = self._start()
                stack.callback(self._finish, conversation, outcome)
                self._watch(conversation, outcome)
            except (CsdctlError, EOFError, OSError, ValueError) as error:
                self._output.log(str(error))
        outcome.lines, outcome.is_connected = list(self._output.tail), self.is_connected
        return outcome

    def end(self) -> None:
        """Let `run` end mpirun's sandbox, and with it all that mpirun has started."""
        self._is_ended = True

    def _watch(self, conversation: Conversation, outcome: JobOutcome) -> None:
        started_s = sampled_s = time.monotonic()
        exited_s: float | None = None
        while not self._is_ended and self._read(conversation):
            now_s = time.monotonic()
            interval_s = min(MAX_SAMPLE_INTERVAL_S, SAMPLE_INTERVAL_SHARE * (now_s - started_s))
            if now_s - sampled_s > interval_s and self._starter == HOST_NAME:
                sampled_s = now_s
                _sample_connections(conversation.stderr.group, outcome)
            if conversation.has_exited():
                exited_s = exited_s or now_s
                if now_s - exited_s > 1.0:
                    return  # mpirun was killed, and a process it started keeps its output open

    def _read(self, conversation: Conversation) -> bool:
        try:
            self._output.take(conversation.read_line(deadline_s=0.2))
        except EOFError:
            return False
        except DeadlineError:
            pass
        return True

    def _finish(self, conversation: Conversation, outcome: JobOutcome) -> None:
        """End mpirun's sandbox, as mpirun would wait for a lost daemon. Read what is left, and kill it."""
        with contextlib.suppress(CsdctlError, EOFError, ValueError):
            conversation.send_line("")
        with contextlib.suppress(CsdctlError, OSError, ValueError):
            end_s = time.monotonic() + SANDBOX_S
            while (is_open := self._read(conversation)) and time.monotonic() < end_s:
                pass
            if not is_open:
                code = conversation.wait(deadline_s=END_DEADLINE_S).exit_code
                outcome.is_clean = code == 0 and not self._output.tail
        conversation.close()
        if self._starter == HOST_NAME and conversation.stderr.group:
            kill_session(conversation.stderr.group)  # local ranks have process groups of their own

    def _request_daemon(self, text: str) -> None:
        if self._daemon is None:
            host, _, command = text.partition(" ")
            self._daemon = threading.Thread(target=self._run_daemon, args=(host, command), daemon=True)
            self._daemon.start()

    def _run_daemon(self, host: str, command: str) -> None:
        """Run the daemon. End the link if it fails, because mpirun would wait for it for ever."""
        code, latest = 1, ""

        def log(line: str) -> None:
            nonlocal latest
            self._output.log(line)
            latest = line.strip(" -") or latest

        with contextlib.suppress(OSError, ValueError, EOFError):
            try:
                conversation = self._conversation = self._start_daemon(host, command)
                with contextlib.suppress(EOFError):
                    while True:
                        with contextlib.suppress(DeadlineError):
                            log(conversation.read_line(deadline_s=3600.0))
                done = conversation.wait(deadline_s=END_DEADLINE_S)
                code = done.exit_code
                for line in done.stderr.decode(errors="replace").splitlines():
                    log(line)
            except CsdctlError as error:
                self._output.log(str(error))
        if code:
            time.sleep(1.0)  # mpirun may end by itself
            self._output.log(f"Daemon exit status: {code}{latest and ': ' + latest}")
            self.end()

    def _end_daemon(self) -> None:
        if self._conversation:  # in a thread: a lost node does not answer
            threading.Thread(target=_end, args=(self._conversation,), daemon=True).start()


def _end(conversation: Conversation) -> None:
    with contextlib.suppress(CsdctlError, EOFError, OSError, ValueError):
        conversation.send_line("")
        conversation.wait(deadline_s=END_DEADLINE_S)
    with contextlib.suppress(CsdctlError):
        conversation.close()


def _sample_connections(session_id: int, outcome: JobOutcome) -> None:
    for pid, stat in load_all().items():
        is_daemon = stat.session == session_id and stat.name in ("mpirun", "prterun")
        for tcp in list_connections(pid) if is_daemon else ():
            outcome.connection_bytes[tcp.local, tcp.peer] = tcp.num_sent, tcp.num_received


def add_rank_traffic(
    traffic: Traffic, nodes: Sequence[str], classes: Mapping[str, TrafficClass]
) -> LinkBytes:
    """Return what the ranks sent to each other. `nodes` by rank."""
    added: Counter[tuple[str, str, str]] = Counter()
    for row in traffic.sent:
        added[nodes[row.sender], nodes[row.receiver], classes[row.what]] += row.num_bytes
    return dict(added)


def add_mpirun_traffic(outcome: JobOutcome, fleet: Fleet) -> LinkBytes:
    """Add up the bytes on the connections of a link's mpirun on the host."""
    added: Counter[tuple[str, str, str]] = Counter()
    for (_, peer), (num_sent, num_received) in outcome.connection_bytes.items():
        if name := _find_machine(peer, fleet):
            added[HOST_NAME, name, TrafficClass.CONTROL] += num_sent
            added[name, HOST_NAME, TrafficClass.CONTROL] += num_received
    return dict(added)


def _find_machine(peer: str, fleet: Fleet) -> str:
    """Return the node, or its jump host, with this 'address port'. '' for an unknown or ambiguous address."""
    address, _, port = peer.partition(" ")
    reached = [node for node in fleet.nodes if node.server in ("", node.name)]
    machines = [node.jump or node for node in reached] + reached
    candidates = {machine.name: machine for machine in machines if machine.address == address}
    by_port = [name for name, machine in candidates.items() if str(machine.port) == port]
    if by_port:
        return by_port[0]
    return next(iter(candidates)) if len(candidates) == 1 else ""
