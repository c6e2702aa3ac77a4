"""A node's SSH server attacks, before and after the login: lengths, windows, floods, slowness.

The node is lost, with a message that says what its server did, within the connect deadline. The others go on,
memory stays bounded, and what the server writes does not fill the screen.
"""

import contextlib
import itertools
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from csdctl import errors
from csdctl.fleet.model import Node
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.many import run_on_all
from csdctl.transport.session import Deadline
from csdctl.transport.ssh import JumpHosts, SshSession, connect, fetch_host_key, open_transport
from csdctl.transport.strict_transport import StrictTransport
from tests.attacks.hostile_ssh import (
    LOST,
    Attack,
    Command,
    HostileServer,
    HostileTransport,
    hostile_server,
    raw_server,
)
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
        with pytest.raises(errors.UnreachableError, match="more than the receive window"):
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
        with pytest.raises(
            errors.UnreachableError, match="its SSH server sent a packet of more than 262144 bytes"
        ):
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
        with contextlib.suppress(errors.CsdctlError):
            session.run(["true"], deadline_s=100)
        assert eventually(lambda: not transport.is_active())
        with pytest.raises(errors.UnreachableError) as caught:
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
        with pytest.raises(errors.DeadlineError):
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
        pytest.raises(errors.DeadlineError),
    ):
        session.run(["cat"], stdin=bytes(60_000_000), deadline_s=1)


@pytest.mark.attack(4)
def test_key_exchange_that_never_ends_costs_the_connection(tmp_path: Path) -> None:
    def stall(transport: HostileTransport, channel: Channel, line: str) -> None:
        transport.packetizer.read_message = transport.stopping.wait
        transport._send_kex_init()

    with attacked(tmp_path, stall) as (session, transport):
        transport.clear_to_send_timeout = 0.5
        with pytest.raises(errors.CsdctlError):
            session.run(["true"], deadline_s=1)
        with pytest.raises(errors.UnreachableError, match="did not finish a key exchange"):
            session.run(["true"], deadline_s=scaled(20))


@pytest.mark.attack(4)
def test_jump_host_that_breaks_the_protocol_is_named(tmp_path: Path) -> None:
    def flood(transport: HostileTransport) -> None:
        transport.send_endlessly(BULK, kind=2)

    with hostile_server(tmp_path / "evil", Attack(on_channel=flood)) as server:
        node = Node("behind", "127.0.0.1", 22, USER, server.key, jump=server.node())
        said = "jump host evil was lost .its SSH server floods the connection"
        with pytest.raises(errors.JumpHostError, match=said) as caught:
            connect(node, [server.known_hosts], connect_deadline_s=scaled(60))
    assert caught.value.node == "behind"


MAX_MESSAGE_CHARS = 1000
TOO_SLOW = "did not respond within 1 s"
VERSION = b"SSH-2.0-evil\r\n"
ESCAPES = "\x1b]52;c;ZXZpbA==\x07\x1b[2J"

Talk = Callable[[socket.socket, threading.Event], None]


def always(data: bytes) -> Talk:
    def talk(connection: socket.socket, stopping: threading.Event) -> None:
        while not stopping.is_set():
            connection.sendall(data)

    return talk


def once(data: bytes) -> Talk:
    def talk(connection: socket.socket, stopping: threading.Event) -> None:
        connection.sendall(data)
        stopping.wait()

    return talk


def trickled(first: bytes, data: bytes) -> Talk:
    """Send `first`, and then byte by byte, so slowly that it takes ages."""

    def talk(connection: socket.socket, stopping: threading.Event) -> None:
        connection.sendall(first)
        for number in itertools.count():
            connection.sendall(data[number % len(data) :][:1])
            if stopping.wait(0.02):
                return

    return talk


KEXINIT_HEAD = (1500).to_bytes(4, "big") + bytes([10, 20])


TALKS = {
    "long text": (once(f"SSH-1.0-{ESCAPES}{'x' * 8000}\r\n".encode()), "no compatible SSH server"),
    "no line end": (always(b"x" * 65536), "a line of more than 8192 bytes before the SSH version"),
    "no version": (always(b"hello\r\n" * 9999), r"dropped the connection 3 times \(hello\)"),
    "no text": (once(b"\xff\xfe\n"), "not UTF-8"),
    "long packet": (once(VERSION + b"\x7f\xff\xff\xf4" * 2), "a packet of more than 35000 bytes"),
    "empty packet": (once(VERSION + b"\x00\x00\x00\x00" * 2), "a damaged packet .Invalid packet"),
    "slow line": (trickled(b"", b"x"), TOO_SLOW),
    "slow packet": (trickled(VERSION, KEXINIT_HEAD + bytes(100)), TOO_SLOW),
}


@pytest.mark.attack(5)
@pytest.mark.attack(10)
@pytest.mark.first(2)
@pytest.mark.parametrize(("talk", "said"), TALKS.values(), ids=TALKS)
def test_server_that_never_gets_to_the_point_is_left(tmp_path: Path, talk: Talk, said: str) -> None:
    deadline_s = 1 if said == TOO_SLOW else scaled(20)
    with raw_server(talk) as port, pytest.raises(errors.UnreachableError, match=said) as caught:
        connect(Node("evil", "127.0.0.1", port), [tmp_path / "known_hosts"], connect_deadline_s=deadline_s)
    assert len(str(caught.value)) < MAX_MESSAGE_CHARS


def log_in(server: HostileServer, deadline_s: float = scaled(20)) -> None:
    connect(server.node(), [server.known_hosts], connect_deadline_s=deadline_s).close()


def flood(*parts: int | bytes | bool, kind: int) -> Callable[[HostileTransport], bool]:
    def attack(transport: HostileTransport) -> bool:
        transport.send_endlessly(*parts, kind=kind)
        return False

    return attack


def drip(transport: HostileTransport) -> bool:
    """Send something, again and again, so that it never looks dead."""
    with contextlib.suppress(*LOST):
        while not transport.stopping.wait(0.02):
            transport.send(b"x", kind=2)
    return True


UNFINISHED = "did not finish authentication within 1 s"
LOGINS = {
    "greetings": (flood(BULK, b"", kind=53), "floods the connection"),
    "long messages": (flood(b"x" * 36_000, kind=2), "a packet of more than 35000 bytes"),
    "4 billion extensions": (flood(0xFFFFFFFF, kind=7), "more than 64 extensions"),
    "data": (flood(0, BULK, kind=94), "before the login"),
    "logins to sign": (flood(b"ssh-userauth", kind=6), "that nobody asked for"),
    "4 billion prompts": (flood(b"", b"", b"", 0xFFFFFFFF, kind=60), "accepts none of the offered keys"),
    "silence": (lambda transport: transport.stopping.wait(), UNFINISHED),
    "slowness": (drip, UNFINISHED),
}


@pytest.mark.attack(5)
@pytest.mark.parametrize(("attack", "said"), LOGINS.values(), ids=LOGINS)
def test_login_ends_whatever_the_server_does(
    tmp_path: Path, attack: Callable[[HostileTransport], bool], said: str
) -> None:
    with (
        hostile_server(tmp_path / "evil", Attack(on_login=attack)) as server,
        pytest.raises((errors.UnreachableError, errors.AuthenticationError), match=said) as caught,
    ):
        log_in(server, deadline_s=1 if said == UNFINISHED else scaled(60))
    assert caught.value.node == "evil"
    assert len(str(caught.value)) < MAX_MESSAGE_CHARS


class _Mutator(HostileTransport):
    """Damages what it sends, sometimes, before it is encrypted."""

    chance: random.Random

    def _send_message(self, data: paramiko.Message) -> None:
        content = bytearray(data.asbytes())
        if self.chance.random() < 0.3:
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        super()._send_message(paramiko.Message(bytes(content)))


@pytest.mark.attack(5)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", range(12))
def test_damaged_messages_are_errors_of_the_node(tmp_path: Path, seed: int) -> None:
    attack = Attack(transport_class=_Mutator, changes={"chance": random.Random(seed)})
    with hostile_server(tmp_path / "evil", attack) as server:
        error = run_on_all({"evil": server}, lambda server: log_in(server, 3))["evil"].error
    assert error is None or error.node == "evil"
    assert "unexpected" not in str(error)
    assert len(str(error)) < MAX_MESSAGE_CHARS


class _StrictBreaker(HostileTransport):
    """Sends a message in a key exchange that allows none."""

    def _send_kex_init(self) -> None:
        super()._send_kex_init()
        self.send(b"x", kind=2)


def offer_old_key(algorithm: str) -> Attack:
    key = paramiko.RSAKey.generate(1024)
    return Attack(
        host_key=key, changes={"_preferred_keys": (algorithm,), "server_key_dict": {algorithm: key}}
    )


KEY_EXCHANGES: dict[str, tuple[Callable[[], Attack], str]] = {
    "strict": (lambda: Attack(transport_class=_StrictBreaker), "strict-kex mode"),
    "ssh-rsa": (lambda: offer_old_key("ssh-rsa"), "no acceptable host key"),
    "zlib": (lambda: Attack(changes={"_preferred_compression": ("zlib",)}), "no acceptable compression"),
    "cbc": (lambda: Attack(changes={"_preferred_ciphers": ("aes128-cbc",)}), "no acceptable ciphers"),
}


@pytest.mark.attack(5)
@pytest.mark.first(2)
@pytest.mark.parametrize(("make", "said"), KEY_EXCHANGES.values(), ids=KEY_EXCHANGES)
def test_key_exchange_keeps_to_the_protocol(tmp_path: Path, make: Callable[[], Attack], said: str) -> None:
    """Host keys of old algorithms are refused as by OpenSSH."""
    with hostile_server(tmp_path / "evil", make()) as server, pytest.raises(errors.NodeError, match=said):
        log_in(server)


def short_rsa_key(prime: int, second: int) -> paramiko.RSAKey:
    """A key that generators refuse to make."""
    exponent = 65537
    secret = pow(exponent, -1, (prime - 1) * (second - 1))
    numbers = rsa.RSAPrivateNumbers(
        p=prime,
        q=second,
        d=secret,
        dmp1=secret % (prime - 1),
        dmq1=secret % (second - 1),
        iqmp=pow(second, -1, prime),
        public_numbers=rsa.RSAPublicNumbers(exponent, prime * second),
    )
    return paramiko.RSAKey(key=numbers.private_key(unsafe_skip_rsa_key_validation=True))


@pytest.mark.attack(5)
def test_short_rsa_host_keys_are_refused_as_by_openssh(tmp_path: Path) -> None:
    key = short_rsa_key(2**521 - 1, 2**255 - 19)  # 776 bits: a signature with SHA-512 takes 752 at least
    with hostile_server(tmp_path / "evil", Attack(host_key=key)) as server:
        with pytest.raises(errors.HostKeyError, match="RSA with 776 bits, but 1024 are the least"):
            log_in(server)
        jumps = JumpHosts(KnownHosts())
        with pytest.raises(errors.HostKeyError, match="1024"):
            fetch_host_key(server.node(), jumps, connect_deadline_s=scaled(10))
