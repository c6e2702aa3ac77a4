"""The seccomp supervisor: it performs the system calls that the filter hands over.

The sandbox's sockets stay its own; the supervisor acts on the same sockets, through pidfd_getfd(2), so that
another thread of the sandbox cannot change what was checked.
"""

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from csdctl.worker.protocol.processes import duplicate_descriptor
from csdctl.worker.sandbox.arrivals import (
    TOKEN_S,
    Arrivals,
    Tokens,
    close_to_others,
    narrow,
    pack_address,
    refusal,
    to_ip,
    unpack_address,
)
from csdctl.worker.sandbox.system_calls import ASKED, list_descendants, list_group, number_of

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


CONNECT_S = 10.0
"""To connect to a peer."""
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
            close_to_others(bound, self._peers)
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
        connecting.settimeout(CONNECT_S)
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
        targets = [target] if target > 0 else list_group(-target)
        if target == -1 or not set(targets) <= set(list_descendants()):
            raise refusal(errno.EPERM)
        call.let_continue()

    def _kill_thread(self, call: Call) -> None:
        if process_of_thread(call.arguments[0] & 0xFFFFFFFF) not in list_descendants():
            raise refusal(errno.EPERM)
        call.let_continue()
