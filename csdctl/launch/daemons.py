"""MPI's daemons on nodes, which csdctl starts for mpirun, and an mpirun on another server with its daemons.

mpirun on the host asks for a daemon through an abstract Unix socket. One on another server prints its
request, and csdctl reads it with the rest of its output.
"""

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from csdctl.errors import CsdctlError, DeadlineError
from csdctl.launch.mpi_job import POLL_INTERVAL_S, JobOutcome, LogPath, MpiOutput
from csdctl.transport.session import Conversation

StartDaemon = Callable[[str, str], Conversation]
"""Start a daemon in a sandbox, from mpirun's name of the machine and a command; raises CsdctlError."""

MAX_REQUEST_BYTES = 1 << 16
MAX_LINES = 1000
"""The limit of a daemon's lines that are passed on."""
REQUEST_DEADLINE_S = 10.0
CLOSE_S, END_DEADLINE_S = 1.0, 3.0
"""The time for a sandbox to end its processes; what is left then is killed."""
_READ_S = 3600.0
_PEER = struct.Struct("3i")


class Daemons:
    """The daemons of one mpirun, at most one for each machine."""

    def __init__(self, start: StartDaemon) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._running: dict[str, Conversation] = {}
        """Daemons by mpirun's name of the machine."""
        self._is_closed = False

    def run(self, host: str, command: str, on_line: Callable[[str], None]) -> int:
        """Start the daemon of `host`, pass on its output, and return its exit code; raises CsdctlError."""
        with self._lock:
            if self._is_closed or host in self._running:
                raise CsdctlError(f"the daemon of {host} has been started already")
            conversation = self._running[host] = self._start(host, command)
        num_lines = 0
        while True:
            try:
                line = conversation.read_line(deadline_s=_READ_S)
            except DeadlineError:
                continue
            except EOFError:
                break
            num_lines += 1
            if num_lines <= MAX_LINES:
                on_line(line)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
        for error_line in done.stderr.decode(errors="replace").splitlines()[-MAX_LINES:]:
            on_line(error_line)
        return done.exit_code

    def close(self) -> None:
        """End all daemons, and start no more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _end_all(self._running.values())


class DaemonStarter(Daemons):
    """Listens at an abstract Unix address; every connection asks for one daemon."""

    def __init__(self, address: str, start: StartDaemon) -> None:
        super().__init__(start)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + address)
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all daemons, and start no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        super().close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Start the daemon that is asked for, and pass on its output and exit code."""
        with connection, contextlib.suppress(OSError):
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(peer)[1] != os.getuid():
                return
            try:
                code = self.run(*_read_request(connection), lambda line: _send(connection, "O", line))
            except CsdctlError as error:
                _send(connection, "O", str(error))
                code = 1
            _send(connection, "X", str(code))


def _read_request(connection: socket.socket) -> tuple[str, str]:
    """Return machine and command; raises CsdctlError."""
    connection.settimeout(REQUEST_DEADLINE_S)
    received = b""
    while more := connection.recv(MAX_REQUEST_BYTES):
        received += more
        if len(received) > MAX_REQUEST_BYTES:
            raise CsdctlError(f"mpirun's request for a daemon is longer than {MAX_REQUEST_BYTES} bytes")
    host, _, command = received.decode(errors="replace").partition("\0")
    return host, command


def _send(connection: socket.socket, kind: str, text: str) -> None:
    connection.sendall(f"{kind} {text.replace(chr(10), ' ')}\n".encode(errors="replace"))


def _end_all(conversations: Iterable[Conversation]) -> None:
    """Let sandboxes end their processes and remove their files; those of lost nodes are not waited for."""
    threads = [threading.Thread(target=_end, args=(one,), daemon=True) for one in conversations]
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


REQUEST = "@csdctl-daemon"
SERVER_AGENT = f"""host=$1; shift; printf '{REQUEST} %s %s\\n' "$host" "$*"\n"""
"""The script in place of ssh for mpirun on another server: it asks for a daemon, and does not wait for it."""


class ServerJob:
    """One mpirun on another server, as `MpiJob` is one on the host. Call `run` once."""

    def __init__(
        self,
        start: Callable[[], Conversation],
        starter: str,
        nodes: Sequence[str],
        log_path: LogPath,
        start_daemon: StartDaemon,
    ) -> None:
        """`start` starts mpirun on machine `starter`; `nodes` are those of its ranks, in order."""
        self._start, self._starter, self._nodes = start, starter, nodes
        self._output = MpiOutput(log_path, nodes)
        self._daemons = Daemons(start_daemon)
        self._conversation: Conversation | None = None
        self._ended = math.inf

    def run(self, deadline_s: float = math.inf) -> JobOutcome:
        """Start mpirun, and return when it has ended; `deadline_s` as that of `MpiJob.run`."""
        outcome = JobOutcome(self._output.events, nodes=tuple(self._nodes), starter=self._starter)
        started = time.monotonic()
        try:
            with contextlib.suppress(EOFError, OSError, ValueError):
                conversation = self._conversation = self._start()
                while time.monotonic() < self._ended + END_DEADLINE_S and not outcome.is_overdue:
                    try:
                        self._handle(conversation.read_line(deadline_s=POLL_INTERVAL_S))
                    except DeadlineError:
                        outcome.is_overdue = self._output.is_overdue(started, deadline_s)
            if self._conversation and not outcome.is_overdue:
                outcome.exit_code = self._conversation.wait(deadline_s=END_DEADLINE_S).exit_code
        except CsdctlError as error:
            self._log(str(error))
        finally:
            self.end()
            self._output.close()
        outcome.stderr_tail = self._output.tail
        return outcome

    def end(self) -> None:
        """End mpirun's sandbox and its daemons."""
        self._ended = min(self._ended, time.monotonic())
        _end_all([self._conversation] if self._conversation else [])
        self._daemons.close()

    def _log(self, line: str) -> None:
        self._output.handle_line(line.encode(errors="replace"))

    def _handle(self, line: str) -> None:
        kind, _, request = line.partition(" ")
        if kind != REQUEST:
            self._log(line)
        elif len(request) <= MAX_REQUEST_BYTES:
            threading.Thread(target=self._start_daemon, args=request.split(" ", 1), daemon=True).start()

    def _start_daemon(self, host: str, command: str = "") -> None:
        """Run a daemon; without it, mpirun would wait for ever."""
        code = 1
        with contextlib.suppress(OSError, ValueError):
            try:
                code = self._daemons.run(host, command, self._log)
            except CsdctlError as error:
                self._log(str(error))
        if code:
            self.end()
