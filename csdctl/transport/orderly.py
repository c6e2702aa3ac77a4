"""A paramiko connection that sleeps until something happens, and on which nothing follows a channel's end.

paramiko wakes each of its threads ten times a second to see whether the connection still lives, gives every
handshake a timer thread, and asks the system twice for every packet: for a hundred nodes that is half of all
the work. Here a connection that is closed wakes its thread, deadlines belong to those who wait, and what has
arrived is read at once.

paramiko also decides whether a channel is still open and sends on it in two steps, with other threads in
between: data, or a larger window, may leave after the channel's close. A server that has forgotten the
channel by then ends the whole connection ("nonexistent channel"), and with it every other command, or every
node behind a jump host.
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
"""SSH_MSG_CHANNEL_…, RFC 4254 section 9: all from the first to the last name the channel in bytes 1 to 5."""

_RECEIVE_BYTES = 1 << 17


class OrderlyTransport(paramiko.Transport):
    """Waits without polling, and drops what would be sent on a channel after its close."""

    # paramiko's own, which its type stubs leave out.
    _channels: Any
    _next_channel: Callable[[], int]
    _send_user_message: Callable[[paramiko.Message], None]
    _closed: frozenset[int] = frozenset()

    packetizer: "GreedyPacketizer"

    def __init__(self, connection: socket.socket | paramiko.Channel) -> None:
        super().__init__(connection, packetizer_class=GreedyPacketizer)
        # Behind a jump host the connection asks its peer for signs of life, so it wakes by itself.
        connection.settimeout(None if isinstance(connection, socket.socket) else 1.0)

    def exchange_keys(self, timeout_s: float) -> None:
        """Start the connection and wait for its first keys; raises TimeoutError, SSHException, EOFError."""
        exchanged = threading.Event()
        self.start_client(event=exchanged)
        if not exchanged.wait(timeout_s):
            raise TimeoutError
        if not self.active:
            raise self.get_exception() or paramiko.SSHException("Negotiation failed.")

    def offer_key(self, user: str, key: paramiko.PKey, timeout_s: float) -> bool:
        """Whether the server lets `user` in with `key`; raises SSHException when it does not."""
        self.auth_timeout = timeout_s
        answered = threading.Event()
        self.auth_publickey(user, key, answered)
        answered.wait(timeout_s)
        assert self.auth_handler
        return not self.auth_handler.wait_for_response(answered)

    def open_channel(
        self,
        kind: str,
        dest_addr: tuple[str, int] | None = None,
        src_addr: tuple[str, int] | None = None,
        window_size: int | None = None,
        max_packet_size: int | None = None,
        timeout: float | None = None,
    ) -> paramiko.Channel:
        """What paramiko's does, without asking ten times a second; raises SSHException, ChannelException."""
        if not self.active:
            raise paramiko.SSHException("SSH session not active")
        channel, answered = self._register_channel()
        request = paramiko.Message()
        request.add_byte(bytes([_OPEN]))
        request.add_string(kind)
        for number in (channel.chanid, channel.in_window_size, channel.in_max_packet_size):
            request.add_int(number)
        for address in (dest_addr, src_addr):
            if address:
                request.add_string(address[0])
                request.add_int(address[1])
        self._send_user_message(request)
        if not answered.wait(timeout):
            raise paramiko.SSHException("Timeout opening channel.")
        if self.active and self._channels.get(channel.chanid) is not None:
            return channel
        raise self.get_exception() or paramiko.SSHException("Unable to open channel.")

    def _register_channel(self) -> tuple[paramiko.Channel, threading.Event]:
        """A channel that is not open yet, and what is set when the server has answered."""
        answered = threading.Event()
        with self.lock:
            channel: Any = paramiko.Channel(self._next_channel())
            self._channels.put(channel.chanid, channel)
            self.channel_events[channel.chanid] = answered
            self.channels_seen[channel.chanid] = True
            channel._set_transport(self)
            channel._set_window(self.default_window_size, self.default_max_packet_size)
        if not self.active:  # it ended meanwhile, and may not have seen this channel
            answered.set()
        return channel, answered

    def stop_thread(self) -> None:
        """Wake the thread that reads, so that it ends, and those that wait for channels."""
        self.active = False
        with self.lock:
            for answered in self.channel_events.values():
                answered.set()
        if isinstance(self.sock, socket.socket):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        super().stop_thread()

    def _filter_algorithm(self, kind: str) -> tuple[str, ...]:
        """What to offer of a kind of algorithm; none is disabled."""
        return tuple(getattr(self, f"_preferred_{kind}"))

    def _parse_debug(self, message: paramiko.Message) -> None:
        """Nothing: OpenSSH sends some at every login, and paramiko spends a tenth of the login on them."""

    def _send_message(self, data: paramiko.Message) -> None:
        # All that concerns channels comes here one after the other: the caller holds `clear_to_send_lock`.
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
            self._closed -= {channel}  # the server uses its numbers again
        super()._parse_channel_open_success(message)  # type: ignore[misc]


class GreedyPacketizer(Packetizer):
    """Reads all that has arrived and keeps what is not asked for yet; has no timer for the handshake."""

    _check_keepalive: Callable[[], None]
    _Packetizer__remainder: bytes

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._connection = connection
        self._held = b""
        self._start = 0
        self.meter = Meter()

    def write_all(self, out: Any) -> None:
        """What paramiko's does, counted."""
        super().write_all(out)
        self.meter.num_sent += len(out)

    def start_handshake(self, timeout: float) -> None:
        """Nothing: who waits for the handshake has a deadline."""

    def readline(self, timeout: float) -> str:
        """A line of the server's greeting; what came after it is kept."""
        line = super().readline(timeout)
        self.meter.num_received += len(line) + len("\r\n")
        # Until the greeting has ended, paramiko itself needs what came after the line.
        if line.startswith("SSH-"):
            self._held, self._Packetizer__remainder = self._Packetizer__remainder, b""
            self.meter.num_received += len(self._held)
        return line

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """The next `n` bytes; raises EOFError, and NeedRekeyException when keys are due and nothing came."""
        while len(self._held) - self._start < n:
            self._receive(check_rekey)
        start, self._start = self._start, self._start + n
        return self._held[start : self._start]

    def _receive(self, check_rekey: bool) -> None:
        """Wait for more, for as long as the connection waits at a time."""
        try:
            arrived = self._connection.recv(_RECEIVE_BYTES)
        except TimeoutError:
            if self.closed:
                raise EOFError from None
            if check_rekey and self._start == len(self._held) and self.need_rekey():
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
        self._held, self._start = self._held[self._start :] + arrived, 0
