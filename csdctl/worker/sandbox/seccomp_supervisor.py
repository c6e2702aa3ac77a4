"""The filter of system calls, and the seccomp supervisor, which performs those that the filter hands over.

The sandbox's sockets stay its own; the supervisor acts on the same sockets, through pidfd_getfd(2), so that
another thread of the sandbox cannot change what was checked.

Members of the group may connect to the sandbox, everybody else is closed. Nothing that a stranger sends, or
does not send, makes a member wait. The kernel reports a connection when its token has arrived
(TCP_DEFER_ACCEPT), so a token is never waited for in `accept`. Only when very many connections are half open,
the kernel reports all of them at once (SYN cookies): then a thread waits for the token, and wakes the sandbox
by a connection of its own.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import itertools
import os
import platform
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from csdctl.worker.protocol.processes import duplicate_descriptor, list_descendants, load_all, system_call

MACHINE = platform.machine()
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the architectures whose calls are listed here."""

NUMBERS = {
    # name: (x86_64, aarch64), from the kernel's tables; None where an architecture lacks the call
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "accept4": (288, 242),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269), "clone": (56, 220),
    "prlimit64": (302, 261), "clone3": (435, 435),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "truncate": (76, 45),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "lchown": (94, None),
    "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "io_uring_setup": (425, 425),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "fchmodat2": (452, 452),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "open_tree_attr": (467, 467),
    "file_setattr": (469, 469),
}  # fmt: skip
"""The calls that the filter decides about; all others are allowed. Landlock does not cover changes of modes,
owners, times and attributes, so they are refused."""

ASKED = ("socket", "connect", "accept", "accept4", "bind", "kill", "tkill", "tgkill")
"""Handed to the process outside of the sandbox."""
_X32 = 0x40000000

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
_SECCOMP = (317, 277)
_FILTER_MODE, _NEW_LISTENER = 1, 8
_ALLOW, _ASK, _REFUSE, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_LOAD, _RETURN, _IF_EQUAL, _IF_SET, _IF_GREATER_OR_EQUAL = 0x20, 0x06, 0x15, 0x45, 0x35
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data."""

Instruction = tuple[int, int, int, int]
"""An instruction of classic BPF: code, jump if true, jump if false, value."""

_CONDITIONS: dict[str, tuple[int, Instruction]] = {
    # MSG_FASTOPEN connects without `connect`.
    "sendto": (3, (_IF_SET, 0, 1, 0x20000000)),
    "sendmsg": (2, (_IF_SET, 0, 1, 0x20000000)),
    "sendmmsg": (3, (_IF_SET, 0, 1, 0x20000000)),
    "clone": (0, (_IF_SET, 0, 1, 0x7E020000)),  # CLONE_NEW*
    "prlimit64": (0, (_IF_EQUAL, 1, 0, 0)),  # another process
}
"""The argument that decides whether a call is refused, and the jump over the refusal."""


def number_of(name: str) -> int | None:
    """Return the number of a system call on this machine; None when it has no such call."""
    return NUMBERS[name][MACHINE != "x86_64"]


def install_filter() -> int:
    """Filter the calls of this process and its children, for good; return the descriptor for notifications.

    Raises OSError where the kernel or a container does not allow it.
    """
    program = Program(build_filter())
    number = _SECCOMP[MACHINE != "x86_64"]
    return system_call(number, ctypes.c_uint(_FILTER_MODE), ctypes.c_uint(_NEW_LISTENER), program.header)


class Program:
    """A BPF program as `struct sock_fprog`: keep it until the kernel has read `header`."""

    def __init__(self, code: list[Instruction]) -> None:
        packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self.header = struct.pack("@HP", len(code), ctypes.addressof(self._buffer))


def build_filter() -> list[Instruction]:
    """Return the filter: what a number and an argument do not decide is asked."""
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, ARCHITECTURES[MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_GREATER_OR_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for name in NUMBERS:
        number = number_of(name)
        if number is None:
            continue
        rules = _build_rules(name)
        code += [(_IF_EQUAL, 0, len(rules), number), *rules]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _build_rules(name: str) -> list[Instruction]:
    """Return what decides about one call."""
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    if name in _CONDITIONS:
        argument, condition = _CONDITIONS[name]
        load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
        return [load, condition, refuse, (_RETURN, 0, 0, _ALLOW)]
    if name in ASKED:
        return [(_RETURN, 0, 0, _ASK)]
    # The C library falls back from clone3, whose flags a filter cannot read, to clone.
    return [(_RETURN, 0, 0, _REFUSE | errno.ENOSYS) if name == "clone3" else refuse]


IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_SO_ATTACH_FILTER, _SO_LOCK_FILTER = 26, 44
_IP_HEADER = 0xFFF00000
"""SKF_NET_OFF: offsets of a socket filter from here on count from the IP header."""
_SOURCE = {4: 12, 6: 8}
"""Offset of the source address in the header, by version of IP."""
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _AND = 0x30, 0x20, 0x74, 0x54


def refusal(number: int) -> OSError:
    """Return the error with which a call fails."""
    return OSError(number, os.strerror(number))


def to_ip(host: str) -> IpAddress:
    """Return the address of a socket; an IPv4 address written as one of IPv6 is one of IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def unpack_address(content: bytes) -> tuple[Any, ...]:
    """Return a `struct sockaddr_in` or `sockaddr_in6` as the socket module wants it; raises OSError."""
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


def list_own_addresses() -> list[IpAddress]:
    """Return the addresses of this machine's interfaces."""
    found: list[IpAddress] = []
    address = ""
    with contextlib.suppress(OSError), open("/proc/net/fib_trie") as tree:
        for line in tree:
            if line.lstrip().startswith("|--"):
                address = line.split()[1]
            elif "/32 host LOCAL" in line:
                found.append(ipaddress.IPv4Address(address))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        found += [ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in table]
    return list(dict.fromkeys(found))


def narrow(host: str, networks: Sequence[IpNetwork]) -> str:
    """Return the address to listen at instead of all addresses: this machine's only one in `networks`.

    A socket of the other version of IP listens at the loopback. Several addresses: `host` itself.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if not address.is_unspecified or not all(network.prefixlen for network in networks):
        return host
    same = [network for network in networks if network.version == address.version]
    if not same:
        return "127.0.0.1" if address.version == 4 else "::1"
    own = [one for one in list_own_addresses() if any(one in network for network in same)]
    return str(own[0]) if len(own) == 1 else host


def _attach_filter(bound: socket.socket, networks: Sequence[IpNetwork]) -> None:
    """Let the kernel drop packets from outside of `networks`: for others, the port does not exist.

    Raises PermissionError.
    """
    program = Program(build_source_filter(networks))
    bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program.header)
    bound.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


def why_open(networks: Sequence[IpNetwork]) -> str:
    """Return why ports would answer at addresses outside of `networks` too; '' when they are closed there."""
    if not all(network.prefixlen for network in networks):
        return "any network may connect"
    if all(narrow(host, networks) != host for host in ("0.0.0.0", "::")):
        return ""
    try:
        with socket.socket() as bound:
            _attach_filter(bound, networks)
    except PermissionError:
        return "several addresses are in the network, and only root can filter sockets on this kernel"
    return ""


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


TOKEN_S = 2.0
"""The time for the token of a connection, from when the peer connected."""
MAX_STRANGERS = 64
"""Closed in one call, which then reports that nobody is there; the kernel wakes the sandbox again."""
MAX_LATE = 256
"""Connections whose token is waited for; the oldest has to go."""
_RING_S = 1.0
_NONCE_BYTES, TOKEN_BYTES = 16, 32

Peer = tuple[socket.socket, Any]
"""A connection, and the address that it comes from."""


class Tokens:
    """The tokens of one run: random bytes, and their HMAC with the address that was connected to."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()

    def make(self, address: tuple[Any, ...]) -> bytes:
        """Return a token for a connection to `address`."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._sign(nonce, address)

    def is_valid(self, token: bytes, address: tuple[Any, ...]) -> bool:
        """Return whether a member has made `token` to connect to `address`; a token is valid once.

        So who has watched the network can use it neither here nor at another port or machine.
        """
        nonce = token[:_NONCE_BYTES]
        if not hmac.compare_digest(token[_NONCE_BYTES:], self._sign(nonce, address)):
            return False
        with self._lock:
            is_new = nonce not in self._seen
            self._seen.add(nonce)
        return is_new

    def _sign(self, nonce: bytes, address: tuple[Any, ...]) -> bytes:
        place = to_ip(address[0]).packed + address[1].to_bytes(2, "big")
        return hmac.digest(self._key, nonce + place, hashlib.sha256)[: TOKEN_BYTES - _NONCE_BYTES]


class Arrivals:
    """Accepts for the sandbox's listening sockets."""

    def __init__(self, tokens: Tokens, peers: Sequence[IpNetwork]) -> None:
        self._tokens = tokens
        self._peers = peers
        self._late: dict[tuple[Any, ...], deque[Peer]] = {}
        """Members whose token came late, by the address that they connected to."""
        self._waiting: deque[socket.socket] = deque()

    def accept(self, listening: socket.socket) -> Peer:
        """Return the next member's connection; raises OSError. It waits if the socket is set to."""
        late = self._late.setdefault(listening.getsockname(), deque())
        for number in itertools.count(1):
            with contextlib.suppress(IndexError):
                return late.popleft()
            if number > MAX_STRANGERS and not os.get_blocking(listening.fileno()):
                break
            accepted, peer = listening.accept()
            try:
                token = accepted.recv(TOKEN_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                arguments = accepted, peer, late, listening.getsockname()
                threading.Thread(target=self._await_token, args=arguments, daemon=True).start()
                continue
            except OSError:
                token = b""
            if self._tokens.is_valid(token, accepted.getsockname()):
                return accepted, peer
            accepted.close()
        raise BlockingIOError(errno.EAGAIN, "only strangers have connected")

    def _await_token(
        self, accepted: socket.socket, peer: Any, late: deque[Peer], listening: tuple[Any, ...]
    ) -> None:
        self._waiting.append(accepted)
        if len(self._waiting) > MAX_LATE:
            with contextlib.suppress(OSError, IndexError):
                self._waiting.popleft().shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        token = b""
        with contextlib.suppress(OSError):
            accepted.settimeout(TOKEN_S)
            token = accepted.recv(TOKEN_BYTES)
        with contextlib.suppress(ValueError):
            self._waiting.remove(accepted)
        if self._tokens.is_valid(token, accepted.getsockname()):
            late.append((accepted, peer))
            self._ring(listening)
        else:
            accepted.close()

    def _ring(self, listening: tuple[Any, ...]) -> None:
        """Connect to the sandbox's port, so that it asks for connections again."""
        host, port, *_ = listening
        if to_ip(host).is_unspecified:
            version = ipaddress.ip_address(host).version
            own = [one for one in list_own_addresses() if one.version == version]
            peers = [peer for peer in self._peers if peer.version == version]
            # A filter may drop what comes from elsewhere (`_attach_filter`).
            host = str(next((one for one in own if any(one in peer for peer in peers)), own[0]))
        # A queue that is full wakes the sandbox too.
        with contextlib.suppress(OSError), socket.create_connection((host, port), _RING_S) as ringing:
            ringing.sendall(b"\0")


_RECEIVE, _SEND, _IS_VALID, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103
"""SECCOMP_IOCTL_NOTIF_*."""
_NOTIFICATION, _ANSWER, _DESCRIPTOR = (
    struct.Struct("=QIIiIQ6Q"),
    struct.Struct("=QqiI"),
    struct.Struct("=QIIII"),
)
_CONTINUE = 1


class Call:
    """A system call that waits for an answer; while `opened`, its caller can be read and written."""

    def __init__(self, listener: int) -> None:
        """Receive the next call from the filter's descriptor; raises OSError when its caller was killed."""
        content = bytearray(_NOTIFICATION.size)
        fcntl.ioctl(listener, _RECEIVE, content)
        self._listener = listener
        self._id, self._thread, _, self.number, _, _, *self.arguments = _NOTIFICATION.unpack(content)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open the process and the memory of the caller; raises OSError when it has ended."""
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
        """Let the kernel perform the call; only for calls whose arguments are all numbers."""
        self._send(0, 0, _CONTINUE)

    def answer(self, result: int = 0, *, error: int = 0) -> None:
        """Return `result`, or fail with an error number."""
        self._send(result, -error, 0)

    def answer_with(self, descriptor: int, *, is_inherited: bool) -> None:
        """Return a copy of `descriptor`; raises OSError."""
        flags = 0 if is_inherited else os.O_CLOEXEC
        request = bytearray(_DESCRIPTOR.pack(self._id, 0, descriptor, 0, flags))
        self.answer(fcntl.ioctl(self._listener, _ADD_DESCRIPTOR, request))

    def _send(self, result: int, error: int, flags: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _SEND, _ANSWER.pack(self._id, result, error, flags))

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of the caller's memory; raises OSError."""
        return os.pread(self._memory, size, address)

    def write(self, address: int, content: bytes) -> None:
        """Write bytes to the caller's memory; raises OSError."""
        os.pwrite(self._memory, content, address)

    def socket(self) -> socket.socket:
        """Return the caller's socket that is the first argument; raises OSError.

        It is the same one, not a copy, and not what the descriptor may stand for later.
        """
        found = duplicate_descriptor(self._pidfd, self.arguments[0] & 0xFFFFFFFF)
        try:
            return socket.socket(fileno=found)
        except OSError:
            os.close(found)
            raise refusal(errno.ENOTSOCK) from None


def process_of_thread(thread: int) -> int:
    """Return the process of a thread; raises OSError when it has ended."""
    with open(f"/proc/{thread}/status") as file:
        for line in file:
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, "no such thread")


MIN_PORT = 1024
"""Lower ports are services of the peers' machines, never MPI's."""
_INET = (socket.AF_INET, socket.AF_INET6)
_MAX_ADDRESS_BYTES = 128


class SeccompSupervisor:
    """Answers the notifications of one filter."""

    def __init__(self, listener: int, key: str, peers: Sequence[str], sockets: Sequence[str]) -> None:
        self._listener = listener
        self._peers = [ipaddress.ip_network(peer) for peer in peers]
        self._tokens = Tokens(bytes.fromhex(key)) if key else None
        self._arrivals = Arrivals(self._tokens, self._peers) if self._tokens else None
        self._sockets = {b"\0" + name.encode() for name in sockets}
        self._ports: set[int] = set()
        """Ports that the sandbox has bound."""
        answers: dict[str, Callable[[Call], None]] = {
            "socket": self._socket,
            "bind": self._bind,
            "connect": self._connect,
            "accept": self._accept,
            "accept4": self._accept,
            "kill": self._kill,
            "tkill": self._kill_thread,
            "tgkill": self._kill,
        }
        self._answers = {number_of(name): answers[name] for name in ASKED}

    def serve_one(self) -> None:
        """Answer the next notification, in a thread of its own as that may take time."""
        with contextlib.suppress(OSError):  # the caller was killed
            threading.Thread(target=self._serve, args=(Call(self._listener),), daemon=True).start()

    def _serve(self, call: Call) -> None:
        try:
            with call.opened():
                self._answers[call.number](call)
        except OSError as error:
            call.answer(error=error.errno or errno.EIO)
        except Exception:
            call.answer(error=errno.EINVAL)

    def _socket(self, call: Call) -> None:
        family, kind, protocol = (argument & 0xFFFFFFFF for argument in call.arguments[:3])
        is_stream = kind & 0xF == socket.SOCK_STREAM
        if family in _INET and kind & 0xF == socket.SOCK_DGRAM:
            # Libraries ask such a socket for the machine's interfaces; it could also send to anyone.
            with socket.socket(family, socket.SOCK_STREAM) as instead:
                call.answer_with(instead.fileno(), is_inherited=not kind & socket.SOCK_CLOEXEC)
        elif (
            (family in _INET and is_stream and protocol in (0, socket.IPPROTO_TCP))
            or (family == socket.AF_UNIX and is_stream)
            or (family == socket.AF_NETLINK and protocol == socket.NETLINK_ROUTE)
        ):
            call.let_continue()
        else:
            raise refusal(errno.EAFNOSUPPORT)

    def _bind(self, call: Call) -> None:
        _, address, size = call.arguments[:3]
        with call.socket() as bound:
            if bound.family == socket.AF_NETLINK:
                bound.bind((0, 0))
            elif bound.family in _INET:
                self._bind_port(bound, call.read(address, min(size, _MAX_ADDRESS_BYTES)))
            else:
                raise refusal(errno.EACCES)
        call.answer()

    def _bind_port(self, bound: socket.socket, content: bytes) -> None:
        host, *rest = unpack_address(content)
        host = narrow(host, self._peers)
        if self._tokens:  # the kernel then reports a connection when its token has arrived
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(TOKEN_S))
        bound.bind((host, *rest))
        if not to_ip(host).is_loopback and all(peer.prefixlen for peer in self._peers):
            with contextlib.suppress(PermissionError):  # the token alone keeps others out then
                _attach_filter(bound, self._peers)
        self._ports.add(bound.getsockname()[1])

    def _connect(self, call: Call) -> None:
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
        _, user, _ = struct.unpack("3i", connecting.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():  # abstract names belong to whoever binds them first
            connecting.shutdown(socket.SHUT_RDWR)
            raise refusal(errno.ECONNREFUSED)

    def _connect_to_peer(self, connecting: socket.socket, content: bytes) -> None:
        address = unpack_address(content)
        if not self._is_peer(address[0], address[1]):
            raise refusal(errno.ECONNREFUSED)
        # The mode is one of the socket, which is the caller's: it is restored.
        is_blocking = os.get_blocking(connecting.fileno())
        connecting.settimeout(10.0)
        try:
            connecting.connect(address)
            if self._tokens:
                connecting.sendall(self._tokens.make(connecting.getpeername()))
        except TimeoutError:
            raise refusal(errno.ETIMEDOUT) from None
        finally:
            os.set_blocking(connecting.fileno(), is_blocking)

    def _is_peer(self, host: str, port: int) -> bool:
        address = to_ip(host)
        if address.is_loopback and port in self._ports:
            return True
        found = [peer for peer in self._peers if address.version == peer.version and address in peer]
        if address.is_loopback or address.is_unspecified:  # services of this machine, unless peers are here
            found = [peer for peer in found if peer.is_loopback]
        return port >= MIN_PORT and bool(found)

    def _accept(self, call: Call) -> None:
        _, address, size = call.arguments[:3]
        flags = call.arguments[3] if call.number == number_of("accept4") else 0
        with call.socket() as listening:
            # As the listener is set: it waits, or raises BlockingIOError.
            accepted, peer = self._arrivals.accept(listening) if self._arrivals else listening.accept()
        with accepted:
            if address:
                packed = pack_address(accepted.family, peer)
                (space,) = struct.unpack("=I", call.read(size, 4))
                call.write(address, packed[:space])
                call.write(size, struct.pack("=I", len(packed)))
            os.set_blocking(accepted.fileno(), not flags & socket.SOCK_NONBLOCK)
            call.answer_with(accepted.fileno(), is_inherited=not flags & socket.SOCK_CLOEXEC)

    def _kill(self, call: Call) -> None:
        """Let a signal through to processes of the sandbox: one, or all of a group."""
        target = ctypes.c_int32(call.arguments[0] & 0xFFFFFFFF).value
        if target == 0:
            target = -os.getpgid(call.process)
        targets = [target] if target > 0 else [pid for pid, at in load_all().items() if at.group == -target]
        if target == -1 or not set(targets) <= set(list_descendants()):
            raise refusal(errno.EPERM)
        call.let_continue()

    def _kill_thread(self, call: Call) -> None:
        if process_of_thread(call.arguments[0] & 0xFFFFFFFF) not in list_descendants():
            raise refusal(errno.EPERM)
        call.let_continue()
