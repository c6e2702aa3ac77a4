"""The communicator of a rank that has a link: every call is a request to the link, which is in MPI."""

import contextlib
import json
import struct
from collections import Counter
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
)
from csdctl.worker.group.listener import LinkGreeting
from csdctl.worker.group.shared_vectors import SharedVectors
from csdctl.worker.protocol.events import SentBytes


class LinkCommunicator:
    """Implements `communicator.Communicator`."""

    def __init__(
        self,
        channel: Channel,
        greeting: LinkGreeting,
        vectors: SharedVectors,
        on_waiting: Callable[[list[int]], None],
    ) -> None:
        """`on_waiting` gets the ranks that a sum has been waiting for, every few seconds."""
        self.rank, self.size = greeting.rank, greeting.size
        self._channel = channel
        self._vectors = vectors
        self._on_waiting = on_waiting
        self.collective, self.sum_s = "", 0.0
        self._sent: Counter[tuple[str, int]] = Counter()
        """Bytes of messages to single ranks so far, by traffic class and receiver."""
        channel.send_descriptor(vectors.descriptor)

    def choose_collective(self, wanted: str) -> None:
        """Choose the collective, on all ranks together; `wanted` names one instead of measuring."""
        answer = json.loads(self._request(SUM, json.dumps({"choose": wanted}).encode()))
        self.collective, self.sum_s = answer["collective"], answer["sum_s"]

    @property
    def local(self) -> Any:
        """The buffer where this rank's vector is best written; shape (n,), float32."""
        return self._vectors.local

    def sum(self, vector: Any) -> Any:
        """Return the sum of `vector` over all ranks, bit-identical on all; valid until the next call."""
        if vector is not self._vectors.local:
            self._vectors.local[:] = vector
        self._request(SUM)
        return self._vectors.total

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON), in order of rank, on all ranks."""
        return list(json.loads(self._request(ALLGATHER, json.dumps(value).encode())))

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send bytes to one rank, which must `receive` them; counted as traffic of `traffic_class`."""
        packed = memoryview(content).cast("B").tobytes()
        self._sent[traffic_class, rank] += len(packed)
        self._request(SEND, struct.pack("<q", rank) + packed)

    def receive(self, rank: int) -> bytearray:
        """Return the bytes that `rank` sends."""
        return self._request(RECEIVE, struct.pack("<q", rank))

    def traffic(self) -> list[SentBytes]:
        """Return what the ranks have sent to each other since they joined; call on all ranks."""
        own = [[traffic_class, rank, count] for (traffic_class, rank), count in self._sent.items()]
        return [SentBytes(*row) for row in json.loads(self._request(TRAFFIC, json.dumps(own).encode()))]

    def close(self) -> None:
        """Leave MPI, together with all other ranks; the link ends."""
        with contextlib.suppress(LinkLostError):
            self._request(CLOSE)
        self._channel.close()

    def disconnect(self) -> None:
        """Drop a link that is of no more use; it ends when its channel closes."""
        self._channel.close()

    def interrupt(self) -> None:
        """From another thread: make the call that waits for the link raise LinkLostError."""
        self._channel.shut()

    def _request(self, letter: bytes, content: bytes = b"") -> bytearray:
        self._channel.send(letter, content)
        while True:
            letter, answer = self._channel.receive()
            if letter == DONE:
                return answer
            if letter == WAITING:
                self._on_waiting(json.loads(answer))
