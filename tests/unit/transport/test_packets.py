"""Packets of a connection: what is read and written when the other end is slow, silent or wrong."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from csdctl.transport.strict_transport import (
    MAX_EARLY_PACKET_BYTES,
    GreedyPacketizer,
)

Ends = tuple[GreedyPacketizer, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A packetizer, and the other end of its connection."""
    near, far = socket.socketpair()
    with near, far:
        yield GreedyPacketizer(near), far


def plain_packet(payload: bytes) -> bytes:
    num_padding = 4 + (-len(payload) - 9) % 8
    return (
        (len(payload) + num_padding + 1).to_bytes(4, "big")
        + bytes([num_padding])
        + payload
        + bytes(num_padding)
    )


def test_messages_arrive_whole_however_they_are_cut(ends: Ends) -> None:
    packetizer, far = ends
    payloads = [b"\x02" + os.urandom(size) for size in (0, 1, 100, 20_000)]
    stream = b"SSH-2.0-other\r\n" + b"".join(map(plain_packet, payloads))

    def send() -> None:
        for start in range(0, len(stream), 7):
            far.sendall(stream[start : start + 7])

    thread = threading.Thread(target=send)
    thread.start()
    assert packetizer.readline(1) == "SSH-2.0-other"
    read = [packetizer.read_message()[1].asbytes() for _ in payloads]
    thread.join()
    assert read == [payload[1:] for payload in payloads]
    assert packetizer.meter.num_received == len(stream)


def test_largest_packet_is_accepted(ends: Ends) -> None:
    packetizer, far = ends
    payload = b"\x02" + bytes(MAX_EARLY_PACKET_BYTES - 30)
    far.sendall(plain_packet(payload))
    assert packetizer.read_message()[1].asbytes() == payload[1:]


def test_peer_that_hardly_reads_is_left_at_the_deadline(ends: Ends) -> None:
    packetizer, far = ends
    is_over = threading.Event()

    def read_slowly() -> None:
        while not is_over.wait(0.01):
            far.recv(1)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    packetizer.writes_end_s = time.monotonic() + 0.2
    with pytest.raises(EOFError):
        packetizer.write_all(bytes(100_000_000))
    is_over.set()
    thread.join()
    assert packetizer.violation == "does not read what is sent to it"
    assert packetizer.meter.num_sent == 0
