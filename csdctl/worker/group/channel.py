"""A rank and its link on one machine: their channel of messages, and the memory of two vectors.

The channel is a Unix socket. A message is a letter, a length and that many bytes; the receiver limits the
length. The rank sends requests, the link answers in order; while the link waits for other ranks it sends
`WAITING` now and then.
"""

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from csdctl.worker.group.values import LinkLostError
from csdctl.worker.protocol.json_codec import Count, Generation, RankNumber, ShortText, from_json
from csdctl.worker.protocol.processes import is_of_same_user
from csdctl.worker.protocol.sandbox import SOCKETS_VARIABLE, link_address


class Request:
    """Letters of the rank's requests."""

    CHOOSE, SUM, ALLGATHER, SEND, RECEIVE, CLOSE = b"O", b"S", b"G", b"P", b"R", b"C"
    CONNECTIONS, NOT_FINITE, EXPECT = b"T", b"N", b"E"
    ADD, SPREAD, GATHER, SHARE = b"A", b"B", b"H", b"V"
    """The halves of a sum and of an allgather: to rank 0, and from it to the others."""


class Answer:
    """Letters of the link's answers; `FAULT` is its last: another rank has sent what no rank may send."""

    DONE, WAITING, FAULT = b"D", b"W", b"F"


SEND_HEAD = struct.Struct("<q?")
"""Head of a `SEND` request: the receiving rank, and whether to answer only when all has left."""
LIMIT = struct.Struct("<q")
"""Head of `GATHER` and `SHARE`: the largest size of a rank's part, or of what is shared."""
MAX_NOTE_BYTES = 1 << 16
"""Largest size of a greeting, `WAITING` or `FAULT`."""
_HEAD = struct.Struct("<cQ")


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


POLL_S = 0.1


@dataclass(frozen=True)
class LinkGreeting:
    """The first message of a link: its group and level, and its rank and size in MPI's world."""

    generation: Generation
    rank: RankNumber
    size: Count
    level: ShortText = ""


class Listener:
    """Accepts the links of one rank, one after another."""

    def __init__(self, run_id: str, rank: int, key: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(socket_name(run_id, rank, key))
        self._socket.listen(4)

    def close(self) -> None:
        """Accept no more links."""
        self._socket.close()

    def accept_link(
        self, generation: int, is_over: Callable[[], bool]
    ) -> tuple[Channel, LinkGreeting] | None:
        """Return the link of group `generation`; None as soon as `is_over`.

        Processes of other users, and links of an earlier group, are refused.
        """
        while not is_over():
            if not select.select([self._socket], [], [], POLL_S)[0]:
                continue
            connection, _ = self._socket.accept()
            channel = Channel(connection)
            with contextlib.suppress(LinkLostError, ValueError):
                if is_of_same_user(connection):
                    greeting = from_json(LinkGreeting, channel.receive()[1].decode())
                    if greeting.generation == generation:
                        return channel, greeting
            channel.close()
        return None


FLOAT_BYTES = 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedVectors:
    """The rank's side: it allocates the memory and passes `descriptor` to the link."""

    def __init__(self, num_elements: int) -> None:
        import numpy as np

        self.descriptor = os.memfd_create("csdctl-vectors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        half = num_elements * FLOAT_BYTES
        os.posix_fallocate(self.descriptor, 0, 2 * half)
        # A link that cut the memory short would end the rank by SIGBUS.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.descriptor, 2 * half)
        self.local = np.frombuffer(self._map, np.float32, num_elements, 0)
        self.total = np.frombuffer(self._map, np.float32, num_elements, half)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the arrays."""
        os.close(self.descriptor)


def map_vectors(descriptor: int, *, is_adding: bool) -> tuple[Any, Any]:
    """Return (local, total) as the link sees them: numpy arrays where it adds, else memoryviews.

    A link that does not add needs no numpy.
    """
    size = os.fstat(descriptor).st_size
    mapped = mmap.mmap(descriptor, size)
    os.close(descriptor)
    if is_adding:
        import numpy as np

        whole = np.frombuffer(mapped, np.float32)
        return whole[: len(whole) // 2], whole[len(whole) // 2 :]
    view = memoryview(mapped).cast("f")
    return view[: len(view) // 2], view[len(view) // 2 :]
