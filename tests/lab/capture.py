"""Capture the traffic on the lab's cables with tcpdump."""

import os
import signal
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.patience import eventually, stays

_RECORD = struct.Struct("<IIII")
_GLOBAL_BYTES, _ETHERNET_BYTES = 24, 14
_IPV4, _TCP = 0x0800, 6


@dataclass(frozen=True)
class Capture:
    """The captured packets of one node's cable."""

    node: str
    address: str
    path: Path

    def payload(self) -> Counter[tuple[str, str]]:
        """Return the TCP payload bytes by sender and receiver address, without retransmissions."""
        ends: dict[tuple[str, int, str, int], tuple[int, int]] = {}
        for source, source_port, target, target_port, sequence, length in self._segments():
            flow = (source, source_port, target, target_port)
            if not length:
                continue
            first, last = ends.get(flow, (sequence, sequence))
            ahead = (sequence + length - last) & 0xFFFFFFFF
            ends[flow] = (first, last + ahead if ahead < 1 << 31 else last)
        added: Counter[tuple[str, str]] = Counter()
        for (source, _, target, _), (first, last) in ends.items():
            added[source, target] += last - first
        return added

    def _segments(self) -> Iterator[tuple[str, int, str, int, int, int]]:
        """Yield addresses and ports, sequence number and payload length of every TCP segment over IPv4."""
        content = self.path.read_bytes()
        place = _GLOBAL_BYTES
        while place < len(content):
            _, _, kept, _ = _RECORD.unpack_from(content, place)
            frame = content[place + _RECORD.size : place + _RECORD.size + kept]
            place += _RECORD.size + kept
            packet = frame[_ETHERNET_BYTES:]
            if struct.unpack_from(">H", frame, 12)[0] != _IPV4 or packet[9] != _TCP:
                continue
            head, total = 4 * (packet[0] & 15), struct.unpack_from(">H", packet, 2)[0]
            source_port, target_port, sequence = struct.unpack_from(">HHI", packet, head)
            payload = total - head - 4 * (packet[head + 12] >> 4)
            yield (
                ".".join(map(str, packet[12:16])),
                source_port,
                ".".join(map(str, packet[16:20])),
                target_port,
                sequence,
                payload,
            )


def _is_quiet(captures: Iterable[Capture]) -> bool:
    """Return whether no packet is written for half a second."""

    def num_bytes() -> int:
        return sum(capture.path.stat().st_size for capture in captures)

    before = num_bytes()
    return stays(lambda: num_bytes() == before, 0.5)


@contextmanager
def captured(lab: Lab, *nodes: LabNode, directory: Path) -> Iterator[dict[str, Capture]]:
    """Capture the traffic on the cables of `nodes` during the block; complete at its end."""
    captures, processes = {}, []
    try:
        for node in nodes:
            path = directory / f"{node.name}.pcap"
            command = ("tcpdump", "-i", f"p-{node.name}", "-w", str(path), "-U", "-B", "65536", "-Z", "root")
            namespace = f"--net={network.NAMESPACES / lab.front.namespace}"
            processes.append(
                subprocess.Popen(["nsenter", namespace, *command], stderr=subprocess.PIPE, text=True)
            )
            captures[node.name] = Capture(node.name, node.spec.address, path)
            with suppress(PermissionError):  # on a busy machine it would lose packets
                os.setpriority(os.PRIO_PROCESS, processes[-1].pid, -20)
        for process in processes:
            assert process.stderr
            assert "listening on" in process.stderr.readline()
        yield captures
    finally:
        eventually(lambda: _is_quiet(captures.values()))  # the last packets are still being written
        for process in processes:
            process.send_signal(signal.SIGINT)
        messages = [process.communicate()[1] for process in processes]
    assert all("0 packets dropped by kernel" in message for message in messages), messages
