"""Notifications of the seccomp filter: who made which call, its memory and sockets, and the answer."""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from csdctl.worker.sandbox.addresses import Refused
from csdctl.worker.sandbox.system_calls import system_call

_RECEIVE, _SEND, _IS_VALID, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103
"""SECCOMP_IOCTL_NOTIF_*."""
_NOTIFICATION, _ANSWER, _DESCRIPTOR = (
    struct.Struct("=QIIiIQ6Q"),
    struct.Struct("=QqiI"),
    struct.Struct("=QIIII"),
)
_CONTINUE = 1
_PIDFD_GETFD = 438


@dataclass(frozen=True)
class Notification:
    """A system call that waits for an answer; `listener` is the filter's descriptor."""

    listener: int
    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]

    @property
    def is_waiting(self) -> bool:
        """Whether the caller still waits: killed, its number may be given to another process."""
        try:
            fcntl.ioctl(self.listener, _IS_VALID, struct.pack("=Q", self.id))
        except OSError:
            return False
        return True

    def let_continue(self) -> None:
        """Let the kernel perform the call; only for calls whose arguments are all numbers."""
        self._send(0, 0, _CONTINUE)

    def answer(self, result: int = 0, *, error: int = 0) -> None:
        """Return `result`, or fail with an error number."""
        self._send(result, -error, 0)

    def answer_with(self, descriptor: int, *, is_inherited: bool) -> None:
        """Return a copy of `descriptor`; raises OSError."""
        flags = 0 if is_inherited else os.O_CLOEXEC
        request = bytearray(_DESCRIPTOR.pack(self.id, 0, descriptor, 0, flags))
        self.answer(fcntl.ioctl(self.listener, _ADD_DESCRIPTOR, request))

    def _send(self, result: int, error: int, flags: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(self.id, result, error, flags))


def receive_notification(listener: int) -> Notification | None:
    """Return the next notification; None when its caller was killed."""
    content = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, content)
    except OSError:
        return None
    number_in_filter, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(content)
    return Notification(listener, number_in_filter, thread, number, tuple(arguments))


class Caller:
    """The process that made a call. Close it."""

    def __init__(self, notification: Notification) -> None:
        """Raises Refused when the process has ended."""
        try:
            self.process = process_of_thread(notification.thread)
            self._pidfd = os.pidfd_open(self.process)
        except OSError:
            raise Refused(errno.EINTR) from None
        try:
            self._memory = os.open(f"/proc/{notification.thread}/mem", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            os.close(self._pidfd)
            raise Refused(errno.EPERM) from None
        if not notification.is_waiting:
            self.close()
            raise Refused(errno.EINTR)

    def close(self) -> None:
        """Close its memory."""
        os.close(self._pidfd)
        os.close(self._memory)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of its memory; raises OSError."""
        return os.pread(self._memory, size, address)

    def write(self, address: int, content: bytes) -> None:
        """Write bytes to its memory; raises OSError."""
        os.pwrite(self._memory, content, address)

    def socket(self, descriptor: int) -> socket.socket:
        """Return its socket: the same one, not a copy, and not what the descriptor may stand for later."""
        arguments = ctypes.c_int(self._pidfd), ctypes.c_int(descriptor & 0xFFFFFFFF), ctypes.c_uint(0)
        found = system_call(_PIDFD_GETFD, *arguments)
        try:
            return socket.socket(fileno=found)
        except OSError:
            os.close(found)
            raise Refused(errno.ENOTSOCK) from None


def process_of_thread(thread: int) -> int:
    """Return the process of a thread; raises OSError when it has ended."""
    with open(f"/proc/{thread}/status") as file:
        for line in file:
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, "no such thread")
