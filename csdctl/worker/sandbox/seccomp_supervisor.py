"""The seccomp supervisor performs the calls that the filter hands over, or counts and allows them.

It acts on the sandbox's own sockets, through pidfd_getfd(2), so that another thread of the sandbox cannot
change an argument after its check. Packets that do not come from the peer are dropped, if the kernel lets
this user filter them. A connection is reported when its token has arrived (TCP_DEFER_ACCEPT).
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from csdctl.worker.protocol.processes import duplicate_descriptor, is_of_user, list_descendants, load_all
from csdctl.worker.protocol.sandbox import NO_CONNECTION
from csdctl.worker.sandbox.seccomp_filter import FilterProgram, Instruction, number_of

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_SO_ATTACH_FILTER, _SO_LOCK_FILTER = 26, 44
_IP_HEADER = 0xFFF00000
"""SKF_NET_OFF: offsets of a socket filter from here on count from the IP header."""
_SOURCE = {4: 12, 6: 8}
"""Offset of the source address in the header, by version of IP."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _AND, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x54, 0x15, 0x06
_LISTENING = "0A"
_CONTINUE = 1
MIN_PORT = 1024
"""Lower ports are services of the machines, never MPI's."""
MAX_TASKS, MAX_FILES, MAX_CONNECTIONS = 128, 128, 512
"""Threads and processes, files and directories, bound and accepted sockets, of one sandbox from start to end.

A link starts about 10 tasks, makes about 20 files and directories, and has about 10 connections.
"""
NUM_THREADS = 4
"""Calls that are answered at once. A sandbox that makes all of them wait waits itself."""
MAX_STRANGERS = 64
"""Connections of strangers that one call closes. It then reports that nobody is there, and the kernel wakes
the sandbox again."""
CONNECT_S = 3.0
DEFER_S, TOKEN_S = 5, 0.2
"""For so long, the kernel waits for a token. Where it cannot (SYN cookies), the supervisor does."""
NONCE_BYTES, TOKEN_BYTES = 16, 32
_INET = (socket.AF_INET, socket.AF_INET6)
_MAX_ADDRESS_BYTES = 128
_NEW_NAMESPACES = 0x7E020000
_RECEIVE, _SEND, _IS_VALID, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103
"""Requests of ioctl to the filter's descriptor."""
_NOTIFICATION, _ANSWER, _DESCRIPTOR = map(struct.Struct, ("=QIIiIQ6Q", "=QqiI", "=QIIII"))


def refusal(number: int) -> OSError:
    """Return the error with which a call fails."""
    return OSError(number, os.strerror(number))


def to_ip(host: str) -> IpAddress:
    """Return the address of a socket. An IPv4 address that is mapped to IPv6 is returned as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def unpack_address(content: bytes) -> tuple[Any, ...]:
    """Return a `struct sockaddr_in` or `sockaddr_in6` as an address of the socket module. Raises OSError."""
    if len(content) >= 8:
        (family,) = struct.unpack_from("=H", content)
        if family == socket.AF_INET:
            (port,) = struct.unpack_from(">H", content, 2)
            return socket.inet_ntop(family, content[4:8]), port
        if family == socket.AF_INET6 and len(content) >= 24:
            port, flow = struct.unpack_from(">HI", content, 2)
            scope = struct.unpack_from("=I", content, 24)[0] if len(content) >= 28 else 0
            return socket.inet_ntop(family, content[8:24]), port, flow, scope
    raise refusal(errno.EAFNOSUPPORT)


def pack_address(family: int, address: tuple[Any, ...]) -> bytes:
    """Return a peer's address as the kernel writes it."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack(">H4s8x", address[1], packed)
    head = struct.pack("=H", family) + struct.pack(">HI16s", address[1], address[2], packed)
    return head + struct.pack("=I", address[3])


def is_here(address: IpAddress) -> bool:
    """Return whether `address` is one of this machine."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as bound, contextlib.suppress(OSError):
        bound.bind((str(address), 0))
        return True
    return False


def list_listeners(port: int) -> Iterator[tuple[IpAddress, int]]:
    """Yield address and inode of each TCP socket of this machine that listens at `port`."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            next(file)
            for line in file:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state != _LISTENING:
                    break  # listening sockets come first
                host, _, local_port = local.partition(":")
                if int(local_port, 16) == port:
                    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                    packed = struct.pack(f"={len(words)}I", *words)
                    yield to_ip(str(ipaddress.ip_address(packed))), int(inode)


def _attach_filter(bound: socket.socket, networks: Sequence[IpNetwork]) -> None:
    program = FilterProgram(build_source_filter(networks))
    bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program.header)
    bound.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


def build_source_filter(networks: Sequence[IpNetwork]) -> list[Instruction]:
    """Return a socket filter that keeps the packets that come from `networks`."""
    code: list[Instruction] = []
    for network in networks:
        words = struct.unpack(f">{network.max_prefixlen // 32}I", network.network_address.packed)
        masks = struct.unpack(f">{len(words)}I", network.netmask.packed)
        code += [(_LOAD_BYTE, 0, 0, _IP_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
        code.append((_IF_EQUAL, 0, 3 * len(words) + 1, network.version))
        for number, (word, mask) in enumerate(zip(words, masks, strict=True)):
            to_next_network = 3 * (len(words) - number - 1) + 1
            code += [
                (_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE[network.version] + 4 * number),
                (_AND, 0, 0, mask),
                (_IF_EQUAL, 0, to_next_network, word),
            ]
        code.append((_RETURN, 0, 0, 0xFFFFFFFF))
    return [*code, (_RETURN, 0, 0, 0)]


class Tokens:
    """The tokens of one link: random bytes, and their HMAC with the address that was connected to."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seen: set[bytes] = set()

    def make(self, address: tuple[Any, ...]) -> bytes:
        """Return a token for a connection to `address`."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._sign(nonce, address)

    def is_valid(self, token: bytes, address: tuple[Any, ...]) -> bool:
        """Return whether the peer has made `token` to connect to `address`. A token is valid once.

        So an observer of the network can use it neither here nor at another port or machine.
        """
        nonce = token[:NONCE_BYTES]
        if not hmac.compare_digest(token[NONCE_BYTES:], self._sign(nonce, address)):
            return False
        num_seen = len(self._seen)
        self._seen.add(nonce)
        return num_seen < len(self._seen) <= MAX_CONNECTIONS

    def _sign(self, nonce: bytes, address: tuple[Any, ...]) -> bytes:
        place = to_ip(address[0]).packed + address[1].to_bytes(2, "big")
        return hmac.digest(self._key, nonce + place, hashlib.sha256)[: TOKEN_BYTES - NONCE_BYTES]


class SystemCall:
    """A system call that waits for an answer. While `opened`, its caller can be read and written."""

    def __init__(self, listener: int) -> None:
        """Receive the next call from the filter's descriptor. Raises OSError when its caller was killed."""
        content = bytearray(_NOTIFICATION.size)
        fcntl.ioctl(listener, _RECEIVE, content)
        self._listener = listener
        self._id, self._thread, _, self.number, _, _, *self.arguments = _NOTIFICATION.unpack(content)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open the process and the memory of the caller. Raises OSError when it has ended."""
        self.process = process_of_thread(self._thread)
        with contextlib.ExitStack() as descriptors:
            self._pidfd = os.pidfd_open(self.process)
            descriptors.callback(os.close, self._pidfd)
            self._memory = os.open(f"/proc/{self._thread}/mem", os.O_RDWR | os.O_CLOEXEC)
            descriptors.callback(os.close, self._memory)
            # A caller that was killed: its number may have been given to another process.
            fcntl.ioctl(self._listener, _IS_VALID, struct.pack("=Q", self._id))
            yield

    def let_continue(self) -> None:
        """Let the kernel perform the call. Only where no memory was read for the decision."""
        self._send(0, 0, _CONTINUE)

    def answer(self, result: int = 0, *, error: int = 0) -> None:
        """Return `result`, or fail with an error number."""
        self._send(result, -error, 0)

    def answer_with(self, descriptor: int, *, is_inherited: bool) -> None:
        """Return a copy of `descriptor`. Raises OSError."""
        flags = 0 if is_inherited else os.O_CLOEXEC
        request = bytearray(_DESCRIPTOR.pack(self._id, 0, descriptor, 0, flags))
        self.answer(fcntl.ioctl(self._listener, _ADD_DESCRIPTOR, request))

    def _send(self, result: int, error: int, flags: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _SEND, _ANSWER.pack(self._id, result, error, flags))

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of the caller's memory. Raises OSError."""
        return os.pread(self._memory, size, address)

    def write(self, address: int, content: bytes) -> None:
        """Write bytes to the caller's memory. Raises OSError."""
        os.pwrite(self._memory, content, address)

    def socket(self) -> socket.socket:
        """Return the caller's socket that is the first argument. Raises OSError.

        It is the same open socket, whatever the caller does with its descriptor later.
        """
        descriptor = duplicate_descriptor(self._pidfd, self.arguments[0] & 0xFFFFFFFF)
        try:
            return socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise refusal(errno.ENOTSOCK) from None


def process_of_thread(thread: int) -> int:
    """Return the process of a thread. Raises OSError when it has ended."""
    with open(f"/proc/{thread}/status") as file:
        for line in file:
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, "no such thread")


class SeccompSupervisor:
    """Answers the notifications of one filter."""

    def __init__(self, listener: int, key: str, peers: Sequence[str], sockets: Sequence[str]) -> None:
        self._listener = listener
        self._peers = [ipaddress.ip_network(peer) for peer in peers]
        self._tokens = Tokens(bytes.fromhex(key)) if key else None
        self._sockets = {b"\0" + name.encode() for name in sockets}
        self._bound: set[int] = set()
        """Inodes of TCP sockets that the sandbox has bound."""
        self._num_tasks = self._num_files = 0
        answers: dict[Callable[[SystemCall], None], tuple[str, ...]] = {
            self._socket: ("socket",),
            self._bind: ("bind",),
            self._connect: ("connect",),
            self._accept: ("accept", "accept4"),
            self._kill: ("kill", "tgkill"),
            self._start_task: ("clone", "fork", "vfork"),
            self._make_file: ("mkdir", "mkdirat", "open", "openat"),
        }
        self._answers = {number_of(name): answer for answer, names in answers.items() for name in names}

    def start(self) -> None:
        """Answer all calls from now on, in several threads, as some calls take time."""
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while any(event & select.POLLIN for _, event in poll.poll()):  # else all with the filter have ended
            with contextlib.suppress(OSError):  # the caller was killed
                self._answer(SystemCall(self._listener))

    def _answer(self, call: SystemCall) -> None:
        try:
            with call.opened():
                self._answers[call.number](call)
        except OSError as error:
            call.answer(error=error.errno or errno.EIO)
        except Exception:
            call.answer(error=errno.EINVAL)

    def _start_task(self, call: SystemCall) -> None:
        if call.number == number_of("clone") and call.arguments[0] & _NEW_NAMESPACES:
            raise refusal(errno.EPERM)
        self._num_tasks += 1
        if self._num_tasks > MAX_TASKS:
            raise refusal(errno.EAGAIN)
        call.let_continue()

    def _make_file(self, call: SystemCall) -> None:
        self._num_files += 1
        if self._num_files > MAX_FILES:
            raise refusal(errno.EDQUOT)
        call.let_continue()

    def _socket(self, call: SystemCall) -> None:
        family, kind, protocol = (argument & 0xFFFFFFFF for argument in call.arguments[:3])
        is_stream = kind & 0xF == socket.SOCK_STREAM
        if family in _INET and kind & 0xF == socket.SOCK_DGRAM:
            # Libraries ask such a socket for the machine's interfaces; it could also send to anyone.
            with socket.socket(family, socket.SOCK_STREAM) as instead:
                call.answer_with(instead.fileno(), is_inherited=not kind & socket.SOCK_CLOEXEC)
        elif is_stream and (family == socket.AF_UNIX or (family in _INET and protocol in (0, 6))):
            call.let_continue()
        else:
            raise refusal(errno.EAFNOSUPPORT)

    def _bind(self, call: SystemCall) -> None:
        _, address, size = call.arguments[:3]
        with call.socket() as bound:
            if bound.family not in _INET:
                raise refusal(errno.EACCES)
            self._bind_port(bound, unpack_address(call.read(address, min(size, _MAX_ADDRESS_BYTES))))
        call.answer()

    def _bind_port(self, bound: socket.socket, address: tuple[Any, ...]) -> None:
        if 0 < address[1] < MIN_PORT:
            raise refusal(errno.EACCES)
        if len(self._bound) >= MAX_CONNECTIONS:
            raise refusal(errno.ENOBUFS)
        if self._tokens:
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)
        bound.bind(address)
        if not to_ip(address[0]).is_loopback and all(peer.prefixlen for peer in self._peers):
            with contextlib.suppress(PermissionError):
                _attach_filter(bound, self._peers)
        self._bound.add(os.fstat(bound.fileno()).st_ino)

    def _connect(self, call: SystemCall) -> None:
        _, address, size = call.arguments[:3]
        content = call.read(address, min(size, _MAX_ADDRESS_BYTES))
        with call.socket() as connecting:
            if connecting.family == socket.AF_UNIX:
                self._connect_to_socket(connecting, content[2:])
            elif connecting.family in _INET:
                self._connect_to_peer(connecting, content)
            else:
                raise refusal(errno.EACCES)
        call.answer()

    def _connect_to_socket(self, connecting: socket.socket, name: bytes) -> None:
        if name not in self._sockets:
            raise refusal(errno.ECONNREFUSED)
        connecting.connect(name)
        if not is_of_user(connecting, os.getuid()):  # abstract names belong to whoever binds them first
            connecting.shutdown(socket.SHUT_RDWR)
            raise refusal(errno.ECONNREFUSED)

    def _connect_to_peer(self, connecting: socket.socket, content: bytes) -> None:
        address = unpack_address(content)
        ip, port = to_ip(address[0]), address[1]
        if port < MIN_PORT or not (self._is_peer(ip) or self._is_own(ip, port)):
            raise refusal(errno.ECONNREFUSED)
        # The mode is one of the socket, which is the caller's: it is restored.
        is_blocking = os.get_blocking(connecting.fileno())
        connecting.settimeout(CONNECT_S)
        try:
            connecting.connect(address)
            if self._tokens:
                connecting.sendall(self._tokens.make(connecting.getpeername()))
        except OSError as error:
            number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or errno.EIO
            # csdctl shows it as the cause of a link that does not connect.
            message = f"{NO_CONNECTION}{address[0]} port {port}: {os.strerror(number)}"
            print(message, file=sys.stderr, flush=True)
            raise refusal(number) from None
        finally:
            os.set_blocking(connecting.fileno(), is_blocking)

    def _is_peer(self, ip: IpAddress) -> bool:
        """Whether peers may have this address. This machine's addresses must be named as a peer's."""
        peers = [peer for peer in self._peers if ip.version == peer.version and ip in peer]
        if ip.is_unspecified or is_here(ip):
            return any(peer.is_loopback or peer.num_addresses == 1 for peer in peers)
        return bool(peers)

    def _is_own(self, ip: IpAddress, port: int) -> bool:
        """Whether only sockets of the sandbox listen at `ip` and `port`."""
        inodes = {inode for host, inode in list_listeners(port) if host.is_unspecified or host == ip}
        return bool(inodes) and inodes <= self._bound

    def _accept(self, call: SystemCall) -> None:
        _, address, size = call.arguments[:3]
        flags = call.arguments[3] if call.number == number_of("accept4") else 0
        with call.socket() as listening:
            accepted, peer = self._accept_peer(listening)
        with accepted:
            if address:
                packed = pack_address(accepted.family, peer)
                (space,) = struct.unpack("=I", call.read(size, 4))
                call.write(address, packed[:space])
                call.write(size, struct.pack("=I", len(packed)))
            os.set_blocking(accepted.fileno(), not flags & socket.SOCK_NONBLOCK)
            call.answer_with(accepted.fileno(), is_inherited=not flags & socket.SOCK_CLOEXEC)

    def _accept_peer(self, listening: socket.socket) -> tuple[socket.socket, Any]:
        """Return the next connection of the peer. Waits if the socket is blocking. Raises OSError."""
        for _ in range(MAX_STRANGERS):
            accepted, peer = listening.accept()
            ip, token = to_ip(peer[0]), b""
            if ip.is_loopback or self._is_peer(ip):
                if not self._tokens:
                    return accepted, peer
                with contextlib.suppress(OSError):
                    accepted.settimeout(TOKEN_S)
                    token = accepted.recv(TOKEN_BYTES)
                if self._tokens.is_valid(token, accepted.getsockname()):
                    return accepted, peer
            accepted.close()
        raise refusal(errno.EAGAIN)

    def _kill(self, call: SystemCall) -> None:
        """Allow a signal to processes of the sandbox: to one, or to all of a group."""
        target = ctypes.c_int32(call.arguments[0] & 0xFFFFFFFF).value
        if target == 0:
            target = -os.getpgid(call.process)
        targets = [target] if target > 0 else [pid for pid, at in load_all().items() if at.group == -target]
        if target == -1 or not set(targets) <= set(list_descendants()):
            raise refusal(errno.EPERM)
        call.let_continue()
