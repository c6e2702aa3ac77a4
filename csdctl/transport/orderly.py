"""A paramiko connection that does not poll, and that sends nothing on a channel after closing it.

paramiko wakes each of its threads ten times a second to check the connection, starts a timer thread for every
handshake, and makes two system calls per packet. For a hundred nodes that is half of all the work. Here,
closing a connection wakes its thread, callers have their own deadlines, and all available bytes are read at
once.

paramiko also checks whether a channel is open and sends on it in two steps, without a lock: data or a window
adjustment may be sent after the channel's close. A server that has forgotten the channel by then drops the
whole connection ("nonexistent channel"), and with it every other command, or every node behind a jump host.

This is the only module that uses private names of paramiko (`_…`): none of this can be done with its public
interface. `pyproject.toml` caps paramiko's version for that reason.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import paramiko
from paramiko.packet import NeedRekeyException, Packetizer

from csdctl.transport.meter import Meter

_OPEN, _WINDOW_ADJUST, _CLOSE, _REQUEST = 90, 93, 97, 98
"""SSH_MSG_CHANNEL_…, RFC 4254 section 9; from 93 to 98, bytes 1 to 5 are the channel's number."""

_RECEIVE_BYTES = 1 << 17


class OrderlyTransport(paramiko.Transport):
    """Wait without polling; drop messages on a channel after its close."""

    # Private attributes of paramiko.Transport; its type stubs leave them out.
    _channels: Any
    _next_channel: Callable[[], int]
    _send_user_message: Callable[[paramiko.Message], None]
    _closed: frozenset[int] = frozenset()

    packetizer: "GreedyPacketizer"

    def __init__(self, connection: socket.socket | paramiko.Channel) -> None:
        super().__init__(connection, packetizer_class=GreedyPacketizer)
        # Behind a jump host the connection sends keepalive requests, so its thread must wake regularly.
        connection.settimeout(None if isinstance(connection, socket.socket) else 1.0)

    def exchange_keys(self, timeout_s: float) -> None:
        """Start the connection and wait for the key exchange; raises TimeoutError, SSHException, EOFError."""
        exchanged = threading.Event()
        self.start_client(event=exchanged)
        if not exchanged.wait(timeout_s):
            raise TimeoutError
        if not self.active:
            raise self.get_exception() or paramiko.SSHException("Negotiation failed.")

    def offer_key(self, user: str, key: paramiko.PKey, timeout_s: float) -> bool:
        """Return whether `key` completes the authentication of `user`; raises SSHException when refused."""
        self.auth_timeout = timeout_s
        replied = threading.Event()
        self.auth_publickey(user, key, replied)
        replied.wait(timeout_s)
        assert self.auth_handler
        return not self.auth_handler.wait_for_response(replied)

    def open_channel(
        self,
        channel_type: str,
        dest_addr: tuple[str, int] | None = None,
        src_addr: tuple[str, int] | None = None,
        window_size: int | None = None,
        max_packet_size: int | None = None,
        timeout: float | None = None,
    ) -> paramiko.Channel:
        """Do what paramiko's method does, without polling; raises SSHException, ChannelException."""
        if not self.active:
            raise paramiko.SSHException("SSH session not active")
        channel, replied = self._register_channel()
        request = paramiko.Message()
        request.add_byte(bytes([_OPEN]))
        request.add_string(channel_type)
        for number in (channel.chanid, channel.in_window_size, channel.in_max_packet_size):
            request.add_int(number)
        for address in (dest_addr, src_addr):
            if address:
                request.add_string(address[0])
                request.add_int(address[1])
        self._send_user_message(request)
        if not replied.wait(timeout):
            raise paramiko.SSHException("Timeout opening channel.")
        if self.active and self._channels.get(channel.chanid) is not None:
            return channel
        raise self.get_exception() or paramiko.SSHException("Unable to open channel.")

    def _register_channel(self) -> tuple[paramiko.Channel, threading.Event]:
        """Return a channel that is not open yet, and the event that the server's reply sets."""
        replied = threading.Event()
        with self.lock:
            channel: Any = paramiko.Channel(self._next_channel())
            self._channels.put(channel.chanid, channel)
            self.channel_events[channel.chanid] = replied
            self.channels_seen[channel.chanid] = True
            channel._set_transport(self)
            channel._set_window(self.default_window_size, self.default_max_packet_size)
        if not self.active:  # it ended meanwhile, possibly without setting this event
            replied.set()
        return channel, replied

    def stop_thread(self) -> None:
        """Wake the reading thread, so that it ends, and all threads that wait for channels."""
        self.active = False
        with self.lock:
            for replied in self.channel_events.values():
                replied.set()
        if isinstance(self.sock, socket.socket):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        super().stop_thread()

    def _filter_algorithm(self, algorithm_type: str) -> tuple[str, ...]:
        """Return the algorithms of a kind to offer; none is disabled."""
        return tuple(getattr(self, f"_preferred_{algorithm_type}"))

    def _parse_debug(self, message: paramiko.Message) -> None:
        """Ignore debug messages: OpenSSH sends some at login, and parsing takes a tenth of the login."""

    def _send_message(self, data: paramiko.Message) -> None:
        # Channel messages arrive here one at a time: the caller holds `clear_to_send_lock`.
        head = bytes(data.packet.getbuffer()[:5])
        if _WINDOW_ADJUST <= head[0] <= _REQUEST:
            (channel,) = struct.unpack_from(">I", head, 1)
            if channel in self._closed:
                return
            if head[0] == _CLOSE:
                self._closed |= {channel}
        super()._send_message(data)  # type: ignore[misc]

    def _parse_channel_open_success(self, message: paramiko.Message) -> None:
        message.get_int()
        channel = message.get_int()
        message.rewind()
        with self.clear_to_send_lock:
            self._closed -= {channel}  # the server reuses channel numbers
        super()._parse_channel_open_success(message)  # type: ignore[misc]


class GreedyPacketizer(Packetizer):
    """Read all available bytes and buffer them; has no timer for the handshake."""

    # Private attributes of paramiko's Packetizer; its type stubs leave them out.
    _check_keepalive: Callable[[], None]
    _Packetizer__remainder: bytes

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._connection = connection
        self._buffer = b""
        self._start = 0
        self.meter = Meter()

    def write_all(self, out: Any) -> None:
        """Do what paramiko's method does, and count the bytes."""
        super().write_all(out)
        self.meter.num_sent += len(out)

    def start_handshake(self, timeout: float) -> None:
        """Do nothing: the caller of the handshake has a deadline."""

    def readline(self, timeout: float) -> str:
        """Return a line of the server's banner; buffer the bytes after it."""
        line = super().readline(timeout)
        self.meter.num_received += len(line) + len("\r\n")
        # Until the banner ends, paramiko itself needs the bytes after the line.
        if line.startswith("SSH-"):
            self._buffer, self._Packetizer__remainder = self._Packetizer__remainder, b""
            self.meter.num_received += len(self._buffer)
        return line

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """Return `n` bytes; raises EOFError, or NeedRekeyException when idle and a rekey is due."""
        while len(self._buffer) - self._start < n:
            self._receive(check_rekey)
        start, self._start = self._start, self._start + n
        return self._buffer[start : self._start]

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
        self._buffer, self._start = self._buffer[self._start :] + arrived, 0


def request_exec(channel: Any, command_line: bytes, timeout_s: float) -> None:
    """Do what `Channel.exec_command` does, with a timeout for the server's reply; raises SSHException.

    paramiko's own method waits for the reply without a limit.
    """
    request = paramiko.Message()
    request.add_byte(bytes([_REQUEST]))
    request.add_int(channel.remote_chanid)
    request.add_string("exec")
    request.add_boolean(True)
    request.add_string(command_line)
    channel._event_pending()
    channel.transport._send_user_message(request)
    if not channel.event.wait(timeout_s):
        raise paramiko.SSHException("no reply")
    channel._wait_for_event()
