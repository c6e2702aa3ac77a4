"""One SSH connection, from its socket to the login, and a node as a session: commands and files over it.

A connection opens within one deadline, without prompts. Nodes behind a jump host share its connection, and
its error when it is down.

The algorithms are OpenSSH 9's, as far as paramiko has them, without group exchange: the server chooses its
numbers, and Python calculates with 8192 bits for seconds, while no other thread runs.

Files go through the standard input of a command (`shipping.deliver`): servers without SFTP (dropbear) work.
"""

import base64
import contextlib
import copy
import errno
import functools
import logging
import math
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import paramiko
from cryptography.hazmat.primitives.serialization import SSHCertificate, load_ssh_public_identity
from paramiko.common import OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

from csdctl import errors
from csdctl.fleet.checks import LARGE_PACKETS
from csdctl.fleet.model import Node
from csdctl.transport.commands import Setting, WrappedCommand, build_kill_command
from csdctl.transport.known_hosts import KnownHosts, fingerprint
from csdctl.transport.meter import Meter
from csdctl.transport.session import KILL_DEADLINE_S, Deadline, Session, bounded
from csdctl.transport.strict_transport import LOST, MAX_PACKET_BYTES, StrictTransport, request_exec
from csdctl.worker.protocol.file_state import file_state

MIN_RSA_BITS = 1024
"""Minimum length of RSA host keys; the default of OpenSSH's RequiredRSASize."""
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
"""AES-GCM comes first: it needs no separate MAC, and large uploads take half the time."""
DEAD_PEER_S = 12.0
"""A disconnected cable is noticed after this time and at most one keepalive interval."""
KEEPALIVE_INTERVAL_S = 3.0
SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(KEEPALIVE_INTERVAL_S)),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(KEEPALIVE_INTERVAL_S)),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(DEAD_PEER_S / KEEPALIVE_INTERVAL_S)),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_PEER_S * 1000)),
)
MAX_TRIES = 3
"""Attempts to connect to a server that drops connections (sshd's MaxStartups)."""
AUTHORIZE = "fix `key:` or `user:`, or authorize the key; sshd's log says why (AllowUsers, PermitRootLogin…)"
KEYS_ALONE = "csdctl has keys alone: check PubkeyAuthentication and AuthenticationMethods in its sshd_config"
DEFAULT_KEYS = (".ssh/id_ed25519", ".ssh/id_ecdsa", ".ssh/id_rsa")

# Without a handler, Python would print paramiko's errors; csdctl reports them as its own.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class _ConnectionDropped(Exception):
    """The server closed the connection before it was ready. A retry may succeed."""


class JumpHosts:
    """The known host keys and the shared connections to jump hosts of one command. The caller closes it."""

    def __init__(self, known_hosts: KnownHosts) -> None:
        self.known_hosts = known_hosts
        self._locks: defaultdict[Node, threading.Lock] = defaultdict(threading.Lock)
        self._results: dict[Node, StrictTransport | errors.CsdctlError] = {}
        self.opened: list[tuple[Node, Meter]] = []
        """Every connection that was started, to jump hosts and to nodes, including failed ones."""

    def open_channel(self, node: Node, deadline: Deadline) -> paramiko.Channel:
        """Open a channel from the jump host to `node`. Raises JumpHostError or UnreachableError."""
        assert node.jump
        jump = node.jump
        transport = self._connect(node, jump, deadline)
        try:
            return transport.open_channel(
                "direct-tcpip", (node.address, node.port), ("127.0.0.1", 0), timeout=max(0.1, deadline.left_s)
            )
        except paramiko.ChannelException as error:
            if error.code == OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED:
                problem = f"jump host {jump.name} does not forward connections ({bounded(error.text)})"
                remedy = f"allow it in {jump.name}'s sshd_config: AllowTcpForwarding, PermitOpen"
                raise errors.JumpHostError(problem, node=node.name, remedy=remedy) from None
            problem = f"cannot be reached through {jump.name} ({bounded(error.text)})"
            remedy = "check that the machine is on, its address and port, and the network behind it"
            raise _unreachable(node, problem, remedy) from None
        except LOST:
            if deadline.left_s < 0.1:
                raise _jump_timeout(node, jump, deadline) from None
            violation = transport.packetizer.violation
            reason = f" (its SSH server {violation})" if violation else ""
            problem = f"the connection to jump host {jump.name} was lost{reason}"
            raise errors.JumpHostError(problem, node=node.name) from None

    def close(self) -> None:
        """Close the connections to all jump hosts, and with them the connections that they forward."""
        for result in self._results.values():
            if isinstance(result, StrictTransport):
                result.close()

    def _connect(self, node: Node, jump: Node, deadline: Deadline) -> StrictTransport:
        # The thread that connects to the jump host has the same deadline. It learns why that fails.
        if not self._locks[jump].acquire(timeout=deadline.left_s + 1.0):
            raise _jump_timeout(node, jump, deadline)
        try:
            if jump not in self._results:
                try:
                    self._results[jump] = open_transport(jump, deadline, self)
                except errors.CsdctlError as error:
                    self._results[jump] = error
        finally:
            self._locks[jump].release()
        result = self._results[jump]
        if isinstance(result, StrictTransport):
            return result
        is_nested = isinstance(result, errors.JumpHostError)
        problem = result.message if is_nested else f"jump host {jump.name}: {result.message}"
        raise errors.JumpHostError(problem, node=node.name, remedy=result.remedy)


def _jump_timeout(node: Node, jump: Node, deadline: Deadline) -> errors.JumpHostError:
    target = f"{node.address} port {node.port} within {deadline.seconds:g} s"
    remedy = f"check that the machine is on, and the load of {jump.name}"
    return errors.JumpHostError(
        f"jump host {jump.name} did not connect to {target}", node=node.name, remedy=remedy
    )


def watch_peer(transport: paramiko.Transport) -> None:
    """Close a connection through a jump host, beyond TCP keepalive, if there is no reply for DEAD_PEER_S."""
    requested_s: list[float] = []

    def request() -> None:
        with contextlib.suppress(*LOST):
            transport.global_request("keepalive@openssh.com", wait=True)
            requested_s.clear()

    def when_idle() -> None:
        if not requested_s:
            requested_s.append(time.monotonic())
            threading.Thread(target=request, daemon=True).start()
        elif time.monotonic() - requested_s[0] > DEAD_PEER_S:
            # In a thread of its own: close() joins the thread that calls this function.
            threading.Thread(target=transport.close, daemon=True).start()

    # Transport.set_keepalive sends requests but never checks for replies.
    transport.packetizer.set_keepalive(KEEPALIVE_INTERVAL_S, when_idle)


def fetch_host_key(node: Node, jumps: JumpHosts, *, connect_deadline_s: float) -> tuple[str, bytes]:
    """Return type and blob of the unchecked host key of `node`. Raises UnreachableError."""
    with _start_transport(node, Deadline(connect_deadline_s), jumps) as transport:
        key = transport.get_remote_server_key()
        transport.close()
        return key.get_name(), key.asbytes()


def open_transport(node: Node, deadline: Deadline, jumps: JumpHosts) -> StrictTransport:
    """Return an authenticated connection. Raises UnreachableError, HostKeyError or AuthenticationError."""
    keys: list[paramiko.PKey] | None = None
    while True:
        with _start_transport(node, deadline, jumps) as transport:
            key = transport.get_remote_server_key()
            jumps.known_hosts.check(
                node.name, node.key_address, node.port, key_type=key.get_name(), blob=key.asbytes()
            )
            if keys is None:
                keys, notes = load_keys(node)
            if _authenticate(node, transport, deadline, keys=keys, notes=notes):
                transport.packetizer.writes_end_s = math.inf
                transport.packetizer.max_packet_bytes = MAX_PACKET_BYTES
                if node.jump:
                    watch_peer(transport)
                transport.reconnect = lambda timeout_s: open_transport(node, Deadline(timeout_s), jumps)
                return transport
        transport.close()  # reconnect and offer the keys that were not tried yet


@contextlib.contextmanager
def _start_transport(node: Node, deadline: Deadline, jumps: JumpHosts) -> Iterator[StrictTransport]:
    """Yield a connection after key exchange, retried when dropped. Closed when the body fails."""
    num_drops = 0
    while True:
        try:
            transport = _exchange_keys(node, deadline, jumps)
            break
        except _ConnectionDropped as dropped:
            num_drops += 1
            pause_s = random.uniform(0.1, 0.4) * 2**num_drops
            if num_drops == MAX_TRIES or pause_s > deadline.left_s:
                times = "once" if num_drops == 1 else f"{num_drops} times"
                problem, why = f"dropped the connection {times} ({dropped})", "overloaded (MaxStartups)"
                remedy = f"check the port, and sshd's log: it may be {why} or refuse this host"
                raise _unreachable(node, problem, remedy) from None
            time.sleep(pause_s)
    try:
        key = transport.get_remote_server_key()
        if key.get_name() == "ssh-rsa" and key.get_bits() < MIN_RSA_BITS:
            raise errors.HostKeyError(
                f"its host key is RSA with {key.get_bits()} bits, but {MIN_RSA_BITS} are the least",
                node=node.name,
                remedy="generate one on the node: ssh-keygen -q -t ed25519 -f /etc/ssh/ssh_host_ed25519_key",
            )
        yield transport
    except BaseException:
        transport.close()
        raise


def _exchange_keys(node: Node, deadline: Deadline, jumps: JumpHosts) -> StrictTransport:
    connection = jumps.open_channel(node, deadline) if node.jump else _open_socket(node, deadline)
    transport = StrictTransport(connection, node.name)
    jumps.opened.append((node, transport.packetizer.meter))
    known_types = {key.type for key in jumps.known_hosts.lookup(node.key_address, node.port)}
    choose_algorithms(transport.get_security_options(), known_types)
    transport.packetizer.writes_end_s = time.monotonic() + deadline.left_s
    try:
        transport.exchange_keys(max(0.1, deadline.left_s))
    except LOST as error:
        transport.close()
        if violation := transport.packetizer.violation:
            raise _violation_error(node.name, violation) from None
        if deadline.left_s < 0.1 or isinstance(error, TimeoutError):
            problem = f"accepts connections but its SSH server did not respond within {deadline.seconds:g} s"
            remedy = "the machine may hang or be out of memory: check its console, or restart it"
            raise _unreachable(node, problem, remedy) from None
        if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
            raise _incompatible(node, transport, error) from None
        greeting = transport.packetizer.greeting
        reason = error if greeting.startswith("SSH-") else greeting or error
        raise _ConnectionDropped(bounded(reason)) from None
    return transport


def choose_algorithms(options: paramiko.transport.SecurityOptions, known_key_types: Collection[str]) -> None:
    """Restrict `options` of a new connection. As in ssh, types of known host keys come first."""
    options.ciphers = [name for name in CIPHERS if name in options.ciphers]
    digests = [name for name in options.digests if "md5" not in name and "-96" not in name]
    options.digests = sorted(digests, key=lambda name: "-etm@" not in name)
    options.kex = [name for name in options.kex if "group-exchange" not in name]
    types = {name: "ssh-rsa" if name.startswith("rsa-sha2-") else name for name in options.key_types}
    options.key_types = sorted(types, key=lambda name: types[name] not in known_key_types)


def _incompatible(node: Node, transport: StrictTransport, error: Exception) -> errors.UnreachableError:
    problem = f"has no compatible SSH server ({bounded(error)})"
    offer, options = paramiko.Message(transport.offer[16:]), transport.get_security_options()
    lists = [("KexAlgorithms", options.kex), ("HostKeyAlgorithms", options.key_types)]
    for keyword, supported in [*lists, *[("Ciphers", options.ciphers)] * 2, ("MACs", options.digests)]:
        offered = [
            name for name in offer.get_list() if name and not name.startswith(("ext-info", "kex-strict"))
        ]
        if offered and not {*supported} & {*offered}:
            line = f"{keyword} {bounded(','.join(offered))}"
            problem += f": it has {line}; csdctl has {','.join(supported)}"
            remedy = f"write in its sshd_config: {line},{supported[1]},{supported[-2]}"
            return _unreachable(node, problem, remedy)
    return _unreachable(node, problem, "check the port in fleet.yaml")


def lost_connection_error(transport: StrictTransport, when: str = "") -> errors.UnreachableError:
    """Return the error for a connection that has ended, with what the server did against the protocol."""
    if violation := transport.packetizer.violation:
        return _violation_error(transport.node, violation)
    remedy = f"check its power and network, it may have restarted; if it responds, {LARGE_PACKETS}"
    return errors.UnreachableError(f"the connection was lost{when}", node=transport.node, remedy=remedy)


def _violation_error(name: str, violation: str) -> errors.UnreachableError:
    problem = f"the connection was closed, because its SSH server {violation}"
    remedy = "no honest SSH server does that, except with a Banner above 35 kB: check what runs there"
    return errors.UnreachableError(problem, node=name, remedy=remedy)


def _unreachable(node: Node, problem: str, remedy: str) -> errors.UnreachableError:
    return errors.UnreachableError(
        f"{node.address} port {node.port} {problem}", node=node.name, remedy=remedy
    )


def _open_socket(node: Node, deadline: Deadline) -> socket.socket:
    failure: OSError = TimeoutError()
    for family, address in _resolve(node, deadline):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            for option in SOCKET_OPTIONS:
                connection.setsockopt(*option)
            connection.settimeout(max(0.01, deadline.left_s))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    if isinstance(failure, TimeoutError):
        problem = f"does not respond within {deadline.seconds:g} s"
        raise _unreachable(node, problem, "check that the machine is on, its address, and the network")
    remedy = "check the address in fleet.yaml and the network"
    if failure.errno == errno.ECONNREFUSED:
        remedy = "check that an SSH server runs there, and the port in fleet.yaml"
    raise _unreachable(node, f"cannot be reached ({failure.strerror or failure})", remedy)


def _resolve(node: Node, deadline: Deadline) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the socket addresses of `node`. Getaddrinfo has no timeout, so it runs in a thread."""
    addresses: list[tuple[int, tuple[Any, ...]]] = []
    reasons = ["the name server does not respond"]

    def look_up() -> None:
        try:
            results = socket.getaddrinfo(node.address, node.port, type=socket.SOCK_STREAM)
            addresses.extend((family, address) for family, _, _, _, address in results)
        except OSError as error:
            reasons.append(error.strerror or str(error))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(max(0.01, deadline.left_s))
    if resolved := list(addresses):
        return resolved
    raise errors.UnreachableError(
        f"the name {node.address!r} cannot be resolved ({reasons[-1]})",
        node=node.name,
        remedy="use an IP address in fleet.yaml (after %, an interface of this host), or fix name resolution",
    )


def load_keys(node: Node) -> tuple[list[paramiko.PKey], list[str]]:
    """Return the keys to offer, the agent's first, and what is wrong with keys, or AuthenticationError."""
    agent: list[Any] = []
    with contextlib.suppress(paramiko.SSHException, OSError):
        agent.extend(paramiko.Agent().get_keys())
    for key in agent:
        if "-cert-" in key.name:
            key.inner_key = None  # of RSA, paramiko would offer the key without its certificate
    keys: list[paramiko.PKey] = []
    problems: list[errors.AuthenticationError] = []
    for path in node.keys or [path for name in DEFAULT_KEYS if (path := Path.home() / name).exists()]:
        try:
            keys += _load_key(node, path, agent)
        except errors.AuthenticationError as error:
            problems.append(error)
    file_blobs, agent_blobs = [_blob(key) for key in keys], [_blob(key) for key in agent]
    if node.offers_agent or not node.keys:
        keys += [key for key in agent if _blob(key) not in file_blobs]
    if keys:
        # Keys of files that the agent has, then its others, then keys that only files have.
        keys.sort(key=lambda key: 2 if _blob(key) not in agent_blobs else _blob(key) not in file_blobs)
        return keys, [*filter(None, map(_find_obstacle, keys)), *(problem.message for problem in problems)]
    problem = f"no SSH key to offer: no agent with keys, and none of ~/{', ~/'.join(DEFAULT_KEYS)}"
    remedy = "set `key:` in fleet.yaml, or generate a key with ssh-keygen"
    raise (*problems, errors.AuthenticationError(problem, node=node.name, remedy=remedy))[0]


def _blob(key: paramiko.PKey) -> bytes:
    return key.public_blob.key_blob if key.public_blob else key.asbytes()


def _find_obstacle(key: paramiko.PKey) -> str:
    """Return why no server accepts the certificate of `key` now, or ''."""
    with contextlib.suppress(Exception):  # kinds of keys that the parser does not know
        text = f"{paramiko.Message(_blob(key)).get_text()} {base64.b64encode(_blob(key)).decode()}"
        public = load_ssh_public_identity(text.encode())
        if isinstance(public, SSHCertificate) and not public.valid_after <= time.time() < public.valid_before:
            state = "expired" if public.valid_before <= time.time() else "not valid yet"
            name = public.key_id.decode(errors="replace")
            return f"the certificate {name!r} is {state}: have it signed again"
    return ""


def _load_key(node: Node, path: Path, agent: Iterable[paramiko.PKey]) -> list[paramiko.PKey]:
    def refused(reason: str, remedy: str) -> errors.AuthenticationError:
        return errors.AuthenticationError(f"the key {path} {reason}", node=node.name, remedy=remedy)

    files = (path, Path(f"{path}-cert.pub"))
    try:
        key = _read_key(path, *(file_state(file.stat()) for file in files if file.exists()))
    except (FileNotFoundError, paramiko.PasswordRequiredException, TypeError) as error:
        if keys := _find_in_agent(path, agent):
            return keys
        if isinstance(error, FileNotFoundError):
            raise refused("does not exist", "fix `key:` in the fleet file") from None
        remedy = f"run `ssh-add {path}`; {path}.pub must be there too"
        raise refused("has a passphrase, and csdctl never prompts", remedy) from None
    except OSError as error:
        raise refused(f"cannot be read: {error.strerror}", "fix its permissions") from None
    except Exception as error:  # parsers of three libraries, each with its own exceptions
        raise refused(f"is not a private key: {error}", "fix `key:` in the fleet file") from None
    without_certificate = copy.copy(key)
    without_certificate.public_blob = None
    return [without_certificate, key] if key.public_blob else [key]


@functools.lru_cache
def _read_key(path: Path, *states: tuple[int, ...]) -> paramiko.PKey:
    """Read key and certificate. Cached by the states of their files, to be read once for all nodes."""
    return paramiko.PKey.from_path(path)


def _find_in_agent(path: Path, agent: Iterable[paramiko.PKey]) -> list[paramiko.PKey]:
    blobs: list[bytes] = []
    for suffix in (".pub", "-cert.pub"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            blobs.append(base64.b64decode(Path(f"{path}{suffix}").read_text(encoding="utf-8").split()[1]))
    return [key for key in agent if _blob(key) in blobs]


def _authenticate(
    node: Node, transport: StrictTransport, deadline: Deadline, *, keys: list[paramiko.PKey], notes: list[str]
) -> bool:
    """Offer `keys` in turn and remove each refused key. Return False when the server disconnects.

    sshd disconnects after a few keys (MaxAuthTries), so an agent with many keys needs several connections.
    `notes` are for the error. The server's words for the user are added to them.
    """
    user = f"user {node.user!r}"
    problem, remedy = f"accepts none of the offered keys for {user}", AUTHORIZE
    methods, first_key = ["publickey"], keys[0]
    while keys and "publickey" in methods and not deadline.has_passed:
        try:
            methods = transport.offer_key(node.user, keys[0], max(0.1, deadline.left_s))
            if not methods:
                return True
            problem, remedy = f"accepts a key of {user}, but also wants {', '.join(methods)}", KEYS_ALONE
        except paramiko.BadAuthenticationType as error:
            methods = error.allowed_types
            problem, remedy = f"takes no keys of {user}, but {', '.join(methods)}", KEYS_ALONE
        except LOST:
            pass  # refused
        banner: Any = (transport.auth_handler and transport.auth_handler.banner) or b""
        note = f"it says: {bounded(' '.join(banner.decode(errors='replace').split()))}"
        notes += [note] if banner and note not in notes else []
        if transport.is_active() or keys[0] is first_key:  # else this key comes first next time
            keys.pop(0)
        if keys and not transport.is_active():
            return False
    if violation := transport.packetizer.violation:
        raise _violation_error(node.name, violation)
    if deadline.has_passed:
        problem = f"did not finish authentication within {deadline.seconds:g} s"
        raise _unreachable(node, problem, "the machine may be overloaded: check its console")
    problem = "; ".join([f"{node.address} port {node.port} {problem}", *notes])
    raise errors.AuthenticationError(problem, node=node.name, remedy=remedy)


def connect(
    node: Node, known_hosts: JumpHosts | Iterable[Path], *, connect_deadline_s: float = 10.0
) -> "SshSession":
    """Open a session. Raises UnreachableError, HostKeyError or AuthenticationError within the deadline."""
    jumps = known_hosts if isinstance(known_hosts, JumpHosts) else JumpHosts(KnownHosts.load(known_hosts))
    return SshSession(node, open_transport(node, Deadline(connect_deadline_s), jumps))


class SshSession(Session):
    """The session of a node, over one SSH connection."""

    def __init__(self, node: Node, transport: StrictTransport) -> None:
        key = fingerprint(transport.get_remote_server_key().asbytes())
        super().__init__(node.name, transport.packetizer.meter, key, Setting(dict(node.env), node.state))
        self.transport = transport

    def close(self) -> None:
        """End running commands on the node and close the connection."""
        super().close()
        self.transport.close()

    def _start_process(self, wrapped: WrappedCommand, deadline: Deadline) -> "_ChannelProcess":
        return _ChannelProcess(_open_channel(self.transport, wrapped.command_line, deadline))


class _ChannelProcess:
    """A command on an SSH channel, without polling: hence attributes that paramiko does not document."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._transport: Any = channel.get_transport()
        self._channel = channel
        self._channel.settimeout(0.5)  # applies to sending only
        self._has_stdout, self._has_stderr = threading.Event(), threading.Event()
        channel.in_buffer.set_event(self._has_stdout)
        channel.in_stderr_buffer.set_event(self._has_stderr)

    def read_stdout(self, timeout_s: float) -> bytes:
        if not self._has_stdout.wait(timeout_s):
            raise TimeoutError
        return _receive(self._channel.recv)

    def read_stderr(self) -> bytes:
        self._has_stderr.wait()
        return _receive(self._channel.recv_stderr)

    def write_stdin(self, data: bytes, timeout_s: float) -> None:
        deadline, unsent = Deadline(timeout_s), data
        while unsent:
            try:
                num_sent = self._channel.send(unsent)
            except TimeoutError:
                if deadline.has_passed:
                    raise
                continue
            except (paramiko.SSHException, EOFError):  # what paramiko raises for a lost connection
                raise BrokenPipeError("the connection is closed") from None
            if num_sent == 0:
                raise BrokenPipeError("the channel is closed")
            unsent = unsent[num_sent:]

    def close_stdin(self) -> None:
        with contextlib.suppress(*LOST):
            self._channel.shutdown_write()

    def exit_code(self, timeout_s: float) -> int:
        if not self._channel.status_event.wait(timeout_s):
            raise TimeoutError
        code = self._channel.exit_status
        if code >= 0:
            return min(code, 255)
        # No code: a signal ended the command, or the connection is being lost, and then its thread ends.
        self._transport.join(0.5)
        if self._transport.is_active():
            return 255
        raise lost_connection_error(self._transport, " while a command ran")

    def kill_group(self, group: int) -> bool:
        deadline = Deadline(KILL_DEADLINE_S)
        try:
            kill = build_kill_command(group)
            channel = _open_channel(self._transport, kill.command_line, deadline)
        except errors.CsdctlError:
            return False
        try:
            channel.sendall(kill.script)
            return channel.status_event.wait(deadline.left_s) and channel.exit_status == 0
        except LOST:
            return False
        finally:
            _close(channel)

    def release(self) -> None:
        _close(self._channel)


def _receive(receive: Callable[[int], bytes]) -> bytes:
    try:
        return receive(1 << 16)
    except TimeoutError:  # another thread has taken what was there
        raise
    except LOST:  # `exit_code` reports it
        return b""


def _open_channel(transport: StrictTransport, command_line: str, deadline: Deadline) -> paramiko.Channel:
    channel = None
    try:
        channel = transport.open_session(timeout=max(0.1, deadline.left_s))
        request_exec(channel, command_line.encode(), max(0.1, deadline.left_s))
        return channel
    except (errors.CsdctlError, *LOST) as error:
        if channel:
            _close(channel)
        if not transport.is_active():
            raise lost_connection_error(transport) from None
        if deadline.left_s < 0.1:
            problem = f"the SSH server did not start a command within {deadline.seconds:g} s"
            raise errors.DeadlineError(problem, node=transport.node) from None
        step = "does not start commands" if channel else "does not open more channels"
        problem = f"the SSH server {step} ({bounded(getattr(error, 'message', error))})"
        remedy = "check MaxSessions and ForceCommand in its sshd_config"
        raise errors.RemoteCommandError(problem, node=transport.node, remedy=remedy) from None


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(*LOST):
        channel.close()
