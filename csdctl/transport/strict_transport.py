"""A paramiko connection that does not poll, keeps to the protocol when it closes, and trusts no server.

docs/decisions/0010 says why. paramiko checks and sends in two steps, so it may send on a channel after its
close. A server then drops the whole connection, and with it every node behind a jump host.

`GreedyPacketizer` bounds packets, lines and writes in size and time. `ServerRules` bounds messages, and the
data of a channel that nobody has read. paramiko by itself would answer, ignore or sign any message.

No other module uses private names of paramiko. `pyproject.toml` caps its version because of these, which an
attack of docs/reference/attacks.md needs, or an honest server:

    Transport._channels           4: data is counted for its channel
    Transport._verify_key         4: another host key in a later key exchange, even before the login
    Transport._send_user_message  4: a key exchange that never ends. Honest: one while a channel closes
    Transport._send_message       honest: nothing is sent on a closed channel
    Channel._event_pending        5: no reply to the request for a command
    Channel._wait_for_event       5: the same
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from select import POLLOUT, poll
from typing import Any, NoReturn

import paramiko
from paramiko import common
from paramiko.packet import NeedRekeyException, Packetizer

from csdctl.transport.meter import Meter

MAX_PACKET_BYTES = 256 * 1024
"""The same as OpenSSH's limit."""

MAX_EARLY_PACKET_BYTES = 35_000
"""Largest packet before login and message of a key exchange: RFC 4253 section 6.1 requires to accept it."""

MAX_BANNER_LINE_BYTES = 8192
"""The same as OpenSSH's limit for the version and for each line before it; paramiko reads 100 lines."""

WRITE_DEADLINE_S = 15.0
"""Maximum time to send a packet: only a server that hardly reads exceeds it."""

LOST = (paramiko.SSHException, EOFError, OSError)
"""Exceptions that sending raises when the connection is lost."""

KEY_EXCHANGE_KINDS, COMMAND_KINDS, CHANNEL_KINDS = range(20, 50), range(80, 128), range(91, 101)
"""Kinds of messages, RFC 4250 section 4.1. A message of a channel begins with the channel's number."""
HEADER_BYTES: dict[int, int] = {common.MSG_CHANNEL_DATA: 8, common.MSG_CHANNEL_EXTENDED_DATA: 12}
"""The size of what precedes the data in a message with data of a channel."""
STDERR_TYPE = 1
"""The type of extended data that paramiko keeps. It drops all other types."""
SMALL_WINDOW_BYTES = 1024
"""A window that grows by less is of no use to the command."""
MAX_EXTENSIONS = 64
"""Extensions in a message; OpenSSH has three. paramiko loops as often as the server says, up to 2^32."""
MAX_IDLE_COST = 100_000.0
"""The cost of messages of no use that is allowed at once: some seconds of CPU.

A message costs 1, and 1 for each KiB.
"""
IDLE_COST_PER_S = 1_000.0
"""The cost that is allowed in the long run: about a hundredth of a CPU."""
KEY_EXCHANGE_COST = 250.0
"""The cost of a key exchange that csdctl did not ask for: about 10 ms of CPU.

A KiB of data, in either direction, pays for a cost of 1: a server with a small RekeyLimit is honest.
"""
DEBUG_BYTES_PER_COST = 32
"""Bytes of a debug message for a cost of 1: paramiko escapes its bytes one at a time."""


class SshProtocolError(paramiko.SSHException):
    """The server broke the SSH protocol. The connection is closed."""


class GreedyPacketizer(Packetizer):
    """Read all available bytes and buffer them. Has no timer for the handshake."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._connection = connection
        self._buffer = bytearray()
        self._start = 0
        self._keepalive_s = 0.0
        self._on_idle: Callable[[], object] = lambda: None
        self._written_s = time.monotonic()
        self.meter = Meter()
        self.max_packet_bytes = MAX_EARLY_PACKET_BYTES
        self.writes_end_s = float("inf")
        """End of the time for writing, by the monotonic clock: the end of the connect deadline."""
        self.violation = ""
        """The violation of the protocol for which the connection was closed; '' if there is none."""
        self.greeting = ""
        """The last line before the key exchange: the server's version, or why it refuses a connection."""
        self.before_read: Callable[[], None] = lambda: None
        self.check: Callable[[int, paramiko.Message], None] = lambda kind, message: None
        """Called with every message before paramiko handles it; may call `refuse`."""

    def refuse(self, violation: str) -> NoReturn:
        """Note what the server did ("sent a packet of …") and end the connection by SshProtocolError."""
        self.violation = self.violation or violation
        raise SshProtocolError(f"the server {violation}")

    def read_message(self) -> tuple[int, paramiko.Message]:
        """Return kind and content of the next message, after `check`. Raises SshProtocolError."""
        self.before_read()
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
        """Send `out`, and count it. Raises EOFError when closed, or when the server does not read."""
        self._written_s = time.monotonic()
        end_s = min(time.monotonic() + WRITE_DEADLINE_S, self.writes_end_s)
        unsent = out
        while unsent:
            num_sent = self._send(unsent, end_s)
            if num_sent <= 0:
                raise EOFError
            unsent = unsent[num_sent:]
        self.meter.count(sent=len(out))

    def _send(self, data: bytes, end_s: float) -> int:
        """Send some of `data`. Return 0 when that is impossible. Closes the connection at `end_s`."""
        while not self.closed:
            try:
                if isinstance(self._connection, socket.socket):
                    return self._connection.send(data, socket.MSG_DONTWAIT)
                return int(self._connection.send(data))
            except (BlockingIOError, TimeoutError):
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self.violation = self.violation or "does not read what is sent to it"
                    # The reading thread finds the end of the connection, and closes everything.
                    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                        if isinstance(self._connection, socket.socket):
                            self._connection.shutdown(socket.SHUT_RDWR)
                        else:
                            self._connection.close()
                    return 0
                if isinstance(self._connection, socket.socket):  # a channel has waited in `send`
                    room = poll()
                    room.register(self._connection, POLLOUT)
                    room.poll(left_s * 1000)
            except (OSError, EOFError, paramiko.SSHException):
                return 0
        return 0

    def start_handshake(self, timeout: float) -> None:
        """Do nothing: the caller of the handshake has a deadline."""

    def readline(self, timeout: float) -> str:
        """Return a line of the server's banner, without its end. Raises SshProtocolError for a long one."""
        while (end := self._buffer.find(b"\n", self._start, self._start + MAX_BANNER_LINE_BYTES)) < 0:
            if len(self._buffer) - self._start > MAX_BANNER_LINE_BYTES:
                self.refuse(f"sent a line of more than {MAX_BANNER_LINE_BYTES} bytes before the SSH version")
            self._receive(check_rekey=False)
        line = self.read_all(end + 1 - self._start)[:-1].removesuffix(b"\r")
        try:
            self.greeting = line.decode()
        except UnicodeDecodeError:
            self.refuse("sent a line before the SSH version that is not UTF-8")
        return self.greeting

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """Return `n` bytes. Refuses a length before any of its packet. EOFError, NeedRekeyException."""
        if n > self.max_packet_bytes + self.get_mac_size_in():
            self.refuse(f"sent a packet of more than {self.max_packet_bytes} bytes")
        if n < 0:
            self.refuse("sent a packet that is shorter than its header")
        while len(self._buffer) - self._start < n:
            self._receive(check_rekey)
        start, self._start = self._start, self._start + n
        return bytes(memoryview(self._buffer)[start : self._start])

    def _receive(self, check_rekey: bool) -> None:
        try:
            arrived = self._connection.recv(1 << 17)
        except TimeoutError:
            if self.closed:
                raise EOFError from None
            if check_rekey and self._start == len(self._buffer) and self.need_rekey():
                raise NeedRekeyException from None
            idle_s = time.monotonic() - self._written_s
            if self._keepalive_s and idle_s > self._keepalive_s and not self.need_rekey():
                self._on_idle()
                self._written_s = time.monotonic()
            return
        except OSError:
            if self.closed:
                raise EOFError from None
            raise
        if not arrived:
            raise EOFError
        self.meter.count(received=len(arrived))
        # In place: a packet that comes byte by byte must not be copied for each of them.
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += arrived

    def set_keepalive(self, interval: float, callback: Callable[[], object]) -> None:
        """Call `callback` when nothing was written for `interval` seconds and nothing arrives."""
        self._keepalive_s, self._on_idle = interval, callback


class ServerRules:
    """Refuses messages that no honest server sends."""

    def __init__(self, connection: "StrictTransport") -> None:
        self._connection = connection
        self._cost_left = MAX_IDLE_COST
        self._counted_s = time.monotonic()
        self._num_sent_before = 0
        self._num_useful = 0

    def check(self, kind: int, message: paramiko.Message) -> None:
        """Raise SshProtocolError for a message that the server may not send now."""
        connection, refuse = self._connection, self._connection.packetizer.refuse
        size = message.packet.seek(0, os.SEEK_END)  # without a copy
        message.rewind()
        head = message.packet.read(12)
        message.rewind()
        number = int.from_bytes(head[:4], "big")
        if kind not in common.MSG_NAMES:
            refuse(f"sent a message of unknown kind {kind}")
        if kind in KEY_EXCHANGE_KINDS and size > MAX_EARLY_PACKET_BYTES:
            refuse(f"sent more than {MAX_EARLY_PACKET_BYTES} bytes in a message of a key exchange")
        if kind == common.MSG_EXT_INFO and number > MAX_EXTENSIONS:
            refuse(f"sent a list of more than {MAX_EXTENSIONS} extensions")
        if kind in COMMAND_KINDS and not connection.is_authenticated():
            refuse(f"sent {_name(kind)} before the login")
        if kind == common.MSG_SERVICE_ACCEPT:  # paramiko signs a login for each
            if connection.num_logins_requested == 0:
                refuse(f"sent {_name(kind)} that nobody asked for")
            connection.num_logins_requested -= 1
        if kind in CHANNEL_KINDS and number not in connection.channels_seen:
            refuse(f"sent {_name(kind)} for a channel that does not exist")
        if self._is_useful(kind, size, head):
            self._num_useful += size
        else:
            self._charge(kind, size)

    def _is_useful(self, kind: int, size: int, head: bytes) -> bool:
        """Return whether the message is data or a larger window for an open channel, within their bounds."""
        refuse = self._connection.packetizer.refuse
        if kind not in (common.MSG_CHANNEL_WINDOW_ADJUST, *HEADER_BYTES):
            return False
        channel: Any = self._connection._channels.get(int.from_bytes(head[:4], "big"))
        if channel is None:
            return False
        if kind == common.MSG_CHANNEL_WINDOW_ADJUST:
            added = int.from_bytes(head[4:8], "big")
            if channel.out_window_size + added > common.MAX_WINDOW_SIZE:
                refuse("opened the window of a channel beyond 2^32 - 1 bytes")
            return added >= SMALL_WINDOW_BYTES
        header_bytes = HEADER_BYTES[kind]
        num_bytes = size - header_bytes
        if num_bytes != int.from_bytes(head[header_bytes - 4 : header_bytes], "big"):
            refuse("sent data of a length other than announced")  # paramiko would fill it up to a megabyte
        # OpenSSH disconnects at the same excess. An honest server is never ahead of the reader by more.
        num_unread = len(channel.in_buffer) + len(channel.in_stderr_buffer) + num_bytes
        if num_unread > channel.in_window_size + channel.in_window_size // 10:
            refuse("sent more than the receive window of a channel allows")
        is_extended = kind == common.MSG_CHANNEL_EXTENDED_DATA
        return num_bytes > 0 and not (is_extended and int.from_bytes(head[4:8], "big") != STDERR_TYPE)

    def _charge(self, kind: int, size: int) -> None:
        is_extra_exchange = kind == common.MSG_KEXINIT and not self._connection.packetizer.need_rekey()
        now_s, num_sent = time.monotonic(), self._connection.packetizer.meter.num_sent
        earned = (now_s - self._counted_s) * IDLE_COST_PER_S
        earned += (num_sent - self._num_sent_before + self._num_useful) / 1024
        self._cost_left = min(MAX_IDLE_COST, self._cost_left + earned)
        self._counted_s, self._num_sent_before, self._num_useful = now_s, num_sent, 0
        per_cost = DEBUG_BYTES_PER_COST if kind == common.MSG_DEBUG else 1024
        self._cost_left -= 1 + size // per_cost + (KEY_EXCHANGE_COST if is_extra_exchange else 0)
        if self._cost_left < 0:
            self._connection.packetizer.refuse(f"floods the connection, at last {_name(kind)}")


def _name(kind: int) -> str:
    return f"a message of kind {kind} ({common.MSG_NAMES[kind].replace('--', '-')})"


class StrictTransport(paramiko.Transport):
    """Wait without polling. Drop messages on a channel after its close."""

    # Attributes of paramiko.Transport that its type stubs leave out.
    _channels: Any
    channels_seen: dict[int, bool]
    """The numbers of all channels that csdctl has opened."""
    clear_to_send: threading.Event
    host_key: paramiko.PKey | None

    packetizer: GreedyPacketizer
    _closed: frozenset[int] = frozenset()

    def __init__(self, connection: socket.socket | paramiko.Channel, node: str) -> None:
        """`node` is the name of the machine at the other end."""
        super().__init__(connection, packetizer_class=GreedyPacketizer)
        self.node = node
        self.num_logins_requested = 0
        self.offer = b""
        """The server's algorithms: its KEXINIT message, without its kind."""
        self.reconnect: Callable[[float], StrictTransport]
        """Opens another connection to the server within some seconds."""
        self._further: list[StrictTransport] = []
        self._rules = ServerRules(self)
        self.packetizer.check = self._check
        self.packetizer.before_read = self._send_waiting
        self._waiting_messages: list[paramiko.Message] = []
        # Behind a jump host the connection sends keepalive requests, so its thread must wake regularly.
        connection.settimeout(None if isinstance(connection, socket.socket) else 1.0)

    def exchange_keys(self, timeout_s: float) -> None:
        """Start the connection and wait for the key exchange. Raises TimeoutError, SSHException, EOFError."""
        exchanged = threading.Event()
        self.start_client(event=exchanged)
        if not exchanged.wait(timeout_s):
            raise TimeoutError
        if not self.active:
            raise self.get_exception() or paramiko.SSHException("Negotiation failed.")

    def offer_key(self, user: str, key: paramiko.PKey, timeout_s: float) -> list[str]:
        """Return what `user` needs besides `key` to log in. Raises SSHException when the key is refused."""
        self.auth_timeout = timeout_s
        self.num_logins_requested += 1
        replied = threading.Event()
        self.auth_publickey(user, key, replied)
        if not replied.wait(timeout_s):
            raise paramiko.AuthenticationException("no reply")
        assert self.auth_handler
        return self.auth_handler.wait_for_response(replied)

    def open_session(self, *_: Any, timeout: float | None = None, **sizes: Any) -> paramiko.Channel:
        """Open a channel for a command, on another connection when the server opens no more on this one."""
        timeout_s = timeout or self.channel_timeout
        for transport in (self, *filter(StrictTransport.is_active, self._further)):
            try:
                return paramiko.Transport.open_session(transport, timeout=timeout_s, **sizes)
            except paramiko.SSHException as error:  # a ChannelException may have gone to another thread
                if not self.is_active() or "Timeout" in str(error):
                    raise
        further = self.reconnect(timeout_s)
        further.packetizer.meter = self.packetizer.meter
        try:  # before another thread can take its only channel
            return paramiko.Transport.open_session(further, timeout=timeout_s, **sizes)
        finally:
            self._further.append(further)

    def get_exception(self) -> Exception | None:
        """Return and forget why the connection ended. Errors of paramiko's parsers become SSHException."""
        error = super().get_exception()
        if error is None or isinstance(error, EOFError | OSError | paramiko.SSHException):
            return error
        return paramiko.SSHException(f"damaged message ({type(error).__name__})")

    def stop_thread(self) -> None:
        """Wake the reading thread, so that it ends."""
        self.active = False
        for further in self._further:
            further.close()
        if isinstance(self.sock, socket.socket):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        # Behind a jump host this sends a message, and that connection may be lost already.
        with contextlib.suppress(*LOST):
            super().stop_thread()

    def run(self) -> None:
        """Read until the connection ends, in its thread."""
        with contextlib.suppress(*LOST):  # at the end it closes the socket: see `stop_thread`
            super().run()

    def _check(self, kind: int, message: paramiko.Message) -> None:
        self._rules.check(kind, message)
        if kind == common.MSG_CHANNEL_OPEN_SUCCESS:
            message.get_int()
            with self.clear_to_send_lock:
                self._closed -= {message.get_int()}  # the server reuses channel numbers
            message.rewind()
        elif kind == common.MSG_KEXINIT:
            self.offer = message.asbytes()

    def _verify_key(self, host_key: bytes, signature: bytes) -> None:
        """Check the server's signature. The key that was checked at first must stay the same."""
        first = self.host_key
        super()._verify_key(host_key, signature)  # type: ignore[misc]
        if first is not None and first != self.host_key:
            self.packetizer.refuse("has changed its host key in a running connection")

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Send when no key exchange is under way. Closes the connection when that takes too long.

        The reading thread never waits: it would wait for what it has to read itself.
        """
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            self._waiting_messages.append(data)
            return
        try:
            super()._send_user_message(data)  # type: ignore[misc]
        except paramiko.SSHException:
            self.packetizer.violation = self.packetizer.violation or "did not finish a key exchange"
            self.close()
            raise

    def _send_waiting(self) -> None:
        if self._waiting_messages and self.clear_to_send.is_set():
            waiting, self._waiting_messages = self._waiting_messages, []
            for data in waiting:
                self._send_user_message(data)

    def _send_message(self, data: paramiko.Message) -> None:
        # Channel messages arrive here one at a time: the caller holds `clear_to_send_lock`.
        head = bytes(data.packet.getbuffer()[:5])
        if common.MSG_CHANNEL_WINDOW_ADJUST <= head[0] <= common.MSG_CHANNEL_REQUEST:
            channel = int.from_bytes(head[1:], "big")
            if channel in self._closed:
                return
            if head[0] == common.MSG_CHANNEL_CLOSE:
                self._closed |= {channel}
        super()._send_message(data)  # type: ignore[misc]


def request_exec(channel: Any, command_line: bytes, timeout_s: float) -> None:
    """Do what `Channel.exec_command` does, with a limit of the wait for the reply. Raises SSHException."""
    request = paramiko.Message()
    request.add_byte(common.cMSG_CHANNEL_REQUEST)
    request.add_int(channel.remote_chanid)
    request.add_string("exec")
    request.add_boolean(True)
    request.add_string(command_line)
    channel._event_pending()
    channel.transport._send_user_message(request)
    if not channel.event.wait(timeout_s):
        raise paramiko.SSHException("no reply")
    channel._wait_for_event()
