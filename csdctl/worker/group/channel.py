"""A channel of messages between a rank and its link, over a Unix socket of their machine.

A message is a letter, a length and that many bytes; the receiver limits the length. The rank sends requests,
the link answers in order; while the link waits for other ranks it sends `WAITING` now and then.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable

from csdctl.worker.protocol.sandbox import SOCKETS_VARIABLE, USER_VARIABLE, link_address

CHOOSE, SUM, ALLGATHER, SEND, RECEIVE, CLOSE = b"O", b"S", b"G", b"P", b"R", b"C"
CONNECTIONS, NOT_FINITE, EXPECT = b"T", b"N", b"E"
"""Requests of the rank."""
SEND_HEAD = struct.Struct("<q?")
"""Of `SEND`: the receiving rank, and whether to answer only when all has left."""
DONE, WAITING, FAULT = b"D", b"W", b"F"
"""Answers of the link. `FAULT` is its last one: another rank has sent what no rank may send."""
MAX_NOTE_BYTES = 1 << 16
"""Of a greeting, `WAITING` or `FAULT`."""
_HEAD = struct.Struct("<cQ")
_PEER = struct.Struct("3i")


class LinkLostError(Exception):
    """The link is lost: MPI ended the job, or the other side closed the channel."""


class PeerFaultError(LinkLostError):
    """Another rank has sent what no rank may send; `rank` is its rank within the group."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank
        self.message = message


class Channel:
    """A connected socket that carries messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the file descriptor, for select."""
        return self._connection.fileno()

    def send(self, letter: bytes, content: bytes | bytearray | memoryview = b"") -> None:
        """Send one message; raises LinkLostError."""
        try:
            self._connection.sendall(_HEAD.pack(letter, len(content)))
            if len(content):
                self._connection.sendall(content)
        except OSError:
            raise LinkLostError from None

    def receive(
        self, max_bytes: int = 0, allow: Callable[[int], None] = lambda num_bytes: None
    ) -> tuple[bytes, bytearray]:
        """Return the next message; raises LinkLostError at the end.

        A message of more than `max_bytes` (and more than a note) is refused in the same way. `allow` is
        called with its length before memory is allocated.
        """
        letter, length = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > max(max_bytes, MAX_NOTE_BYTES):
            raise LinkLostError
        allow(length)
        return letter, self._exactly(length)

    def send_descriptor(self, descriptor: int) -> None:
        """Pass a file descriptor to the other side; raises LinkLostError."""
        try:
            socket.send_fds(self._connection, [b"M"], [descriptor])
        except OSError:
            raise LinkLostError from None

    def receive_descriptor(self) -> int:
        """Return the descriptor that the other side passed; raises LinkLostError."""
        _, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not descriptors:
            raise LinkLostError
        return descriptors[0]

    def shut(self) -> None:
        """End the stream for both sides; may be called from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _exactly(self, length: int) -> bytearray:
        content = bytearray(length)
        view, done = memoryview(content), 0
        while done < length:
            try:
                count = self._connection.recv_into(view[done:])
            except OSError:
                count = 0
            if not count:
                raise LinkLostError
            done += count
        return content


def socket_name(run_id: str, rank: int, key: str = "") -> str:
    """Return the abstract Unix address at which a rank listens; nothing of it is on any disk."""
    return "\0" + link_address(run_id, rank, key)


def find_socket(run_id: str, rank: int) -> str:
    """Return the same to a link, which knows no key: its environment has the address."""
    known = os.environ.get(SOCKETS_VARIABLE, "").split()
    start = link_address(run_id, rank, "")
    return "\0" + next((name for name in known if name.startswith(start + "/")), start)


def is_of_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as the same user, outside of a sandbox."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(peer)
    return bool(uid == int(os.environ.get(USER_VARIABLE, os.getuid())))
