"""The channels of messages between the processes of a machine, and the memory of vectors that they share.

A rank, its link or its hub, and the links of a hub are connected by Unix sockets. A message is a letter, a
length and that many bytes. The receiver limits the length. Vectors are in shared memory.
"""

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from csdctl.worker.group.chunks import SumSizes
from csdctl.worker.group.values import LinkLostError
from csdctl.worker.protocol.json_codec import Count
from csdctl.worker.protocol.processes import is_of_user

NUMBER = struct.Struct("<q")
"""A rank before the content of DATA, or the length of a part."""
MAX_NOTE_BYTES = 1 << 20
"""Largest size of a message without vectors, values or state."""
MAX_VALUE_BYTES = 1 << 18
"""Largest size of one rank's value: several times the size of a thousand byte counters."""
MAX_VALUES_BYTES = 1 << 28
"""Largest size of the values of all ranks."""
_HEAD = struct.Struct("<cQ")
"""Letter and length of a message."""
_READ_BYTES = 1 << 16
"""A larger buffer would be mapped and unmapped by every call."""
POLL_S = 0.1


class Letter:
    """The letters of messages. The first two groups pass a link. The other messages stay on one machine."""

    JOIN, VECTOR, VALUE, DATA, VOIDED, CLOSE = b"J", b"V", b"G", b"P", b"K", b"C"
    """From a rank: ready, a part of a sum, a value, bytes for one rank, an aborted step, the end."""
    TOTAL, VALUES, VOID, AGAIN = b"T", b"H", b"X", b"A"
    """To a rank: the verdict of a sum, all values, an aborted step, all chunks will be sent again."""
    OPEN, ADMIT, NOTE, WAITING, TRAFFIC = b"O", b"M", b"N", b"W", b"B"
    """Between a rank and its hub, or a hub and a link: settings, admitted, lost and missing ranks, bytes."""
    CHUNK = b"D"
    """Between a hub and a link: the next chunk of a vector has arrived, or a chunk of the sum can leave."""
    WITH_SENDER = (JOIN, VALUE, DATA, VOIDED, CLOSE)
    """Messages that begin with the rank that sends them, from there to the hub of the host."""
    FROM_RANKS = (*WITH_SENDER, VECTOR, NOTE)
    """Messages that may come from another machine. Only a server sends VECTOR and NOTE."""


@dataclass(frozen=True)
class LinkSettings:
    """The settings of a link. The descriptors of its vector and of the sum come with them."""

    sizes: SumSizes
    max_bytes: Count
    has_parts: bool = False
    """Whether to report each chunk that has arrived: to a hub."""


class Channel:
    """A connected socket that carries messages. `take`, `post` and `flush` never wait, other methods do."""

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_NOTE_BYTES) -> None:
        """A longer message than `max_bytes` ends the channel."""
        self._connection, self.max_bytes = connection, max_bytes
        self._received, self.unsent = bytearray(), bytearray()
        """`unsent`: messages that wait for `flush`."""

    def fileno(self) -> int:
        """Return the file descriptor, for select."""
        return self._connection.fileno()

    def send(self, letter: bytes, content: bytes | bytearray | memoryview = b"") -> None:
        """Send one message. Raises LinkLostError."""
        try:
            self._connection.sendall(b"".join((_HEAD.pack(letter, len(content)), content)))
        except OSError:
            raise LinkLostError from None

    def receive(self) -> tuple[bytes, bytearray]:
        """Return the next message. Raises LinkLostError at the end."""
        while not (message := self._next_message()):
            self._read(0)
        return message

    def take(self) -> Iterator[tuple[bytes, bytearray]]:
        """Yield the messages that have arrived. Raises LinkLostError at the end."""
        with contextlib.suppress(BlockingIOError):
            self._read(socket.MSG_DONTWAIT)
        while message := self._next_message():
            yield message

    def _read(self, flags: int) -> None:
        try:
            received = self._connection.recv(_READ_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:
            received = b""
        if not received:
            raise LinkLostError
        self._received += received

    def _next_message(self) -> tuple[bytes, bytearray] | None:
        if len(self._received) < _HEAD.size:
            return None
        letter, length = _HEAD.unpack_from(self._received)
        if length > self.max_bytes:
            raise LinkLostError
        end = _HEAD.size + length
        if end > len(self._received):
            return None
        content = self._received[_HEAD.size : end]
        del self._received[:end]
        return letter, content

    def post(self, letter: bytes, content: bytes | bytearray | memoryview = b"") -> None:
        """Keep one message for `flush`. Messages that are sent together wake the other side once."""
        self.unsent += _HEAD.pack(letter, len(content))
        self.unsent += content

    def flush(self) -> None:
        """Send posted messages as far as the other side takes them. If it has ended, `take` raises."""
        try:
            while self.unsent:
                del self.unsent[: self._connection.send(self.unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def send_descriptors(self, *descriptors: int) -> None:
        """Pass file descriptors to the other side. Raises LinkLostError."""
        try:
            socket.send_fds(self._connection, [b"M"], descriptors)
        except OSError:
            raise LinkLostError from None

    def receive_descriptors(self, count: int) -> list[int]:
        """Return the descriptors that the other side passed. Raises LinkLostError."""
        descriptors: list[int] = []
        with contextlib.suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._connection, 1, count)
        if len(descriptors) != count:
            raise LinkLostError
        return descriptors

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


class Listener:
    """Accepts the links of one rank, one after another, at an address that is on no disk."""

    def __init__(self, address: str, rank: int) -> None:
        """`rank`: the one behind the link."""
        self.rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + address)
        self._socket.listen(4)

    def fileno(self) -> int:
        """Return the file descriptor, for select."""
        return self._socket.fileno()

    def close(self) -> None:
        """Accept no more links."""
        self._socket.close()

    def accept(self) -> Channel | None:
        """Return a link that has connected, or None if it is another user's process."""
        connection, _ = self._socket.accept()
        if is_of_user(connection):
            return Channel(connection)
        connection.close()
        return None

    def await_link(self, check: Callable[[], object]) -> Channel:
        """Return the next link. `check` is called now and then, and may raise an error."""
        while True:
            check()
            if select.select([self._socket], [], [], POLL_S)[0] and (channel := self.accept()):
                return channel


def join_parts(parts: Sequence[bytes | bytearray]) -> bytes:
    """Return several byte strings as one."""
    return b"".join(piece for part in parts for piece in (NUMBER.pack(len(part)), part))


def split_parts(joined: bytes | bytearray) -> list[bytes]:
    """Return the byte strings that `join_parts` joined. Raises ValueError."""
    parts, content = [], memoryview(joined)
    while content:
        size = NUMBER.unpack_from(content)[0] if len(content) >= NUMBER.size else -1
        if not 0 <= size <= len(content) - NUMBER.size:
            raise ValueError("cut short")
        parts.append(bytes(content[NUMBER.size :][:size]))
        content = content[NUMBER.size + size :]
    return parts
