"""System calls, filters of them, and the processes of a sandbox."""

import ctypes
import errno
import os
import platform
import struct
from typing import Any

from csdctl.worker.protocol.processes import load_all

LIBC = ctypes.CDLL(None, use_errno=True)
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


def system_call(number: int, *arguments: Any) -> int:
    """Make a system call; raises OSError."""
    result = LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


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


def list_group(group: int) -> list[int]:
    """Return the processes of a process group."""
    return [pid for pid, stat in load_all().items() if stat.group == group]
