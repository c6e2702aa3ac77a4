"""How many bytes went over one connection, and what they were.

A connection counts what its socket carries, encryption and all. Those who send something that has a name
(code, a model, public samples) note it; what nobody noted is control: commands, answers, SSH's own.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from csdctl.fleet.model import HOST_NAME, Node


class TrafficClass(StrEnum):
    """What bytes were for; there is none for private samples, because none are ever sent."""

    CODE = "code"
    MODEL = "model"
    GRADIENT = "gradient"
    PUBLIC = "public samples"
    FILES = "files"
    """Trees that the user deployed."""
    LOG = "log"
    CONTROL = "control"


@dataclass(frozen=True)
class ByteCount:
    """Bytes in both directions, as this side sees them: payload of TCP."""

    sent: int = 0
    received: int = 0


class Meter:
    """The bytes of one connection; may be noted to from any thread."""

    def __init__(self) -> None:
        self.num_sent = self.num_received = 0
        """All bytes; the connection's own reader and writer add to them."""
        self._lock = threading.Lock()
        self._sent: Counter[TrafficClass] = Counter()
        self._received: Counter[TrafficClass] = Counter()

    def note(self, kind: TrafficClass, *, sent: int = 0, received: int = 0) -> None:
        """So many of the bytes are of this kind."""
        with self._lock:
            self._sent[kind] += sent
            self._received[kind] += received

    def by_kind(self) -> dict[TrafficClass, ByteCount]:
        """All bytes so far, by kind; what was not noted is control."""
        with self._lock:
            sent, received = Counter(self._sent), Counter(self._received)
        sent[TrafficClass.CONTROL] += max(0, self.num_sent - sent.total())
        received[TrafficClass.CONTROL] += max(0, self.num_received - received.total())
        return {
            kind: ByteCount(sent[kind], received[kind])
            for kind in TrafficClass
            if sent[kind] or received[kind]
        }

    @property
    def total(self) -> ByteCount:
        """All bytes so far."""
        return ByteCount(self.num_sent, self.num_received)


LinkBytes = Mapping[tuple[str, str, str], int]
"""Bytes by sender, receiver and `TrafficClass`; machines by name."""


def add_up(opened: Iterable[tuple[Node, Meter]]) -> LinkBytes:
    """What the connections to nodes and to their jump hosts carried, on every link that it took.

    What goes through a jump host is in the connection to it already: there it is not counted twice.
    """
    connections = [(node, meter.by_kind(), meter.total) for node, meter in opened]
    forwarded: Counter[tuple[str, str]] = Counter()
    for node, _, total in connections:
        if node.jump:
            forwarded[node.jump.name, "sent"] += total.sent
            forwarded[node.jump.name, "received"] += total.received
    added: Counter[tuple[str, str, str]] = Counter()
    for node, kinds, _ in connections:
        for near, far in _links(node):
            for kind, traffic in kinds.items():
                added[near, far, kind] += traffic.sent
                added[far, near, kind] += traffic.received
        if forwarded[node.name, "sent"]:
            for near, far in _links(node):
                added[near, far, TrafficClass.CONTROL] -= forwarded[node.name, "sent"]
                added[far, near, TrafficClass.CONTROL] -= forwarded[node.name, "received"]
            forwarded[node.name, "sent"] = forwarded[node.name, "received"] = 0
    return {key: count for key, count in added.items() if count > 0}


def _links(node: Node) -> Iterator[tuple[str, str]]:
    """The links on the way to `node`, the last one first."""
    while True:
        near = node.jump.name if node.jump else HOST_NAME
        yield near, node.name
        if not node.jump:
            return
        node = node.jump
