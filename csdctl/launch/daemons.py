"""Start MPI's daemons on nodes for an mpirun that runs in a sandbox without keys (standalone/agent.py)."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from csdctl.errors import CsdctlError, DeadlineError
from csdctl.transport.session import Conversation

StartDaemon = Callable[[str, str], Conversation]
"""Start a daemon in a sandbox, from mpirun's name of the machine and a command; raises CsdctlError."""

MAX_REQUEST_BYTES = 1 << 16
MAX_LINES = 1000
"""Of a daemon's output that are passed on."""
REQUEST_DEADLINE_S = 10.0
CLOSE_S, END_DEADLINE_S = 1.0, 3.0
"""For a sandbox to end its processes; what is left then is killed."""
_READ_S = 3600.0
_PEER = struct.Struct("3i")


class DaemonStarter:
    """Listens at an abstract Unix address; every connection asks for one daemon."""

    def __init__(self, address: str, start: StartDaemon) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._running: dict[str, Conversation] = {}
        """By mpirun's name of the machine."""
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + address)
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all daemons, and start no more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        threads = [
            threading.Thread(target=_end, args=(conversation,), daemon=True)
            for conversation in self._running.values()
        ]
        for thread in threads:
            thread.start()
        # Those of lost nodes take longer, and nobody needs to wait for them.
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

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
                self._relay(connection, self._start_once(*_read_request(connection)))
            except CsdctlError as error:
                _send(connection, "O", str(error))
                _send(connection, "X", "1")

    def _start_once(self, host: str, command: str) -> Conversation:
        """Start the machine's only daemon; raises CsdctlError."""
        with self._lock:
            if self._is_closed or host in self._running:
                raise CsdctlError(f"the daemon of {host} has been started already")
            conversation = self._running[host] = self._start(host, command)
        return conversation

    def _relay(self, connection: socket.socket, conversation: Conversation) -> None:
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
                _send(connection, "O", line)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
        for error_line in done.stderr.decode(errors="replace").splitlines()[-MAX_LINES:]:
            _send(connection, "O", error_line)
        _send(connection, "X", str(done.exit_code))


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


def _end(conversation: Conversation) -> None:
    """Let the sandbox end its processes and remove its files; kill it if it does not."""
    with contextlib.suppress(CsdctlError, EOFError, OSError, ValueError):
        conversation.send_line("")
        conversation.wait(deadline_s=END_DEADLINE_S)
    with contextlib.suppress(CsdctlError):
        conversation.close()
