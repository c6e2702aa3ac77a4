"""Byte counts of one connection, by traffic class.

A connection counts all bytes of its socket, including encryption. Senders of code, models or public samples
record their class. Everything else is control traffic: commands, responses, SSH itself.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from csdctl.fleet.model import HOST_NAME, Node


class TrafficClass(StrEnum):
    """The purpose of bytes. Private samples have no class, because they are never sent."""

    CODE = "code"
    MODEL = "model"
    GRADIENT = "gradient"
    PUBLIC = "public samples"
    ACTIVATIONS = "activations"
    """Data that passes the cut of a model: activations and labels of samples, gradients of activations."""
    FEATURES = "features of public samples"
    FILES = "files"
    """Directory trees that the user deploys, and what is provisioned."""
    CLASSES = "classes of private samples"
    SCORES = "scores of private samples"
    EMBEDDINGS = "embeddings of private samples"
    TEST_SUMS = "test sums"
    LOG = "log"
    CONTROL = "control"


class Meter:
    """The bytes of one connection, as counted on this side: TCP payload. Thread-safe."""

    def __init__(self) -> None:
        self.num_sent = self.num_received = 0
        self._lock = threading.Lock()
        self._sent: Counter[TrafficClass] = Counter()
        self._received: Counter[TrafficClass] = Counter()

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes of the connection, or of an additional connection to the same server."""
        with self._lock:
            self.num_sent += sent
            self.num_received += received

    def record(self, traffic_class: TrafficClass, *, sent: int = 0, received: int = 0) -> None:
        """Record the traffic class of some of the bytes."""
        with self._lock:
            self._sent[traffic_class] += sent
            self._received[traffic_class] += received

    def by_class(self) -> dict[TrafficClass, tuple[int, int]]:
        """All bytes sent and received so far, by class. Bytes without a recorded class are control."""
        with self._lock:
            sent, received = Counter(self._sent), Counter(self._received)
        sent[TrafficClass.CONTROL] += max(0, self.num_sent - sent.total())
        received[TrafficClass.CONTROL] += max(0, self.num_received - received.total())
        return {name: (sent[name], received[name]) for name in TrafficClass if sent[name] or received[name]}


LinkBytes = Mapping[tuple[str, str, str], int]
"""Bytes by name of the sender, name of the receiver, and `TrafficClass`."""


def add_up(opened: Iterable[tuple[Node, Meter]]) -> LinkBytes:
    """Add up the bytes of connections by link. Bytes that a jump host forwards count once on each link."""
    connections = [(node, meter.by_class()) for node, meter in opened]
    forwarded: Counter[tuple[str, str]] = Counter()
    for node, by_class in connections:
        if node.jump:
            forwarded[node.jump.name, "sent"] += sum(sent for sent, _ in by_class.values())
            forwarded[node.jump.name, "received"] += sum(received for _, received in by_class.values())
    added: Counter[tuple[str, str, str]] = Counter()
    for node, by_class in connections:
        for near, far in _links(node):
            for traffic_class, (sent, received) in by_class.items():
                added[near, far, traffic_class] += sent
                added[far, near, traffic_class] += received
        if forwarded[node.name, "sent"]:
            for near, far in _links(node):
                added[near, far, TrafficClass.CONTROL] -= forwarded[node.name, "sent"]
                added[far, near, TrafficClass.CONTROL] -= forwarded[node.name, "received"]
            forwarded[node.name, "sent"] = forwarded[node.name, "received"] = 0
    return {key: count for key, count in added.items() if count > 0}


def _links(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the links on the way to `node`, the last link first."""
    for machine in (node, *node.jumps):
        yield machine.jump.name if machine.jump else HOST_NAME, machine.name
