"""What a server may send, and packets of a connection whose other end is slow, silent or wrong."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import paramiko
import pytest
from paramiko import common

from csdctl.transport.strict_transport import (
    MAX_EARLY_PACKET_BYTES,
    MAX_IDLE_COST,
    GreedyPacketizer,
    ServerRules,
    SshProtocolError,
)


class Channel:
    """An open channel: its window is 2 MiB, and nobody has read 1 MiB of it."""

    in_buffer, in_stderr_buffer = bytes(1 << 20), b""
    in_window_size = 2 << 20
    out_window_size = 1 << 20


@dataclass
class Connection:
    """A connection with one open channel, 3, and one that was closed, 4."""

    packetizer: GreedyPacketizer = field(default_factory=lambda: GreedyPacketizer(socket.socket()))
    channels_seen: dict[int, bool] = field(default_factory=lambda: {3: True, 4: True})
    num_logins_requested: int = 1
    has_logged_in: bool = True

    def is_authenticated(self) -> bool:
        return self.has_logged_in

    @property
    def _channels(self) -> dict[int, Any]:
        return {3: Channel()}


@pytest.fixture
def rules() -> ServerRules:
    connection: Any = Connection()
    return ServerRules(connection)


def message(*numbers: int, data: bytes | None = None) -> paramiko.Message:
    """A message as it arrives: positioned at its beginning."""
    built = paramiko.Message()
    for number in numbers:
        built.add_int(number)
    if data is not None:
        built.add_string(data)
    return paramiko.Message(built.asbytes())


def send_too_many(rules: ServerRules, kind: int, content: paramiko.Message) -> None:
    for _ in range(2 * int(MAX_IDLE_COST)):
        rules.check(kind, content)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (common.MSG_CHANNEL_DATA, message(3, data=b"x")),
        (common.MSG_CHANNEL_EXTENDED_DATA, message(3, 1, data=b"x")),
        (common.MSG_CHANNEL_WINDOW_ADJUST, message(3, 8192)),
    ],
)
def test_data_of_a_command_is_free(rules: ServerRules, kind: int, content: paramiko.Message) -> None:
    send_too_many(rules, kind, content)
    assert content.get_int() == 3  # it can still be read


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (common.MSG_CHANNEL_DATA, message(3, data=b"")),
        (common.MSG_CHANNEL_DATA, message(4, data=b"x")),
        (common.MSG_CHANNEL_WINDOW_ADJUST, message(3, 1)),
        (common.MSG_CHANNEL_CLOSE, message(4)),
        (2, message(data=b"x")),
        (common.MSG_KEXINIT, message(data=bytes(1000))),
    ],
)
def test_messages_of_no_use_are_counted(rules: ServerRules, kind: int, content: paramiko.Message) -> None:
    with pytest.raises(SshProtocolError, match="floods the connection"):
        send_too_many(rules, kind, content)


def test_what_honest_servers_send_is_accepted(rules: ServerRules) -> None:
    """A window of data for a channel that was just closed, and keepalives of a long run.

    Data pays for key exchanges.
    """
    for _ in range((2 << 20) // 64):
        rules.check(common.MSG_CHANNEL_DATA, message(4, data=bytes(64)))
    for _ in range(50_000):
        rules.check(80, message(data=b"keepalive@openssh.com"))
    for _ in range(2000):
        rules.check(common.MSG_KEXINIT, message(data=bytes(1000)))
        for _ in range(32):
            rules.check(common.MSG_CHANNEL_DATA, message(3, data=bytes(8192)))


@pytest.mark.parametrize("kind", range(91, 101))
def test_channels_must_exist(rules: ServerRules, kind: int) -> None:
    with pytest.raises(SshProtocolError, match="for a channel that does not exist"):
        rules.check(kind, message(5, 0, 0, 0))


Ends = tuple[GreedyPacketizer, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A packetizer, and the other end of its connection."""
    near, far = socket.socketpair()
    with near, far:
        yield GreedyPacketizer(near), far


def plain_packet(payload: bytes) -> bytes:
    num_padding = 4 + (-len(payload) - 9) % 8
    head = (len(payload) + num_padding + 1).to_bytes(4, "big") + bytes([num_padding])
    return head + payload + bytes(num_padding)


def test_messages_arrive_whole_however_they_are_cut_up_to_the_largest(ends: Ends) -> None:
    packetizer, far = ends
    sizes = (0, 1, 100, 20_000, MAX_EARLY_PACKET_BYTES - 30)
    payloads = [b"\x02" + os.urandom(size) for size in sizes]
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
