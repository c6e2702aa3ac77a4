"""The link: a small MPI process beside a rank, which takes part in MPI for it.

The rank holds TensorFlow, model and data, and is started by csdctl over SSH; the link is started by mpirun.
When a node is lost, MPI ends the whole job: the links die, the ranks stay, and a new mpirun joins the
remaining ranks within seconds (docs/decisions/0012).
"""

import dataclasses
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from csdctl.worker.group.channel import (
    ALLGATHER,
    CLOSE,
    DONE,
    RECEIVE,
    SEND,
    SUM,
    TRAFFIC,
    WAITING,
    Channel,
    LinkLostError,
    is_of_same_user,
    socket_name,
)
from csdctl.worker.group.collective import Collective, choose_collective
from csdctl.worker.group.listener import LinkGreeting
from csdctl.worker.group.mpi import init_mpi
from csdctl.worker.group.shared_vectors import map_vectors
from csdctl.worker.group.traffic import gather_traffic
from csdctl.worker.group.waiting import OnWait, allgather, wait_sleeping
from csdctl.worker.process.errors import WorkerError

WAITING_INTERVAL_S = 5.0
PROGRESS_INTERVAL_S, SENDING_INTERVAL_S = 0.005, 0.0005
"""How often rank 0's link checks for arrived vectors while its rank computes, and while a sum leaves."""
_SIZE_TAG, _CONTENT_TAG = 3, 4


def serve_link(run_id: str, node_rank: int, generation: int) -> int:
    """Connect to the rank of this machine, enter MPI, and serve requests until the rank closes the link.

    Exits at once when the rank is gone: mpirun then ends all links, and every rank notices.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(socket_name(run_id, node_rank))
    if not is_of_same_user(connection):
        raise WorkerError(f"rank {node_rank} of run {run_id} is another user's process")
    mpi, world = init_mpi()
    channel = Channel(connection)
    greeting = LinkGreeting(generation, world.rank, world.size)
    try:
        channel.send(b"H", json.dumps(dataclasses.asdict(greeting)).encode())
        local, total = map_vectors(channel.receive_descriptor(), is_adding=world.rank == 0)
        _Link(world, channel, local, total).serve()
    except LinkLostError:
        os._exit(1)
    world.Barrier()
    channel.send(DONE)
    mpi.Finalize()
    return 0


class _Link:
    """Serves the requests of the rank."""

    def __init__(self, world: Any, channel: Channel, local: Any, total: Any) -> None:
        self._world = world
        self._channel = channel
        self._vectors = local, total
        self._collective: Collective | None = None
        self._reported_s = 0.0
        self._requests: dict[bytes, Callable[[bytearray], bytes | bytearray]] = {
            SUM: self._sum,
            ALLGATHER: self._allgather,
            SEND: self._send,
            RECEIVE: self._receive,
            TRAFFIC: self._traffic,
        }

    def serve(self) -> None:
        """Answer requests until the rank closes the link; raises LinkLostError."""
        while True:
            self._progress()
            letter, content = self._channel.receive()
            if self._collective and letter != SUM:
                self._collective.flush(self._on_wait)
            if letter == CLOSE:
                return
            if letter not in self._requests:
                raise LinkLostError
            self._channel.send(DONE, self._requests[letter](content))

    def _progress(self) -> None:
        """Process the other ranks' vectors until the rank sends a request."""
        collective = self._collective
        if collective is None:
            return
        collective.post_receives()
        while self._world.rank == 0:
            interval_s = SENDING_INTERVAL_S if collective.is_sending else PROGRESS_INTERVAL_S
            if select.select([self._channel], [], [], interval_s)[0]:
                return
            collective.progress()

    def _on_wait(self, waited_s: float) -> None:
        now = time.monotonic()
        if waited_s > WAITING_INTERVAL_S and now - self._reported_s > WAITING_INTERVAL_S:
            self._reported_s = now
            missing = self._collective.missing if self._collective else []
            self._channel.send(WAITING, json.dumps(missing).encode())
        if select.select([self._channel], [], [], 0)[0]:
            raise LinkLostError  # a rank that waits sends nothing: it is gone

    def _sum(self, content: bytearray) -> bytes:
        if content:
            wanted = json.loads(content)["choose"]
            self._collective, name, seconds = choose_collective(self._world, *self._vectors, wanted)
            return json.dumps({"collective": name, "sum_s": seconds}).encode()
        if self._collective is None:
            raise LinkLostError
        self._collective.sum(self._on_wait)
        return b""

    def _allgather(self, content: bytearray) -> bytes:
        return json.dumps(allgather(self._world, json.loads(content), self._on_wait)).encode()

    def _send(self, content: bytearray) -> bytes:
        (rank,) = struct.unpack_from("<q", content)
        _send_to(self._world, rank, memoryview(content)[8:], self._on_wait)
        return b""

    def _receive(self, content: bytearray) -> bytearray:
        (rank,) = struct.unpack_from("<q", content)
        return _receive_from(self._world, rank, self._on_wait)

    def _traffic(self, content: bytearray) -> bytes:
        sent = gather_traffic(self._world, json.loads(content), self._on_wait)
        return json.dumps([dataclasses.astuple(row) for row in sent]).encode()


def _send_to(world: Any, rank: int, content: memoryview, on_wait: OnWait) -> None:
    for part, tag in ((memoryview(struct.pack("<q", len(content))), _SIZE_TAG), (content, _CONTENT_TAG)):
        wait_sleeping(world.Isend([part, "B"], rank, tag), on_wait)


def _receive_from(world: Any, rank: int, on_wait: OnWait) -> bytearray:
    size = bytearray(8)
    wait_sleeping(world.Irecv([size, "B"], rank, _SIZE_TAG), on_wait)
    content = bytearray(struct.unpack("<q", size)[0])
    wait_sleeping(world.Irecv([content, "B"], rank, _CONTENT_TAG), on_wait)
    return content
