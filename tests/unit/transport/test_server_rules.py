"""What a server may send: what honest servers send is never refused."""

import socket
from dataclasses import dataclass, field
from typing import Any

import paramiko
import pytest

from csdctl.transport.strict_transport import (
    MAX_IDLE_COST,
    GreedyPacketizer,
    Kind,
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

    def find_channel(self, number: int) -> Any:
        return Channel() if number == 3 else None


def rules_of(connection: Any) -> ServerRules:
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
        (Kind.DATA, message(3, data=b"x")),
        (Kind.EXTENDED_DATA, message(3, 1, data=b"x")),
        (Kind.WINDOW_ADJUST, message(3, 8192)),
    ],
)
def test_data_of_a_command_is_free(kind: Kind, content: paramiko.Message) -> None:
    send_too_many(rules_of(Connection()), kind, content)
    assert content.get_int() == 3  # it can still be read


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Kind.DATA, message(3, data=b"")),
        (Kind.DATA, message(4, data=b"x")),
        (Kind.WINDOW_ADJUST, message(3, 1)),
        (Kind.CLOSE, message(4)),
        (2, message(data=b"x")),
        (Kind.KEXINIT, message(data=bytes(1000))),
    ],
)
def test_messages_of_no_use_are_counted(kind: int, content: paramiko.Message) -> None:
    rules = rules_of(Connection())
    with pytest.raises(SshProtocolError, match="floods the connection"):
        send_too_many(rules, kind, content)


def test_window_of_data_for_a_channel_that_was_just_closed_is_accepted() -> None:
    rules = rules_of(Connection())
    for _ in range((2 << 20) // 64):
        rules.check(Kind.DATA, message(4, data=bytes(64)))


def test_keepalives_and_notices_of_a_long_run_are_accepted() -> None:
    rules = rules_of(Connection())
    for _ in range(50_000):
        rules.check(80, message(data=b"keepalive@openssh.com"))


def test_key_exchanges_are_paid_for_by_data() -> None:
    rules = rules_of(Connection())
    for _ in range(2000):
        rules.check(Kind.KEXINIT, message(data=bytes(1000)))
        for _ in range(32):
            rules.check(Kind.DATA, message(3, data=bytes(8192)))


@pytest.mark.parametrize("kind", range(91, 101))
def test_channels_must_exist(kind: int) -> None:
    with pytest.raises(SshProtocolError, match="for a channel that does not exist"):
        rules_of(Connection()).check(kind, message(5, 0, 0, 0))
