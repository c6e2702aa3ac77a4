"""A paramiko connection on which nothing follows the end of a channel.

paramiko decides whether a channel is still open and sends on it in two steps, with other threads in between:
data, or a larger window, may leave after the channel's close. A server that has forgotten the channel by then
ends the whole connection ("nonexistent channel"), and with it every other command, or every node behind a
jump host.
"""

import contextlib
import socket
import struct

import paramiko

_WINDOW_ADJUST, _CLOSE, _REQUEST = 93, 97, 98
"""SSH_MSG_CHANNEL_…, RFC 4254 section 9: all from the first to the last name the channel in bytes 1 to 5."""


class OrderlyTransport(paramiko.Transport):
    """Drops what would be sent on a channel after its close; sleeps until there is something to read."""

    _active_check_timeout = 1.0
    _closed: frozenset[int] = frozenset()

    def close(self) -> None:
        """End the connection, and the sleep of the thread that reads from it."""
        if isinstance(self.sock, socket.socket):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        super().close()

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
