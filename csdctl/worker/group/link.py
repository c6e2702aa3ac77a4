"""The link: a small MPI process beside a rank, which takes part in MPI for it.

The rank holds TensorFlow, model and data, and is started by csdctl over SSH; the link is started by mpirun.
When a node is lost, MPI ends the whole job: the links die, the ranks stay, and a new mpirun joins the
remaining ranks within seconds (docs/decisions/0012).
"""

import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from csdctl.worker.group.channel import (
    LIMIT,
    SEND_HEAD,
    Answer,
    Channel,
    LinkGreeting,
    Request,
    find_socket,
    map_vectors,
)
from csdctl.worker.group.collective import Collective, Star, choose_collective
from csdctl.worker.group.messages import (
    DRAIN_S,
    Arrival,
    Bytes,
    Departure,
    allgather,
    gather,
    join_parts,
    spread,
)
from csdctl.worker.group.mpi import IDLE_S, FindMissing, MemoryLimit, World, init_mpi, ready, wait_sleeping
from csdctl.worker.group.values import ExpectedTails, LinkLostError, PeerFaultError
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.processes import is_of_same_user, list_connections

WAITING_INTERVAL_S = 5.0
PART_S, SENDING_PART_S = 0.001, 0.0002
"""Pauses between the parts of messages that arrive while the rank computes, and while a sum leaves."""
MAX_REQUEST_BYTES = 1 << 40
"""The link takes what its rank asks it to send: the rank has made it, and runs on the same machine."""


def serve_link(run_id: str, node_rank: int, generation: int, level: str = "") -> int:
    """Connect to the rank of this machine, enter MPI, and serve requests until the rank closes the link.

    Exits at once when the rank is gone, or another rank has sent what it must not: mpirun then ends all
    links, and every rank notices.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(find_socket(run_id, node_rank))
    if not is_of_same_user(connection):
        raise WorkerError(f"rank {node_rank} of run {run_id} is another user's process")
    world = init_mpi()
    channel = Channel(connection)
    greeting = LinkGreeting(generation, world.rank, world.size, level)
    try:
        channel.send(b"H", to_json(greeting).encode())
        local, total = map_vectors(channel.receive_descriptor(), is_adding=world.rank == 0)
        _Link(world, channel, local, total).serve()
        channel.send(Answer.DONE)
    except Exception as error:
        # Any error: a link that stayed in MPI would let all others wait for it.
        if not isinstance(error, LinkLostError):
            print(f"the link of rank {node_rank} ends: {describe(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    world.finalize()
    return 0


_KEEPS_SUM = (Request.SUM, Request.NOT_FINITE, Request.ADD, Request.SPREAD)
"""Requests that do not wait until the latest sum has left."""


class _Link:
    """Serves the requests of the rank."""

    def __init__(self, world: World, channel: Channel, local: Any, total: Any) -> None:
        self._world = world
        self._channel = channel
        self._vectors = local, total
        self._collective: Collective | None = None
        self._reported_s = self._waited_at = 0.0
        self._missing_s: dict[int, float] = {}
        """By rank, how long the latest sum has waited for it."""
        self._memory_limit = MemoryLimit(world, memoryview(local).nbytes)
        self._departures: list[Departure] = []
        self._arrivals: list[Arrival] = []
        """Messages that the rank expects, in order; of one sender, the first is the next."""
        self._requests: dict[bytes, Callable[[bytearray], Bytes]] = {
            Request.CHOOSE: self._choose,
            Request.SUM: self._sum,
            Request.ALLGATHER: lambda content: join_parts(allgather(world, content, on_wait=self._on_wait)),
            Request.SEND: self._send,
            Request.EXPECT: self._expect,
            Request.RECEIVE: self._receive,
            Request.CONNECTIONS: lambda _: json.dumps(list_connections(drain_s=DRAIN_S)).encode(),
            Request.NOT_FINITE: self._find_not_finite,
            Request.ADD: self._add,
            Request.SPREAD: self._spread,
            Request.GATHER: self._gather,
            Request.SHARE: self._share,
        }

    def serve(self) -> None:
        """Answer requests until all ranks close their links; raises LinkLostError."""
        try:
            while True:
                self._progress()
                letter, content = self._channel.receive(MAX_REQUEST_BYTES, self._allow)
                if self._collective and letter not in _KEEPS_SUM:
                    self._collective.flush(self._on_wait)
                if letter == Request.CLOSE:
                    allgather(self._world, b"", 0, self._on_wait)
                    return
                if letter not in self._requests:
                    raise LinkLostError
                self._channel.send(Answer.DONE, self._requests[letter](content))
        except PeerFaultError as fault:
            self._channel.send(Answer.FAULT, json.dumps([fault.rank, fault.message]).encode())
            raise

    def _progress(self) -> None:
        """Process the other ranks' vectors and messages until the rank sends a request."""
        collective = self._collective
        if collective:
            collective.post_receives()
        while True:
            self._departures = [one for one in self._departures if not one.Test()]
            num_missing = sum(not one.Test() for one in self._arrivals)
            is_adding = collective is not None and self._world.rank == 0
            if not is_adding and not self._departures and not num_missing:
                return
            watched: list[Any] = [self._channel, *ready]
            readable = select.select(watched, [], [], IDLE_S)[0]
            if collective and is_adding:
                collective.progress()
            pause_s = SENDING_PART_S if collective and collective.is_sending else PART_S
            if self._channel in readable or (readable and select.select([self._channel], [], [], pause_s)[0]):
                return

    def _allow(self, num_bytes: int) -> None:
        """Allow a message of this size beside those that are on their way."""
        leaving = sum(one.num_bytes for one in self._departures)
        self._memory_limit.allow(num_bytes + leaving + sum(one.max_bytes for one in self._arrivals))

    def _on_wait(self, waited_s: float, find_missing: FindMissing) -> None:
        now = time.monotonic()
        for rank in find_missing():
            self._missing_s[rank] = self._missing_s.get(rank, 0.0) + min(waited_s, now - self._waited_at)
        self._waited_at = now
        if waited_s > WAITING_INTERVAL_S and now - self._reported_s > WAITING_INTERVAL_S:
            self._reported_s = now
            self._channel.send(Answer.WAITING, json.dumps(find_missing()).encode())
        if select.select([self._channel], [], [], 0)[0]:
            raise LinkLostError  # a rank that waits sends nothing: it is gone

    def _choose(self, content: bytearray) -> bytes:
        wanted, found = json.loads(content)
        sizes = tuple((size, num_halved) for size, num_halved in found)
        self._collective, name, seconds = choose_collective(
            self._world, *self._vectors, wanted, sizes, on_wait=self._on_wait
        )
        return json.dumps([name, seconds]).encode()

    def _sum(self, content: bytearray) -> bytes:
        assert self._collective, "the rank has chosen one"
        self._missing_s = {}
        self._collective.sum(self._on_wait, ExpectedTails.unpack(content) if content else None)
        return json.dumps(list(self._missing_s.items())).encode()

    def _add(self, content: bytearray) -> bytes:
        assert isinstance(self._collective, Star)
        self._collective.add(self._on_wait, ExpectedTails.unpack(content) if content else None)
        return b""

    def _spread(self, _: bytearray) -> bytes:
        assert isinstance(self._collective, Star)
        self._collective.spread()
        return b""

    def _gather(self, content: bytearray) -> bytes:
        (max_bytes,) = LIMIT.unpack_from(content)
        self._allow(max_bytes * self._world.size)
        return join_parts(gather(self._world, content[LIMIT.size :], max_bytes, self._on_wait))

    def _share(self, content: bytearray) -> Bytes:
        (max_bytes,) = LIMIT.unpack_from(content)
        self._allow(max_bytes)
        found = spread(self._world, content[LIMIT.size :], max_bytes, self._on_wait)
        return found if self._world.rank else b""

    def _find_not_finite(self, _: bytearray) -> bytes:
        found = self._collective.find_not_finite() if self._collective and not self._world.rank else []
        return json.dumps(found).encode()

    def _send(self, content: bytearray) -> bytes:
        rank, is_waiting = SEND_HEAD.unpack_from(content)
        departure = Departure(self._world, rank, memoryview(content)[SEND_HEAD.size :])
        if is_waiting:
            wait_sleeping(departure, self._on_wait, lambda: [rank])
        else:
            self._departures.append(departure)
        return b""

    def _expect(self, content: bytearray) -> bytes:
        rank, max_bytes = struct.unpack("<qq", content)
        self._allow(max_bytes)
        self._arrivals.append(Arrival(self._world, rank, max_bytes))
        return b""

    def _receive(self, content: bytearray) -> bytearray:
        rank, max_bytes = struct.unpack("<qq", content)
        arrival = next((one for one in self._arrivals if one.rank == rank), None)
        if arrival:
            self._arrivals.remove(arrival)
        else:
            self._allow(max_bytes)
            arrival = Arrival(self._world, rank, max_bytes)
        wait_sleeping(arrival, self._on_wait, lambda: [rank])
        return arrival.content
