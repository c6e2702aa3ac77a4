"""The packets of one SSH connection: read without polling, counted, and bounded in size and time.

The server may be hostile. A packet's length is refused before anything is reserved for it, a line before the
version as well, and a server that does not read what is sent to it is disconnected.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from select import POLLOUT, poll
from typing import Any, NoReturn

import paramiko
from paramiko.packet import NeedRekeyException, Packetizer

from csdctl.transport.meter import Meter

MAX_PACKET_BYTES = 256 * 1024
"""The same as OpenSSH's limit."""

MAX_EARLY_PACKET_BYTES = 35_000
"""Until login, and in key exchanges: what RFC 4253 section 6.1 requires everyone to accept."""

MAX_BANNER_LINE_BYTES = 8192
"""The same as OpenSSH's limit for the version and for each line before it."""

WRITE_DEADLINE_S = 15.0
"""How long a packet may take to leave: only a server that hardly reads exceeds it."""

_RECEIVE_BYTES = 1 << 17


class SshProtocolError(paramiko.SSHException):
    """The server broke the SSH protocol; the connection is closed."""


class GreedyPacketizer(Packetizer):
    """Read all available bytes and buffer them; has no timer for the handshake."""

    # Private attributes of paramiko's Packetizer; its type stubs leave them out.
    _check_keepalive: Callable[[], None]
    _Packetizer__keepalive_last: float

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._connection = connection
        self._buffer = bytearray()
        self._start = 0
        self.meter = Meter()
        self.max_packet_bytes = MAX_EARLY_PACKET_BYTES
        self.writes_end_s = float("inf")
        """When nothing may be written any more, by the monotonic clock: the end of the connect deadline."""
        self.violation = ""
        """What the server did against the protocol, for which the connection was closed; '' if nothing."""
        self.check: Callable[[int, paramiko.Message], None] = lambda kind, message: None
        """Called with every message before paramiko handles it; may call `refuse`."""

    def refuse(self, violation: str) -> NoReturn:
        """Note what the server did ("sent a packet of …") and end the connection by SshProtocolError."""
        self.violation = self.violation or violation
        raise SshProtocolError(f"the server {violation}")

    def read_message(self) -> tuple[int, paramiko.Message]:
        """Return kind and content of the next message, after `check`; raises SshProtocolError."""
        try:
            kind, message = super().read_message()
        except (EOFError, OSError, NeedRekeyException, SshProtocolError):
            raise
        except Exception as error:  # of paramiko's parser and of the ciphers
            reason = str(error) if isinstance(error, paramiko.SSHException) else type(error).__name__
            self.refuse(f"sent a damaged packet ({reason})")
        self.check(kind, message)
        return kind, message

    def write_all(self, out: Any) -> None:
        """Send `out`, and count it; raises EOFError when closed, or when the server does not read."""
        self._Packetizer__keepalive_last = time.time()
        end_s = min(time.monotonic() + WRITE_DEADLINE_S, self.writes_end_s)
        rest = out
        while rest:
            num_sent = self._send(rest, end_s)
            if num_sent <= 0:
                raise EOFError
            rest = rest[num_sent:]
        self.meter.num_sent += len(out)

    def _send(self, data: bytes, end_s: float) -> int:
        """Send some of `data`; return 0 when that is impossible. Closes the connection at `end_s`."""
        while not self.closed:
            try:
                if isinstance(self._connection, socket.socket):
                    return self._connection.send(data, socket.MSG_DONTWAIT)
                return int(self._connection.send(data))
            except (BlockingIOError, TimeoutError):
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self.violation = self.violation or "does not read what is sent to it"
                    self._wake_reader()
                    return 0
                self._wait_for_room(left_s)
            except (OSError, EOFError, paramiko.SSHException):
                return 0
        return 0

    def _wait_for_room(self, timeout_s: float) -> None:
        if isinstance(self._connection, socket.socket):  # a channel has waited in `send`
            room = poll()
            room.register(self._connection, POLLOUT)
            room.poll(timeout_s * 1000)

    def _wake_reader(self) -> None:
        """Let the reading thread find the end of the connection, so that it closes everything."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            if isinstance(self._connection, socket.socket):
                self._connection.shutdown(socket.SHUT_RDWR)
            else:
                self._connection.close()

    def start_handshake(self, timeout: float) -> None:
        """Do nothing: the caller of the handshake has a deadline."""

    def readline(self, timeout: float) -> str:
        """Return a line of the server's banner, without its end; raises SshProtocolError for a long one."""
        while (end := self._buffer.find(b"\n", self._start, self._start + MAX_BANNER_LINE_BYTES)) < 0:
            if len(self._buffer) - self._start > MAX_BANNER_LINE_BYTES:
                self.refuse(f"sent a line of more than {MAX_BANNER_LINE_BYTES} bytes before the SSH version")
            self._receive(check_rekey=False)
        line = self.read_all(end + 1 - self._start)[:-1].removesuffix(b"\r")
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.refuse("sent a line before the SSH version that is not UTF-8")

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """Return `n` bytes; raises EOFError, or NeedRekeyException when idle and a rekey is due.

        paramiko asks for the rest of a packet as soon as it has read the length, for every kind of cipher:
        here a length is refused, before any of the packet is awaited.
        """
        if n > self.max_packet_bytes + self.get_mac_size_in():
            self.refuse(f"sent a packet of more than {self.max_packet_bytes} bytes")
        if n < 0:
            self.refuse("sent a packet that is shorter than its header")
        while len(self._buffer) - self._start < n:
            self._receive(check_rekey)
        start, self._start = self._start, self._start + n
        return bytes(memoryview(self._buffer)[start : self._start])

    def _receive(self, check_rekey: bool) -> None:
        """Wait for more bytes, at most for the timeout of the connection."""
        try:
            arrived = self._connection.recv(_RECEIVE_BYTES)
        except TimeoutError:
            if self.closed:
                raise EOFError from None
            if check_rekey and self._start == len(self._buffer) and self.need_rekey():
                raise NeedRekeyException from None
            self._check_keepalive()
            return
        except OSError:
            if self.closed:
                raise EOFError from None
            raise
        if not arrived:
            raise EOFError
        self.meter.num_received += len(arrived)
        # In place: a packet that comes byte by byte must not be copied for each of them.
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += arrived
