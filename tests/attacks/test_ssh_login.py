"""A node's SSH server attacks before the login is complete: endless greetings, prompts, lengths, slowness.

Whatever it does ends within the connect deadline, and what it writes does not fill the screen. The servers go
on until the test is over: a login without a deadline would never end.
"""

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from csdctl.errors import AuthenticationError, HostKeyError, NodeError, UnreachableError
from csdctl.fleet.model import Node
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.many import run_on_all
from csdctl.transport.ssh import JumpHosts, connect, fetch_host_key
from tests.attacks.hostile_ssh import (
    LOST,
    Attack,
    HostileServer,
    HostileTransport,
    hostile_server,
    raw_server,
)
from tests.patience import scaled

pytestmark = pytest.mark.first(1)

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
    with raw_server(talk) as port, pytest.raises(UnreachableError, match=said) as caught:
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


BULK = b"x" * 30_000


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
        pytest.raises((UnreachableError, AuthenticationError), match=said) as caught,
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
    with hostile_server(tmp_path / "evil", make()) as server, pytest.raises(NodeError, match=said):
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
        with pytest.raises(HostKeyError, match="RSA with 776 bits, but 1024 are the least"):
            log_in(server)
        jumps = JumpHosts(KnownHosts())
        with pytest.raises(HostKeyError, match="1024"):
            fetch_host_key(server.node(), jumps, connect_deadline_s=scaled(10))
