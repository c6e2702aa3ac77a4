"""The way from a rank to the other ranks: a small MPI process beside it, and what the two say to each other.

The rank holds TensorFlow, model and data, and is started by csdctl over SSH; the link enters MPI, and is
started by mpirun. When a node is lost, MPI ends the whole job: the links die, the ranks stay, and a new
mpirun joins those that are left within seconds (docs/decisions/0012).

They meet at an abstract Unix socket of the machine and share memory for the vectors. A message is a
letter, a length and so many bytes. The rank asks, the link answers in order; while it waits for others it
says so now and then (`WAITING`).
"""

import contextlib
import dataclasses
import json
import mmap
import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import SentBytes

SUM, GATHER, SEND, RECEIVE, CLOSE, TRAFFIC = b"S", b"G", b"P", b"R", b"C", b"T"
DONE, WAITING = b"D", b"W"
_HEAD = struct.Struct("<cQ")
_PEER = struct.Struct("3i")
WAITING_INTERVAL_S = 5.0
PROGRESS_INTERVAL_S, SENDING_INTERVAL_S = 0.005, 0.0005
"""How often rank 0's link looks for what has arrived while its own rank computes, and while a sum leaves."""
FLOAT_BYTES = 4
_SIZE_TAG, _CONTENT_TAG = 3, 4


class LinkLostError(Exception):
    """The link is gone: MPI ended the job, or the other side closed it."""


class Channel:
    """A connected socket that carries messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def send(self, letter: bytes, content: bytes | bytearray | memoryview = b"") -> None:
        """Send one message; raises LinkLostError."""
        try:
            self._connection.sendall(_HEAD.pack(letter, len(content)))
            if len(content):
                self._connection.sendall(content)
        except OSError:
            raise LinkLostError from None

    def receive(self) -> tuple[bytes, bytearray]:
        """The next message; raises LinkLostError at the end."""
        letter, length = _HEAD.unpack(self._exactly(_HEAD.size))
        return letter, self._exactly(length)

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

    def shut(self) -> None:
        """Let both sides see the end; from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


def socket_name(run_id: str, rank: int) -> str:
    """Where rank `rank` of a run can be met on its machine; nothing of it is on any disk."""
    return f"\0csdctl/{run_id}/{rank}"


def is_of_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this one's user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(peer)
    return bool(uid == os.getuid())


class Listener:
    """The rank's side before a link is there."""

    def __init__(self, run_id: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(socket_name(run_id, rank))
        self._socket.listen(4)

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()

    def wait_for_link(
        self, generation: int, is_over: Callable[[], bool]
    ) -> "tuple[Channel, dict[str, Any]] | None":
        """The link of group `generation` and what it says of itself; None as soon as `is_over`.

        Others' processes, and links of an earlier group, are turned away.
        """
        while not is_over():
            if not select.select([self._socket], [], [], 0.1)[0]:
                continue
            connection, _ = self._socket.accept()
            if not is_of_same_user(connection):
                connection.close()
                continue
            line = Channel(connection)
            with contextlib.suppress(LinkLostError, ValueError):
                hello = json.loads(line.receive()[1])
                if hello["generation"] == generation:
                    return line, hello
            line.close()
        return None

    def give_memory(self, line: Channel, descriptor: int) -> None:
        """Let the link share the memory behind `descriptor`."""
        try:
            socket.send_fds(line._connection, [b"M"], [descriptor])
        except OSError:
            raise LinkLostError from None


class LinkCommunicator:
    """The other ranks, through a link; implements `ranks.Ranks`."""

    def __init__(
        self,
        line: Channel,
        hello: dict[str, Any],
        memory: "SharedVectors",
        on_waiting: Callable[[list[int]], None],
    ) -> None:
        """`on_waiting` gets the ranks that a sum has been waiting for, every few seconds."""
        self.rank: int = hello["rank"]
        self.size: int = hello["size"]
        self._line = line
        self._memory = memory
        self._on_waiting = on_waiting
        self.collective, self.sum_s = "", 0.0
        self._sent: Counter[tuple[str, int]] = Counter()
        """Bytes of messages to single ranks so far, by what they are and to whom."""

    def agree(self, wanted: str) -> None:
        """Choose the collective, all together; `wanted` names the one to take instead of measuring."""
        answer = json.loads(self._ask(SUM, json.dumps({"choose": wanted}).encode()))
        self.collective, self.sum_s = answer["collective"], answer["sum_s"]

    @property
    def local(self) -> Any:
        """Where this rank's vector is best written; shape (n,), float32."""
        return self._memory.local

    def sum(self, vector: Any) -> Any:
        """The sum of `vector` over all ranks, to the same bit on all; valid until the next call."""
        if vector is not self._memory.local:
            self._memory.local[:] = vector
        self._ask(SUM)
        return self._memory.total

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (as JSON knows it), in order of rank, on all ranks."""
        return list(json.loads(self._ask(GATHER, json.dumps(value).encode())))

    def send(self, rank: int, content: Any, what: str) -> None:
        """Send bytes to one rank, which must `receive` them from this one; `what` they are is counted."""
        packed = memoryview(content).cast("B").tobytes()
        self._sent[what, rank] += len(packed)
        self._ask(SEND, struct.pack("<q", rank) + packed)

    def receive(self, rank: int) -> bytearray:
        """The bytes that `rank` sends."""
        return self._ask(RECEIVE, struct.pack("<q", rank))

    def traffic(self) -> list[SentBytes]:
        """What the ranks have sent to each other since they met, asked by all of them together."""
        mine = [[what, rank, count] for (what, rank), count in self._sent.items()]
        return [SentBytes(*row) for row in json.loads(self._ask(TRAFFIC, json.dumps(mine).encode()))]

    def close(self) -> None:
        """Leave MPI, together with all other ranks; the link ends."""
        with contextlib.suppress(LinkLostError):
            self._ask(CLOSE)
        self._line.close()

    def drop(self) -> None:
        """The link is of no use any more: it ends by itself when this side is closed."""
        self._line.close()

    def interrupt(self) -> None:
        """From another thread: whoever waits for the link gets a LinkLostError."""
        self._line.shut()

    def _ask(self, letter: bytes, content: bytes = b"") -> bytearray:
        self._line.send(letter, content)
        while True:
            kind, answer = self._line.receive()
            if kind == DONE:
                return answer
            if kind == WAITING:
                self._on_waiting(json.loads(answer))


class SharedVectors:
    """Memory that rank and link share: this rank's vector, and the sum over all ranks."""

    def __init__(self, num_elements: int) -> None:
        import numpy as np

        self.descriptor = os.memfd_create("csdctl-vectors")
        half = num_elements * FLOAT_BYTES
        os.posix_fallocate(self.descriptor, 0, 2 * half)
        self._map = mmap.mmap(self.descriptor, 2 * half)
        self.local = np.frombuffer(self._map, np.float32, num_elements, 0)
        self.total = np.frombuffer(self._map, np.float32, num_elements, half)

    def close(self) -> None:
        """Give nobody else a part any more; the memory is free when the arrays are."""
        os.close(self.descriptor)


def serve_link(run_id: str, node_rank: int, generation: int) -> int:
    """The MPI end: join the rank of this machine, enter MPI, and serve until the rank closes the link.

    Leaves hard when the rank is gone: mpirun then ends all links, and every rank learns of it at once.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(socket_name(run_id, node_rank))
    if not is_of_same_user(connection):
        raise WorkerError(f"rank {node_rank} of run {run_id} is another user's process")
    from csdctl.worker.group.collective import init_mpi

    mpi, world = init_mpi()
    line = Channel(connection)
    hello = {"generation": generation, "rank": world.rank, "size": world.size}
    try:
        line.send(b"H", json.dumps(hello).encode())
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise LinkLostError
        _serve(world, line, *_map_vectors(descriptors[0], world.rank))
    except LinkLostError:
        os._exit(1)
    world.Barrier()
    line.send(DONE)
    mpi.Finalize()
    return 0


def _map_vectors(descriptor: int, rank: int) -> tuple[Any, Any]:
    size = os.fstat(descriptor).st_size
    mapped = mmap.mmap(descriptor, size)
    os.close(descriptor)
    if rank == 0:  # it adds
        import numpy as np

        whole = np.frombuffer(mapped, np.float32)
        return whole[: len(whole) // 2], whole[len(whole) // 2 :]
    view = memoryview(mapped).cast("f")
    return view[: len(view) // 2], view[len(view) // 2 :]


def _serve(world: Any, line: Channel, local: Any, total: Any) -> None:
    """Do what the rank asks, until it asks to close; raises LinkLostError."""
    from csdctl.worker.group.collective import choose_collective, gather
    from csdctl.worker.group.traffic import gather_traffic

    way: Any = None
    said_s = 0.0

    def meanwhile(waited_s: float) -> None:
        nonlocal said_s
        if waited_s > WAITING_INTERVAL_S and time.monotonic() - said_s > WAITING_INTERVAL_S:
            said_s = time.monotonic()
            line.send(WAITING, json.dumps(way.missing if way else []).encode())
        if select.select([line], [], [], 0)[0]:
            raise LinkLostError  # a rank that waits says nothing: it is gone

    while True:
        if way:
            way.expect()
            while world.rank == 0 and not select.select([line], [], [], _progress_interval_s(way))[0]:
                way.take_arrived()
        letter, content = line.receive()
        if way and letter != SUM:
            way.settle(meanwhile)
        if letter == SUM and content:
            way, name, seconds = choose_collective(world, local, total, json.loads(content)["choose"])
            line.send(DONE, json.dumps({"collective": name, "sum_s": seconds}).encode())
        elif letter == SUM:
            way.sum(meanwhile)
            line.send(DONE)
        elif letter == GATHER:
            line.send(DONE, json.dumps(gather(world, json.loads(content), meanwhile)).encode())
        elif letter == SEND:
            (rank,) = struct.unpack_from("<q", content)
            _send_to(world, rank, memoryview(content)[8:], meanwhile)
            line.send(DONE)
        elif letter == RECEIVE:
            (rank,) = struct.unpack_from("<q", content)
            line.send(DONE, _receive_from(world, rank, meanwhile))
        elif letter == TRAFFIC:
            sent = gather_traffic(world, json.loads(content), meanwhile)
            line.send(DONE, json.dumps([dataclasses.astuple(one) for one in sent]).encode())
        elif letter == CLOSE:
            return
        else:
            raise LinkLostError


def _progress_interval_s(way: Any) -> float:
    return SENDING_INTERVAL_S if way.is_sending else PROGRESS_INTERVAL_S


def _send_to(world: Any, rank: int, content: memoryview, meanwhile: Callable[[float], None]) -> None:
    from csdctl.worker.group.collective import wait_sleeping

    for part, tag in ((memoryview(struct.pack("<q", len(content))), _SIZE_TAG), (content, _CONTENT_TAG)):
        wait_sleeping(world.Isend([part, "B"], rank, tag), meanwhile)


def _receive_from(world: Any, rank: int, meanwhile: Callable[[float], None]) -> bytearray:
    from csdctl.worker.group.collective import wait_sleeping

    size = bytearray(8)
    wait_sleeping(world.Irecv([size, "B"], rank, _SIZE_TAG), meanwhile)
    content = bytearray(struct.unpack("<q", size)[0])
    wait_sleeping(world.Irecv([content, "B"], rank, _CONTENT_TAG), meanwhile)
    return content
