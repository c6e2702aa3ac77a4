"""The two ends of a link: small MPI processes that pass messages and vectors between a node and its hub.

Each link is an MPI job of its own with two ranks (docs/decisions/0052): rank 0 beside the hub, rank 1 beside
the node's rank. The rank holds TensorFlow, model and data, and is started by csdctl over SSH. The link is
started by mpirun. When it is lost, the hub goes on without the rank, and a new link brings the rank back.
"""

import contextlib
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Collection
from typing import Any

from csdctl.worker.group.channel import MAX_VALUES_BYTES, NUMBER, Channel, Letter, LinkSettings
from csdctl.worker.group.chunks import divide
from csdctl.worker.group.mpi import NUM_LOOKS, Incoming, World, init_mpi, limit_memory
from csdctl.worker.group.shared_memory import map_view
from csdctl.worker.group.values import LinkLostError, PeerFaultError, encode_value
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.processes import is_of_user, list_connections
from csdctl.worker.protocol.sandbox import CONNECTED, SOCKETS_VARIABLE

HEAD, BODY, MEETING, CHUNK = 1, 2, 3, 4
"""Tags of MPI messages: letter and size of a message, its content, a byte at the start, and the chunks of
vectors until a step is given up. Later chunks have the next tag."""
_HEAD = struct.Struct("<cqq")
"""Letter, size, and the number of chunks that were sent before it."""
HEAD_BYTES = 64
INLINE_BYTES = HEAD_BYTES - _HEAD.size
"""A shorter content is sent with its head."""
FIRST_SLEEP_S, LONGEST_SLEEP_S, SLEEP_GROWTH = 0.0001, 0.002, 1.3
"""Sleeps between the parts of a message that is arriving: each wake-up costs a slow node more."""
IDLE_S, LONGEST_IDLE_S, IDLE_GROWTH = 0.02, 0.2, 1.1
"""Maximum time between two tests of pending MPI requests, even if no socket is ready."""
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 2,
    socket.TCP_USER_TIMEOUT: 1900,
}
"""A machine whose kernel has acknowledged nothing for about 2 s is lost: no power, no cable. It is less than
the time of two probes, so that the second probe decides.

A process that is stopped or throttled does not count as lost, since its kernel answers.
"""
DRAIN_S = 0.3
"""Time for the other end to acknowledge what was sent last."""


class _Link:
    """The common part of both ends: messages and chunks, in the order in which they were sent."""

    def __init__(
        self, world: World, channel: Channel, rank: int, daemon_connections: Collection[str]
    ) -> None:
        """`daemon_connections`: addresses of this process's connections that are not to the other end."""
        self.world, self.channel, self._daemon_connections = world, channel, daemon_connections
        self._voided = NUMBER.pack(rank)
        """Content of a VOIDED message of this rank, not of a rank behind it."""
        vector, total = channel.receive_descriptors(2)
        self._vector, self._total = map_view(vector), map_view(total, is_read_only=world.rank == 0)
        letter, content = channel.receive()
        if letter != Letter.OPEN:
            raise LinkLostError
        self.settings = from_json(LinkSettings, content.decode())
        channel.max_bytes = self.settings.max_bytes + MAX_VALUES_BYTES
        self._chunks = [divide(*size) for size in self.settings.sizes]
        self._tag = CHUNK - 1
        self._arrivals: deque[Incoming] = deque()
        self._departures: deque[tuple[Any, Any]] = deque()
        """MPI requests of messages that leave, and their memory."""
        self._num_sent = self._num_received = 0
        self._head, self._is_closing = bytearray(HEAD_BYTES), False
        limit_memory(4 * sum(size for size, _ in self.settings.sizes), self.settings.max_bytes)
        self._begin_anew()
        self._receive_head()

    def _begin_anew(self) -> None:
        """Begin a step, or repeat an aborted one. Its chunks have a new tag."""
        for request in self._arrivals:
            request.cancel()
        self._arrivals.clear()
        self._tag += 1
        self._number = self._place = 0
        """The number of the sum within the step, and its next chunk."""
        self._is_again, self._verdict = False, b""
        """Whether all chunks of the sum will be sent again, and the verdict of the sum."""

    def serve(self) -> None:
        """Pass on messages until the end. Raises LinkLostError and PeerFaultError."""
        sleep_s, idle_s, local = FIRST_SLEEP_S, IDLE_S, self.channel.fileno()
        poll = select.poll()
        for descriptor in self.world.ready:
            poll.register(descriptor, select.POLLIN)
        self._take()
        while True:
            self.channel.flush()
            if self._is_closing and not self._departures and not self.channel.unsent:
                return
            reading = 0 if self._is_closing else select.POLLIN
            if mask := reading | (select.POLLOUT if self.channel.unsent else 0):
                poll.register(local, mask)
            else:
                with contextlib.suppress(KeyError):  # it is not registered any more
                    poll.unregister(local)
            events = poll.poll(1e3 * idle_s)
            is_local = any(descriptor == local for descriptor, _ in events)
            if is_local:
                self._take()
            if self._look() or is_local:
                sleep_s, idle_s = FIRST_SLEEP_S, IDLE_S
            elif not events:
                idle_s = min(LONGEST_IDLE_S, idle_s * IDLE_GROWTH)
            else:
                select.select([self.channel] if reading else [], [], [], sleep_s)
                sleep_s = min(LONGEST_SLEEP_S, sleep_s * SLEEP_GROWTH)

    def _take(self) -> None:
        if not self._is_closing:
            for letter, content in self.channel.take():
                self.handle_local(letter, content)

    def _look(self) -> bool:
        """Process messages that have arrived over MPI or have left. Return whether there were any."""
        did_any = False
        while self._departures and self._departures[0][0].Test():
            self._departures.popleft()
            did_any = True
        # This comes last. The next call must look at what one call has taken from the sockets, because they
        # are not ready a second time.
        while self._process_next():
            did_any = True
        return did_any

    def _process_next(self) -> bool:
        """Process the chunk or message that was sent next. Return False if it has not arrived."""
        if self._message is None:
            self._arriving.Test(1 if self._arrivals else NUM_LOOKS)
        has_chunk = bool(self._arrivals) and self._arrivals[0].Test(NUM_LOOKS)
        message = self._message or self._read_head()
        if message and message[2] <= self._num_received:
            if not self._arriving.Test(NUM_LOOKS):
                return False
            self._receive_head()
            self.handle_remote(*message[:2])
        elif has_chunk:  # messages sent before it have arrived, too
            self._arrivals.popleft()
            self._num_received += 1
            self._handle_chunk()
        else:
            return False
        return True

    def _receive_head(self) -> None:
        self._message: tuple[bytes, bytearray, int] | None = None
        """A message whose head has arrived: letter, content, and number of chunks before it."""
        self._head[0] = 0
        self._arriving = self.world.start_receive(memoryview(self._head), HEAD)

    def _read_head(self) -> tuple[bytes, bytearray, int] | None:
        """Return the next message if its head has arrived. Its content may still be arriving."""
        # MPI is not asked again for a head that is not there: it would take more from the sockets.
        if not (self._head[0] or self._arriving.is_complete) or not self._arriving.Test(NUM_LOOKS):
            return None
        letter, size, num_before = _HEAD.unpack_from(self._head)
        if not 0 <= size <= self.settings.max_bytes:
            raise PeerFaultError(1, f"sent {size} bytes, expected at most {self.settings.max_bytes}")
        content = self._head[_HEAD.size : _HEAD.size + size]
        if size > INLINE_BYTES:
            content = bytearray(size)
            self._arriving = self.world.start_receive(memoryview(content), BODY)
        self._message = letter, content, num_before
        return self._message

    def pass_over(self, letter: bytes, content: bytes | bytearray = b"") -> None:
        """Send a message over MPI."""
        is_inline = len(content) <= INLINE_BYTES
        head = _HEAD.pack(letter, len(content), self._num_sent) + (content if is_inline else b"")
        self._depart(head.ljust(HEAD_BYTES, b"\0"), HEAD)
        if not is_inline:
            self._depart(content, BODY)

    def _send_chunk(self, vector: Any, place: int) -> None:
        self._depart(vector[self._chunks[self._number][place].wire], self._tag)
        self._num_sent += 1

    def _depart(self, content: Any, tag: int) -> None:
        self._departures.append((self.world.start_send(content, tag), content))

    def _receive_chunks(self, vector: Any) -> None:
        for chunk in self._chunks[self._number]:
            self._arrivals.append(self.world.start_receive(vector[chunk.wire], self._tag))

    def _note(self, letter: bytes, content: bytes | bytearray) -> None:
        self._is_closing |= letter == Letter.CLOSE
        if letter == Letter.AGAIN:
            self._is_again = True
        elif letter == Letter.TOTAL:
            self._verdict = bytes(content)

    def _count_chunk(self) -> bool:
        """Count a chunk of the sum. Return whether that was the last one."""
        self._place = (self._place + 1) % len(self._chunks[self._number])
        if self._place or self._is_again:
            self._is_again &= self._place > 0
            return False
        is_void = self._verdict[:1] == b"\1"
        self._number = 0 if is_void else (self._number + 1) % len(self._chunks)
        return True

    def handle_local(self, letter: bytes, content: bytearray) -> None:
        raise NotImplementedError

    def handle_remote(self, letter: bytes, content: bytearray) -> None:
        raise NotImplementedError

    def _handle_chunk(self) -> None:
        raise NotImplementedError


class HubEnd(_Link):
    """The end beside the hub. It passes messages of the node's rank to the hub, and the sum to the node."""

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._receive_chunks(self._vector)

    def handle_remote(self, letter: bytes, content: bytearray) -> None:
        """Pass it on to the hub."""
        if letter not in Letter.FROM_RANKS:
            raise PeerFaultError(1, "sent a message that is not for hubs")
        if letter == Letter.VOIDED and content == self._voided:  # vectors follow from the first one on
            self._begin_anew()
        self.channel.post(letter, content)

    def _handle_chunk(self) -> None:
        self.channel.post(Letter.CHUNK)

    def handle_local(self, letter: bytes, content: bytearray) -> None:
        """Send a chunk or a message to the node."""
        if letter == Letter.CHUNK:
            self._send_chunk(self._total, self._place)
            if self._count_chunk():
                self._verdict = b""
                self._receive_chunks(self._vector)
        elif letter == Letter.TRAFFIC:
            connections = [
                tcp for tcp in list_connections(drain_s=DRAIN_S) if tcp.local not in self._daemon_connections
            ]
            num_bytes = [
                sum(tcp.num_sent for tcp in connections),
                sum(tcp.num_received for tcp in connections),
            ]
            self.channel.post(letter, encode_value(num_bytes))
        else:
            self._note(letter, content)
            self.pass_over(letter, content)


class RankEnd(_Link):
    """The end beside a node's rank, or a server's hub. It sends the vector over MPI and receives the sum."""

    def handle_local(self, letter: bytes, content: bytearray) -> None:
        """Send the vector or a message to the hub."""
        if letter == Letter.VOIDED and content == self._voided:
            self._begin_anew()
        elif letter == Letter.VECTOR:
            self._receive_chunks(self._total)
            for place in range(len(self._chunks[self._number])):
                self._send_chunk(self._vector, place)
        if letter != Letter.VECTOR or content:  # a node's vector is complete with its last chunk
            self.pass_over(letter, content)

    def handle_remote(self, letter: bytes, content: bytearray) -> None:
        """Pass it on to the rank or hub. A rank gets no parts of a sum."""
        self._note(letter, content)
        if self.settings.has_parts or letter not in (Letter.AGAIN, Letter.TOTAL):
            self.channel.post(letter, content)

    def _handle_chunk(self) -> None:
        if self.settings.has_parts:
            self.channel.post(Letter.CHUNK)
        if self._count_chunk():
            if not self.settings.has_parts:
                self.channel.post(Letter.TOTAL, self._verdict)
            self._verdict = b""
        elif not self._place:
            self._receive_chunks(self._total)


def watch_connections() -> None:
    """Let the kernel end MPI's connections when the other machine's kernel is silent."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as tcp:
                if tcp.type == socket.SOCK_STREAM and tcp.family in (socket.AF_INET, socket.AF_INET6):
                    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in KEEPALIVE.items():
                        tcp.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError:  # no socket
            continue


def serve_link(rank: int) -> int:
    """Connect to the rank or hub of this machine, enter MPI, and pass messages on until the end.

    `rank`: the one behind the link. Exits at once when one side is gone: mpirun then ends the other end, too.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + os.environ[SOCKETS_VARIABLE])
    if not is_of_user(connection):
        raise WorkerError(f"rank {rank} is another user's process")
    world, channel = init_mpi(), Channel(connection)
    daemon_connections = {tcp.local for tcp in list_connections()}  # to MPI's daemon on this machine
    try:
        link = (RankEnd if world.rank else HubEnd)(world, channel, rank, daemon_connections)
        meet(world)
        watch_connections()
        if world.rank == 0:
            print(CONNECTED, flush=True)
        link.serve()
    except Exception as error:
        # Any error: an end that stayed in MPI would let the other one wait for it.
        try:
            if isinstance(error, PeerFaultError):
                channel.post(Letter.NOTE, encode_value([[rank, error.message, True]]))
                channel.flush()
            elif not isinstance(error, LinkLostError):
                print(f"the link of rank {rank} ends: {describe(error)}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    world.finalize()
    return 0


def meet(world: World) -> None:
    """Exchange a byte with the other end, so that MPI's connections exist."""
    sent, received = bytearray(1), bytearray(1)
    requests = world.start_receive(memoryview(received), MEETING), world.start_send(sent, MEETING)
    while not all(request.Test() for request in requests):
        select.select([], [], [], FIRST_SLEEP_S * 10)
