"""A paramiko connection that does not poll, keeps to the protocol when it closes, and trusts no server.

paramiko wakes each of its threads ten times a second to check the connection, starts a timer thread for every
handshake, and makes two system calls per packet. For a hundred nodes that is half of all the work. Here,
closing a connection wakes its thread, callers have their own deadlines, and all available bytes are read at
once.

paramiko also checks whether a channel is open and sends on it in two steps, without a lock: data or a window
adjustment may be sent after the channel's close. A server that has forgotten the channel by then drops the
whole connection ("nonexistent channel"), and with it every other command, or every node behind a jump host.

A server may be hostile: it can ignore the window of a channel, and send anything at any time. Packets are
bounded in `packets`, messages in `server_rules`, the data of a channel here.

This module and `packets` are the only ones that use private names of paramiko (`_…`): none of this can be
done with its public interface. `pyproject.toml` caps paramiko's version for that reason.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from csdctl.transport.packets import MAX_PACKET_BYTES, GreedyPacketizer
from csdctl.transport.server_rules import Kind, ServerRules
from csdctl.transport.session import bounded

MAX_BANNER_LINES = 1024
"""Lines before the version; the same as OpenSSH's limit."""

MAX_EXTENSIONS = 64
"""In one message; OpenSSH has three. paramiko loops as often as the server says, up to 2^32 times."""

LOST = (paramiko.SSHException, EOFError, OSError)
"""What sending raises when the connection is lost."""

_STDERR = 1
_MAX_WINDOW_BYTES = 0xFFFFFFFF


class StrictChannel(paramiko.Channel):
    """A channel that accepts no more than its window: paramiko buffers whatever arrives."""

    # Private attributes of paramiko.Channel; its type stubs leave them out.
    in_buffer: Any
    in_stderr_buffer: Any
    out_window_size: int
    _num_granted = 0
    _num_arrived = 0

    def _set_window(self, window_size: int, max_packet_size: int) -> None:
        super()._set_window(window_size, max_packet_size)  # type: ignore[misc]
        # OpenSSH disconnects at the same excess.
        self._num_granted = window_size + window_size // 10

    def _check_add_window(self, n: int) -> int:
        """Return how much to add to the window, now that `n` bytes were read."""
        added = int(super()._check_add_window(n))  # type: ignore[misc]
        with self.lock:
            self._num_granted += added
        return added

    def _feed(self, message: paramiko.Message) -> None:
        data = message.get_binary()
        self._count(data)
        self.in_buffer.feed(data)

    def _feed_extended(self, message: paramiko.Message) -> None:
        kind, data = message.get_int(), message.get_binary()
        self._count(data)
        if kind == _STDERR:
            self.in_stderr_buffer.feed(data)

    def _count(self, data: bytes) -> None:
        self._num_arrived += len(data)
        with self.lock:
            num_granted = self._num_granted
        if self._num_arrived > num_granted:
            self._refuse("sent more than the receive window of a channel allows")

    def _window_adjust(self, message: paramiko.Message) -> None:
        super()._window_adjust(message)  # type: ignore[misc]
        if self.out_window_size > _MAX_WINDOW_BYTES:
            self._refuse("opened the window of a channel beyond 2^32 - 1 bytes")

    def _refuse(self, violation: str) -> NoReturn:
        assert isinstance(self.transport, StrictTransport)
        self.transport.packetizer.refuse(violation)


class StrictTransport(paramiko.Transport):
    """Wait without polling; drop messages on a channel after its close."""

    # Private attributes of paramiko.Transport; its type stubs leave them out.
    _channels: Any
    _next_channel: Callable[[], int]
    _closed: frozenset[int] = frozenset()

    channels_seen: dict[int, bool]
    clear_to_send: threading.Event
    host_key: paramiko.PKey | None
    initial_kex_done: bool
    remote_version: str

    packetizer: GreedyPacketizer

    # Whatever the server sends for a channel; the channels are all made here.
    _channel_handler_table = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        Kind.WINDOW_ADJUST: StrictChannel._window_adjust,
        Kind.DATA: StrictChannel._feed,
        Kind.EXTENDED_DATA: StrictChannel._feed_extended,
    }

    def __init__(self, connection: socket.socket | paramiko.Channel) -> None:
        super().__init__(connection, packetizer_class=GreedyPacketizer)
        self.num_logins_requested = 0
        self.packetizer.check = ServerRules(self).check
        self._waiting_messages: list[paramiko.Message] = []
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
        self.num_logins_requested += 1
        replied = threading.Event()
        self.auth_publickey(user, key, replied)
        if not replied.wait(timeout_s):
            raise paramiko.AuthenticationException("no reply")
        assert self.auth_handler
        return not self.auth_handler.wait_for_response(replied)

    def open_channel(
        self,
        kind: str,
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
        request.add_byte(bytes([Kind.OPEN]))
        request.add_string(kind)
        for number in (channel.chanid, channel.in_window_size, channel.in_max_packet_size):
            request.add_int(number)
        for address in (dest_addr, src_addr):
            if address:
                request.add_string(address[0])
                request.add_int(address[1])
        self._send_user_message(request)
        if not replied.wait(self.channel_timeout if timeout is None else timeout):
            raise paramiko.SSHException("Timeout opening channel.")
        if self.active and self._channels.get(channel.chanid) is not None:
            return channel
        raise self.get_exception() or paramiko.SSHException("Unable to open channel.")

    def _register_channel(self) -> tuple[paramiko.Channel, threading.Event]:
        """Return a channel that is not open yet, and the event that the server's reply sets."""
        replied = threading.Event()
        with self.lock:
            channel: Any = StrictChannel(self._next_channel())
            self._channels.put(channel.chanid, channel)
            self.channel_events[channel.chanid] = replied
            self.channels_seen[channel.chanid] = True
            channel._set_transport(self)
            channel._set_window(self.default_window_size, self.default_max_packet_size)
        if not self.active:  # it ended meanwhile, possibly without setting this event
            replied.set()
        return channel, replied

    def has_channel(self, number: int) -> bool:
        """Whether the channel is open."""
        return self._channels.get(number) is not None

    def get_exception(self) -> Exception | None:
        """Return and forget why the connection ended: SSHException, EOFError or OSError.

        paramiko also keeps what its parsers raise for damaged messages, such as KeyError or UnicodeError.
        """
        error = super().get_exception()
        if error is None or isinstance(error, EOFError | OSError | paramiko.SSHException):
            return error
        return paramiko.SSHException(f"damaged message ({type(error).__name__})")

    def stop_thread(self) -> None:
        """Wake the reading thread, so that it ends, and all threads that wait for channels."""
        self.active = False
        with self.lock:
            for replied in self.channel_events.values():
                replied.set()
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

    def _filter_algorithm(self, algorithm_type: str) -> tuple[str, ...]:
        """Return the algorithms of a kind to offer; none is disabled."""
        return tuple(getattr(self, f"_preferred_{algorithm_type}"))

    def _parse_debug(self, message: paramiko.Message) -> None:
        """Ignore debug messages: OpenSSH sends some at login, and parsing takes a tenth of the login."""

    def _parse_ext_info(self, message: paramiko.Message) -> None:
        if message.get_int() > MAX_EXTENSIONS:
            self.packetizer.refuse(f"sent a list of more than {MAX_EXTENSIONS} extensions")
        message.rewind()
        super()._parse_ext_info(message)  # type: ignore[misc]

    def _check_banner(self) -> None:
        """Read the server's version, and the lines before it."""
        for _ in range(MAX_BANNER_LINES):
            line = self.packetizer.readline(self.banner_timeout)
            if line.startswith("SSH-"):
                break
        else:
            raise IncompatiblePeer(f"no SSH version in {MAX_BANNER_LINES} lines")
        if not line.startswith(("SSH-2.0-", "SSH-1.99-")):
            raise IncompatiblePeer(f"its version is {bounded(line)}")
        self.remote_version = line

    def _verify_key(self, host_key: bytes, signature: bytes) -> None:
        """Check the server's signature; the key that was checked at first must stay the same."""
        first = self.host_key
        super()._verify_key(host_key, signature)  # type: ignore[misc]
        if first is not None and first != self.host_key:
            self.packetizer.refuse("has changed its host key in a running connection")

    def _auth_trigger(self) -> None:
        self.packetizer.max_packet_bytes = MAX_PACKET_BYTES
        super()._auth_trigger()  # type: ignore[misc]

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Send when no key exchange is under way; closes the connection when that takes too long.

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

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)  # type: ignore[misc]
        waiting, self._waiting_messages = self._waiting_messages, []
        for data in waiting:
            self._send_user_message(data)

    def _send_message(self, data: paramiko.Message) -> None:
        # Channel messages arrive here one at a time: the caller holds `clear_to_send_lock`.
        head = bytes(data.packet.getbuffer()[:5])
        if Kind.WINDOW_ADJUST <= head[0] <= Kind.REQUEST:
            (channel,) = struct.unpack_from(">I", head, 1)
            if channel in self._closed:
                return
            if head[0] == Kind.CLOSE:
                self._closed |= {channel}
        super()._send_message(data)  # type: ignore[misc]

    def _parse_channel_open_success(self, message: paramiko.Message) -> None:
        message.get_int()
        channel = message.get_int()
        message.rewind()
        with self.clear_to_send_lock:
            self._closed -= {channel}  # the server reuses channel numbers
        super()._parse_channel_open_success(message)  # type: ignore[misc]


def request_exec(channel: Any, command_line: bytes, timeout_s: float) -> None:
    """Do what `Channel.exec_command` does, with a timeout for the server's reply; raises SSHException.

    paramiko's own method waits for the reply without a limit.
    """
    request = paramiko.Message()
    request.add_byte(bytes([Kind.REQUEST]))
    request.add_int(channel.remote_chanid)
    request.add_string("exec")
    request.add_boolean(True)
    request.add_string(command_line)
    channel._event_pending()
    channel.transport._send_user_message(request)
    if not channel.event.wait(timeout_s):
        raise paramiko.SSHException("no reply")
    channel._wait_for_event()
