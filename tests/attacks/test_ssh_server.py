"""A node's SSH server attacks after the login: it ignores windows and lengths, and floods the connection.

The node is lost, with a message that says what its server did; the others go on, and memory stays bounded.
"""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from csdctl.errors import CsdctlError, DeadlineError, JumpHostError, UnreachableError
from csdctl.fleet.model import Node
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.session import Deadline
from csdctl.transport.ssh import JumpHosts, SshSession, connect, open_transport
from csdctl.transport.strict_transport import StrictTransport
from tests.attacks.hostile_ssh import LOST, Attack, Command, HostileTransport, hostile_server
from tests.patience import WAIT_S, eventually, scaled
from tests.unit.transport.conftest import USER

pytestmark = pytest.mark.first(1)

MAX_ACCEPTED_BYTES = 64 << 20
"""Limit for what a server can send before it is disconnected, with all buffers of the system between."""

BULK = b"x" * 30_000
Channel = paramiko.Channel
OPENS = (b"forwarded-tcpip", b"x11", b"auth-agent@openssh.com", b"session")


def endless(*parts: int | bytes | bool, kind: int) -> Command:
    """An attack that sends one message for ever; -1 stands for the channel."""

    def attack(transport: HostileTransport, channel: Channel, line: str) -> None:
        filled = [channel.remote_chanid if part == -1 else part for part in parts]
        transport.send_endlessly(*filled, kind=kind)

    return attack


@contextlib.contextmanager
def attacked(
    directory: Path, on_command: Command, **changes: Any
) -> Iterator[tuple[SshSession, StrictTransport]]:
    """Run a hostile server; yield a session to it and its transport."""
    with hostile_server(directory / "evil", Attack(on_command=on_command, changes=changes)) as server:
        known_hosts = KnownHosts.load([server.known_hosts])
        transport = open_transport(server.node(), Deadline(scaled(20)), JumpHosts(known_hosts))
        session = SshSession(server.node(), transport)
        yield session, transport
        session.close()


@pytest.mark.attack(4)
@pytest.mark.parametrize("kind", [94, 95])
def test_data_that_nobody_reads_ends_with_the_window(tmp_path: Path, kind: int) -> None:
    accepted: list[int] = []

    def flood(transport: HostileTransport, channel: Channel, line: str) -> None:
        head = (channel.remote_chanid,) if kind == 94 else (channel.remote_chanid, 1)
        accepted.append(transport.send_endlessly(*head, BULK, kind=kind) * len(BULK))

    with attacked(tmp_path, flood) as (session, transport):
        with pytest.raises(UnreachableError, match="more than the receive window"):
            session.converse(["cat"])
        assert eventually(lambda: not transport.is_active() and accepted)
    assert accepted[0] < MAX_ACCEPTED_BYTES


@pytest.mark.attack(5)
@pytest.mark.parametrize(
    ("cipher", "mac"),
    [
        ("aes128-gcm@openssh.com", "hmac-sha2-256"),
        ("aes128-ctr", "hmac-sha2-256-etm@openssh.com"),
        ("aes128-ctr", "hmac-sha2-256"),
    ],
)
def test_long_packets_are_refused_by_their_length(tmp_path: Path, cipher: str, mac: str) -> None:
    accepted: list[int] = []

    def flood(transport: HostileTransport, channel: Channel, line: str) -> None:
        # Without a MAC over the whole packet, length and block size must fit each other.
        length = 0x7FFFFFFC if mac == "hmac-sha2-256" and "ctr" in cipher else 0x7FFFFFF0
        header = transport.encrypted_header(length)
        accepted.append(transport.send_bytes_endlessly(header, b"x" * 65536))

    algorithms = {"_preferred_ciphers": (cipher,), "_preferred_macs": (mac,)}
    with attacked(tmp_path, flood, **algorithms) as (session, transport):
        with pytest.raises(UnreachableError, match="its SSH server sent a packet of more than 262144 bytes"):
            session.run(["true"])
        assert eventually(lambda: not transport.is_active() and accepted)
    assert max(accepted) < MAX_ACCEPTED_BYTES


def change_key(transport: HostileTransport, channel: Channel, line: str) -> None:
    key = paramiko.ECDSAKey.generate()
    transport.server_key_dict = dict.fromkeys(transport.server_key_dict, key)
    with contextlib.suppress(*LOST):
        transport.renegotiate_keys()


def close_and_go_on(transport: HostileTransport, channel: Channel, line: str) -> None:
    number = channel.remote_chanid
    transport.send(number, b"exit-status", False, 0, kind=98)
    transport.send(number, kind=97)
    transport.send_endlessly(number, BULK, kind=94)


NO_USE = "floods the connection"
VIOLATIONS = {
    "another host key": (change_key, "has changed its host key"),
    "data shorter than it claims": (endless(-1, 0xFFFFF, kind=94), "a length other than announced"),
    "data for a closed channel": (close_and_go_on, NO_USE),
    "windows beyond 2^32": (endless(-1, 0xFFFFFFFF, kind=93), r"beyond 2\^32 - 1 bytes"),
    "ignored messages": (endless(BULK, kind=2), NO_USE),
    "channels": (endless(b"forwarded-tcpip", 1, 0xFFFFFFFF, 0, BULK, 22, b"", 0, kind=90), NO_USE),
    "4 billion extensions": (endless(0xFFFFFFFF, kind=7), "a list of more than 64 extensions"),
    "a long key exchange": (endless(b"x" * 40_000, kind=20), "more than 35000 bytes in a message of a key"),
}


@pytest.mark.attack(4)
@pytest.mark.first(2)
@pytest.mark.parametrize("name", VIOLATIONS)
def test_server_that_breaks_the_protocol_is_disconnected(tmp_path: Path, name: str) -> None:
    attack, violation = VIOLATIONS[name]
    with attacked(tmp_path, attack) as (session, transport):
        with contextlib.suppress(CsdctlError):
            session.run(["true"], deadline_s=100)
        assert eventually(lambda: not transport.is_active())
        with pytest.raises(UnreachableError) as caught:
            session.run(["true"])
    error = caught.value
    assert re.search(f"because its SSH server .*{violation}", error.message), error
    assert error.node == "evil"


@pytest.mark.attack(4)
def test_channels_that_the_server_opens_are_all_refused(tmp_path: Path) -> None:
    refused: list[int] = []
    done = threading.Event()

    def open_some(transport: HostileTransport, channel: Channel, line: str) -> None:
        if refused:  # csdctl has started another command, to tell why there is no answer
            return

        def note(message: paramiko.Message) -> None:
            refused.append(message.get_int())
            if len(refused) == 1000 * len(OPENS):
                done.set()

        transport._handler_table[92] = note  # CHANNEL_OPEN_FAILURE
        for number in range(1000):
            for name in OPENS:
                transport.send(name, number, 1 << 20, 1 << 15, b"127.0.0.1", 22, b"127.0.0.1", 22, kind=90)

    with attacked(tmp_path, open_some) as (session, _):
        with pytest.raises(DeadlineError):
            session.run(["cat"], deadline_s=scaled(3))
        assert done.wait(scaled(WAIT_S))
        assert sorted(refused) == sorted([*range(1000)] * len(OPENS))


def print_errors(transport: HostileTransport, channel: Channel, line: str) -> None:
    with contextlib.suppress(*LOST):
        while not transport.stopping.is_set():
            channel.sendall_stderr(b"x" * 32_000)


def stop_reading(transport: HostileTransport, channel: Channel, line: str) -> None:
    transport.packetizer.read_message = transport.stopping.wait


@pytest.mark.attack(4)
@pytest.mark.parametrize("on_command", [print_errors, stop_reading])
def test_server_that_prints_without_end_or_stops_reading_does_not_outlast_the_deadline(
    tmp_path: Path, on_command: Command
) -> None:
    with (
        attacked(tmp_path, on_command, default_window_size=0xFFFFFFFF) as (session, _),
        pytest.raises(DeadlineError),
    ):
        session.run(["cat"], stdin=bytes(60_000_000), deadline_s=1)


@pytest.mark.attack(4)
def test_key_exchange_that_never_ends_costs_the_connection(tmp_path: Path) -> None:
    def stall(transport: HostileTransport, channel: Channel, line: str) -> None:
        transport.packetizer.read_message = transport.stopping.wait
        transport._send_kex_init()

    with attacked(tmp_path, stall) as (session, transport):
        transport.clear_to_send_timeout = 0.5
        with pytest.raises(CsdctlError):
            session.run(["true"], deadline_s=1)
        with pytest.raises(UnreachableError, match="did not finish a key exchange"):
            session.run(["true"], deadline_s=scaled(20))


@pytest.mark.attack(4)
def test_jump_host_that_breaks_the_protocol_is_named(tmp_path: Path) -> None:
    def flood(transport: HostileTransport) -> None:
        transport.send_endlessly(BULK, kind=2)

    with hostile_server(tmp_path / "evil", Attack(on_channel=flood)) as server:
        node = Node("behind", "127.0.0.1", 22, USER, server.key, jump=server.node())
        said = "jump host evil was lost .its SSH server floods the connection"
        with pytest.raises(JumpHostError, match=said) as caught:
            connect(node, [server.known_hosts], connect_deadline_s=scaled(60))
    assert caught.value.node == "behind"
