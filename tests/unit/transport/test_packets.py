"""Packets of a connection: what is read and written when the other end is slow, silent or wrong."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from csdctl.transport.strict_transport import (
    MAX_BANNER_LINE_BYTES,
    MAX_EARLY_PACKET_BYTES,
    GreedyPacketizer,
    SshProtocolError,
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


@pytest.mark.parametrize("length", [MAX_EARLY_PACKET_BYTES + 20, 0x7FFFFFF4, 0xFFFFFFFC])
def test_length_of_a_packet_is_refused_before_the_packet_comes(ends: Ends, length: int) -> None:
    packetizer, far = ends
    far.sendall((length - (length - 4) % 8).to_bytes(4, "big") + bytes(4))
    with pytest.raises(SshProtocolError, match="a packet of more than 35000 bytes"):
        packetizer.read_message()
    assert packetizer.violation == "sent a packet of more than 35000 bytes"


def test_largest_packet_is_accepted(ends: Ends) -> None:
    packetizer, far = ends
    payload = b"\x02" + bytes(MAX_EARLY_PACKET_BYTES - 30)
    far.sendall(plain_packet(payload))
    assert packetizer.read_message()[1].asbytes() == payload[1:]


@pytest.mark.parametrize("packet", [bytes(8), (12).to_bytes(4, "big") + b"\xff" + bytes(11), b"\0\0\0\4" * 2])
def test_damaged_packet_is_a_protocol_error(ends: Ends, packet: bytes) -> None:
    packetizer, far = ends
    far.sendall(packet)
    far.close()
    with pytest.raises((SshProtocolError, EOFError)):
        all(packetizer.read_message() for _ in range(10))


def test_line_of_the_banner_is_bounded(ends: Ends) -> None:
    packetizer, far = ends
    far.sendall(b"x" * 100 + b"\n" + b"y" * (MAX_BANNER_LINE_BYTES + 1))
    assert packetizer.readline(1) == "x" * 100
    with pytest.raises(SshProtocolError, match="a line of more than"):
        packetizer.readline(1)


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
