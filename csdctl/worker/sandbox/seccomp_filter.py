"""The filter of system calls: calls that a sandbox may use, and calls that the supervisor decides.

It lists the calls that are allowed. A call that a newer kernel adds fails with ENOSYS, as on an older kernel.
"""

import ctypes
import errno
import platform
import socket
import struct

from csdctl.worker.protocol.processes import system_call

MACHINE = platform.machine()
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the architectures whose calls are listed here."""

NUMBERS = {
    # name: (x86_64, aarch64), from the kernel's tables; None where an architecture lacks the call
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242),
    "bind": (49, 200), "kill": (62, 129), "tgkill": (234, 131), "clone": (56, 220), "vfork": (58, None),
    "fork": (57, None), "mkdir": (83, None), "mkdirat": (258, 34), "read": (0, 63), "write": (1, 64),
    "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69),
    "pwritev": (296, 70), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "lseek": (8, 62), "fsync": (74, 82), "fdatasync": (75, 83),
    "ftruncate": (77, 46), "fallocate": (285, 47), "open": (2, None), "openat": (257, 56),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44), "flock": (73, 32), "pipe": (22, None),
    "pipe2": (293, 59), "fcntl": (72, 25), "ioctl": (16, 29), "mmap": (9, 222), "munmap": (11, 215),
    "mremap": (25, 216), "mprotect": (10, 226), "brk": (12, 214), "madvise": (28, 233),
    "msync": (26, 227), "membarrier": (324, 283), "execve": (59, 221), "exit": (60, 93),
    "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "set_tid_address": (218, 96),
    "set_robust_list": (273, 99), "rseq": (334, 293), "futex": (202, 98), "gettid": (186, 178),
    "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "setsid": (112, 157), "setpgid": (109, 154), "arch_prctl": (158, None), "getrlimit": (97, 163),
    "getrusage": (98, 165), "uname": (63, 160), "sysinfo": (99, 179), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "getcpu": (309, 168), "prlimit64": (302, 261), "prctl": (157, 167),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None), "setitimer": (38, 103),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132),
    "pause": (34, None), "restart_syscall": (219, 128), "signalfd4": (289, 74), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd2": (290, 19), "listen": (50, 201), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209), "setsockopt": (54, 208), "shutdown": (48, 210),
    "recvfrom": (45, 207), "recvmsg": (47, 212), "sendto": (44, 206), "socketpair": (53, 199),
    "getrandom": (318, 278),
}  # fmt: skip
"""The calls that a sandbox may use. Changes of modes, owners, times and attributes are not among them,
because Landlock does not cover them. Nor are calls that act on another process, or share memory without a
limit."""

ASKED = (
    *("socket", "connect", "accept", "accept4", "bind", "kill", "tgkill"),
    *("clone", "fork", "vfork", "mkdir", "mkdirat", "open", "openat"),
)
"""Calls that the process outside of the sandbox decides, `open` and `openat` only if they make a file."""
ONLY: dict[str, tuple[int, tuple[int, ...]]] = {
    "fcntl": (1, (*range(8), 1030)),  # no owner, signal or lease; 1030: F_DUPFD_CLOEXEC
    # Terminals and waiting bytes, flags of descriptors; then interfaces of the network.
    "ioctl": (
        1,
        (
            *(0x5401, 0x5411, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
            *(0x8912, 0x8913, 0x8915, 0x891B, 0x8921, 0x8927, 0x8933, 0x8946),
        ),
    ),
    "prctl": (0, (15, 16, 0x53564D41)),  # names of threads and of memory
    "prlimit64": (0, (0,)),  # this process
    "sendto": (4, (0,)),  # no address: a datagram, or MSG_FASTOPEN, would connect without `connect`
    "socketpair": (1, tuple(socket.SOCK_STREAM | flags for flags in (0, 0x800, 0x80000, 0x80800))),
}
"""For some calls, the number of an argument, and the values that it may have."""
_CREATES, _CREATE_BITS = {"open": 1, "openat": 2}, 0x400040
"""For calls that open files, the number of the argument whose bits O_CREAT or O_TMPFILE make a file."""
_SHARED_ANONYMOUS, _MAP_FLAGS = 0x21, 3
"""Flags of mmap for memory that RLIMIT_DATA does not count, and the number of the argument with flags."""

_X32 = 0x40000000
_SECCOMP = (317, 277)
_FILTER_MODE, _NEW_LISTENER = 1, 8
_ALLOW, _ASK, _REFUSE, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_LOAD, _RETURN, _IF_EQUAL, _IF_SET, _IF_GREATER_OR_EQUAL, _AND = 0x20, 0x06, 0x15, 0x45, 0x35, 0x54
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data."""

Instruction = tuple[int, int, int, int]
"""An instruction of classic BPF: code, jump if true, jump if false, value."""


def number_of(name: str) -> int | None:
    """Return the number of a system call on this machine. None when it has no such call."""
    return NUMBERS[name][MACHINE != "x86_64"]


def install_filter() -> int:
    """Filter the calls of this process for good. Return the notifications' descriptor. Raises OSError."""
    program = FilterProgram(build_filter())
    number = _SECCOMP[MACHINE != "x86_64"]
    return system_call(number, ctypes.c_uint(_FILTER_MODE), ctypes.c_uint(_NEW_LISTENER), program.header)


class FilterProgram:
    """A BPF program as `struct sock_fprog`: keep it until the kernel has read `header`."""

    def __init__(self, code: list[Instruction]) -> None:
        packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self.header = struct.pack("@HP", len(code), ctypes.addressof(self._buffer))


def build_filter() -> list[Instruction]:
    """Return the filter."""
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, ARCHITECTURES[MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_GREATER_OR_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for name in NUMBERS:
        if (number := number_of(name)) is not None:
            rules = _build_rules(name)
            code += [(_IF_EQUAL, 0, len(rules), number), *rules]
    # The C library falls back from clone3, whose flags a filter cannot read, to clone.
    return [*code, (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]


def _build_rules(name: str) -> list[Instruction]:
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    ask = (_RETURN, 0, 0, _ASK)
    if name in ONLY:
        argument, values = ONLY[name]
        low = _ARGUMENTS + 8 * argument
        compare = [(_IF_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        return [
            *((_LOAD, 0, 0, low + 4), (_IF_EQUAL, 0, len(values) + 1, 0), (_LOAD, 0, 0, low)),
            *(*compare, refuse, allow),
        ]
    if name in _CREATES:
        load = (_LOAD, 0, 0, _ARGUMENTS + 8 * _CREATES[name])
        return [load, (_IF_SET, 0, 1, _CREATE_BITS), ask, allow]
    if name == "mmap":
        load, keep = (_LOAD, 0, 0, _ARGUMENTS + 8 * _MAP_FLAGS), (_AND, 0, 0, _SHARED_ANONYMOUS)
        return [load, keep, (_IF_EQUAL, 0, 1, _SHARED_ANONYMOUS), refuse, allow]
    return [ask if name in ASKED else allow]
