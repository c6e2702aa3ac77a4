"""Making one SSH connection: socket, handshake, host key, authentication; and naming what went wrong.

Everything happens within one connect deadline. Nobody is ever asked anything: an unknown host key, or
a key with a passphrase that no agent holds, is an error with a remedy.
"""

import base64
import contextlib
import errno
import functools
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko

from csdctl.errors import AuthenticationError, NodeError, UnreachableError
from csdctl.fleet.model import Node
from csdctl.transport.jump import JumpHosts, watch_peer
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.orderly import OrderlyTransport
from csdctl.transport.process import Deadline

MAX_TRIES = 3
"""How often to try a server that drops connections (sshd's MaxStartups)."""

DEAD_PEER_S = 12
"""A pulled cable is noticed after this, and one keepalive interval at most."""

KEEPALIVE_INTERVAL_S = 3

# AES-GCM needs no separate MAC and has hardware help on both sides: half the time for large uploads.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_OPENSSH_KEY = b"openssh-key-v1\0"
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")

# Without a handler, Python would print paramiko's errors; they reach people as ours.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _ConnectionDropped(Exception):
    """The server closed the connection before it was ready; another try may do."""


def make_jump_hosts(known_hosts: KnownHosts) -> JumpHosts:
    """No connection yet; jump hosts behind others share theirs too."""
    jumps = JumpHosts(lambda node, deadline: open_transport(node, known_hosts, deadline, jumps))
    return jumps


def fetch_host_key(
    node: Node, known_hosts: KnownHosts, jumps: JumpHosts, *, connect_deadline_s: float
) -> tuple[str, bytes]:
    """The type and the blob of the key that `node` shows, unchecked; its jump host's key is checked.

    Raises UnreachableError.
    """
    with _started(node, known_hosts, Deadline(connect_deadline_s), jumps) as transport:
        key = transport.get_remote_server_key()
        transport.close()
        return key.get_name(), key.asbytes()


def open_transport(
    node: Node, known_hosts: KnownHosts, deadline: Deadline, jumps: JumpHosts
) -> OrderlyTransport:
    """An authenticated connection to `node`, through its jump host if it has one.

    Raises UnreachableError, HostKeyError or AuthenticationError, within `deadline`.
    """
    keys: list[paramiko.PKey] | None = None
    while True:
        with _started(node, known_hosts, deadline, jumps) as transport:
            key = transport.get_remote_server_key()
            known_hosts.check(node.name, node.address, node.port, key.get_name(), key.asbytes())
            keys = load_keys(node) if keys is None else keys
            if _authenticate(node, transport, keys, deadline):
                if node.jump:
                    watch_peer(transport, KEEPALIVE_INTERVAL_S, DEAD_PEER_S)
                return transport
        transport.close()  # and come again with the keys that were not tried yet


@contextlib.contextmanager
def _started(
    node: Node, known_hosts: KnownHosts, deadline: Deadline, jumps: JumpHosts
) -> Iterator[OrderlyTransport]:
    """A connection with keys exchanged, tried again when it was dropped; closed when the body fails."""
    num_drops = 0
    while True:
        try:
            with jumps.turn(node, deadline) if node.jump else contextlib.nullcontext():
                transport = _start_transport(node, known_hosts, deadline, jumps)
            break
        except _ConnectionDropped as dropped:
            num_drops += 1
            pause_s = random.uniform(0.1, 0.4) * 2**num_drops
            if num_drops == MAX_TRIES or pause_s > deadline.left_s:
                raise _dropped_error(node, num_drops, str(dropped)) from None
            time.sleep(pause_s)
    try:
        yield transport
    except BaseException:
        transport.close()
        raise


def open_socket(node: Node, deadline: Deadline) -> socket.socket:
    """A TCP connection that notices a dead peer; raises UnreachableError."""
    failure: OSError = TimeoutError()
    for family, address in _resolve(node, deadline):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            _set_options(connection)
            connection.settimeout(max(0.01, deadline.left_s))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    where = f"{node.address} port {node.port}"
    if isinstance(failure, TimeoutError):
        raise UnreachableError(
            f"{where} does not answer within {deadline.seconds:g} s",
            node=node.name,
            remedy="check that the machine is on, its address, and the network in between",
        )
    remedy = "check the address in fleet.yaml and the network in between"
    if failure.errno == errno.ECONNREFUSED:
        remedy = "check that an SSH server runs there, and the port in fleet.yaml"
    raise UnreachableError(
        f"{where} cannot be reached ({failure.strerror or failure})", node=node.name, remedy=remedy
    )


def _set_options(connection: socket.socket) -> None:
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_PEER_S // KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000),
    ):
        connection.setsockopt(level, option, value)


def _resolve(node: Node, deadline: Deadline) -> list[tuple[int, tuple[Any, ...]]]:
    """The socket addresses of `node`; name resolution has no deadline of its own, so it gets a thread."""
    with contextlib.suppress(OSError):  # an address needs no name server
        return _look_up(node, socket.AI_NUMERICHOST)
    answers: queue.Queue[list[tuple[int, tuple[Any, ...]]] | OSError] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(_look_up(node))
        except OSError as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    reason = "the name server does not answer"
    with contextlib.suppress(queue.Empty):
        answer = answers.get(timeout=max(0.01, deadline.left_s))
        if not isinstance(answer, OSError):
            return answer
        reason = answer.strerror or str(answer)
    raise UnreachableError(
        f"the name {node.address!r} cannot be resolved ({reason})",
        node=node.name,
        remedy="write an IP address in fleet.yaml, or mend name resolution",
    )


def _look_up(node: Node, flags: int = 0) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(node.address, node.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def load_keys(node: Node) -> list[paramiko.PKey]:
    """The keys to offer: `node.key` alone if it is given, else the agent's and the user's default ones.

    Raises AuthenticationError when `node.key` cannot be used.
    """
    if node.key:
        return [_load_key(node, node.key)]
    keys: list[paramiko.PKey] = []
    with contextlib.suppress(paramiko.SSHException, OSError):
        keys.extend(paramiko.Agent().get_keys())
    for name in _DEFAULT_KEYS:
        path = Path.home() / ".ssh" / name
        with contextlib.suppress(AuthenticationError):
            if path.exists():
                keys.append(_load_key(node, path))
    return keys


def _start_transport(
    node: Node, known_hosts: KnownHosts, deadline: Deadline, jumps: JumpHosts
) -> OrderlyTransport:
    """A connection with keys exchanged; raises _ConnectionDropped when another try may do."""
    connection = jumps.open_channel(node, deadline) if node.jump else open_socket(node, deadline)
    transport = OrderlyTransport(connection)
    jumps.opened.append((node, transport.packetizer.meter))
    options = transport.get_security_options()
    options.ciphers = [cipher for cipher in _CIPHERS if cipher in options.ciphers]
    known_types = {key.type for key in known_hosts.lookup(node.address, node.port)}
    # Ask first for a key of a type we know, as ssh does; the server may have keys of several types.
    options.key_types = sorted(options.key_types, key=lambda name: _known_hosts_type(name) not in known_types)
    transport.banner_timeout = max(0.1, deadline.left_s)
    try:
        transport.exchange_keys(max(0.1, deadline.left_s))
    except (paramiko.SSHException, EOFError, OSError) as error:
        transport.close()
        if deadline.left_s < 0.1 or isinstance(error, TimeoutError):
            raise UnreachableError(
                f"{node.address} port {node.port} accepts connections but its SSH server did not answer "
                f"within {deadline.seconds:g} s",
                node=node.name,
                remedy="the machine may hang or be out of memory: look at its console, or restart it",
            ) from None
        if "Indecipherable" in str(error) or isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
            raise UnreachableError(
                f"what answers at {node.address} port {node.port} cannot be talked to by SSH ({error})",
                node=node.name,
                remedy="check the port in fleet.yaml",
            ) from None
        raise _ConnectionDropped(str(error) or "connection closed") from None
    return transport


def _dropped_error(node: Node, num_drops: int, reason: str) -> UnreachableError:
    times = "once" if num_drops == 1 else f"{num_drops} times"
    return UnreachableError(
        f"{node.address} port {node.port} dropped the connection {times} ({reason})",
        node=node.name,
        remedy="check the port, and sshd's log: it may be overloaded (MaxStartups) or refuse this address",
    )


def _authenticate(
    node: Node, transport: OrderlyTransport, keys: list[paramiko.PKey], deadline: Deadline
) -> bool:
    """Offer `keys` in turn, dropping each one refused; False when the server hung up in between.

    sshd hangs up after a few keys (MaxAuthTries), so an agent with many needs another connection.
    """
    if not keys:
        raise AuthenticationError(
            "there is no key to offer: no agent with keys, and none of "
            + ", ".join(f"~/.ssh/{name}" for name in _DEFAULT_KEYS),
            node=node.name,
            remedy="name a `key:` in fleet.yaml, or make one with ssh-keygen",
        )
    while keys and not deadline.has_passed:
        key = keys[0]
        try:
            if transport.offer_key(node.user, key, max(0.1, deadline.left_s)):
                return True
            keys.pop(0)  # refused; or accepted, but the server wants a second factor, which we never have
            if not transport.is_active() and keys:
                return False
        except (paramiko.SSHException, EOFError, OSError):
            keys.pop(0)
            if not transport.is_active() and keys:
                return False
    if deadline.has_passed:
        raise UnreachableError(
            f"{node.address} port {node.port} did not finish authentication within {deadline.seconds:g} s",
            node=node.name,
            remedy="the machine may be overloaded: look at its console",
        )
    raise AuthenticationError(
        f"{node.address} port {node.port} accepts none of our keys for user {node.user!r}",
        node=node.name,
        remedy=f"name the right `key:` and `user:` in fleet.yaml, or let the key in: "
        f"ssh-copy-id -i KEY.pub -p {node.port} {node.user}@{node.address}",
    )


def _load_key(node: Node, path: Path) -> paramiko.PKey:
    def refused(reason: str, remedy: str) -> NodeError:
        return AuthenticationError(f"the key {path} {reason}", node=node.name, remedy=remedy)

    try:
        status = path.stat()
        return _read_key(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        raise refused("does not exist", "mend `key:` in fleet.yaml") from None
    except (paramiko.PasswordRequiredException, TypeError):
        if held := _find_in_agent(path):
            return held
        raise refused("has a passphrase, and csdctl never asks for one", f"run `ssh-add {path}`") from None
    except OSError as error:
        raise refused(f"cannot be read: {error.strerror}", "mend its permissions") from None
    except Exception as error:  # the parsers of three libraries, each with errors of its own
        raise refused(f"is not a private key: {error}", "mend `key:` in fleet.yaml") from None


@functools.lru_cache
def _read_key(path: Path, mtime_ns: int, num_bytes: int) -> paramiko.PKey:
    """The private key in a file of that age and size: read once for all nodes."""
    return paramiko.PKey.from_path(path)


def _find_in_agent(path: Path) -> paramiko.PKey | None:
    """The agent's key whose public part is that of the private key at `path`, if it holds it."""
    blob = _read_public_blob(path)
    with contextlib.suppress(paramiko.SSHException, OSError):
        return next((key for key in paramiko.Agent().get_keys() if key.asbytes() == blob), None)
    return None


def _read_public_blob(path: Path) -> bytes:
    """The public part of a private key: KEY.pub, or what OpenSSH's format has in clear; b'' if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return base64.b64decode(Path(f"{path}.pub").read_text(encoding="utf-8").split()[1])
    with contextlib.suppress(OSError, ValueError):
        lines = path.read_text(encoding="ascii").split("\n")
        content = base64.b64decode("".join(line for line in lines if line and not line.startswith("-----")))
        if content.startswith(_OPENSSH_KEY):
            fields = paramiko.Message(content[len(_OPENSSH_KEY) :])
            for _ in ("cipher", "kdf", "kdf options"):
                fields.get_binary()
            fields.get_int()  # the number of keys, which is always one
            return fields.get_binary()
    return b""


def _known_hosts_type(algorithm: str) -> str:
    """The key type that known_hosts names for a signature algorithm."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm
