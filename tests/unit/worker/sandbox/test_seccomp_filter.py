"""What the filter decides about each system call, as the kernel would run it."""

import errno
import re
import struct
from pathlib import Path

import pytest

from csdctl.worker.sandbox.seccomp_filter import (
    ARCHITECTURES,
    ASKED,
    MACHINE,
    NUMBERS,
    ONLY,
    build_filter,
    number_of,
)

needs_seccomp = pytest.mark.needs("seccomp")

ALLOW, ASK, REFUSE, KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
BY_ARGUMENT = {*ONLY, "mmap", "open", "openat"}
LOAD, RETURN, IF_EQUAL, IF_GREATER_OR_EQUAL, IF_SET, AND = 0x20, 0x06, 0x15, 0x35, 0x45, 0x54
O_CREAT, O_TMPFILE = 0o100, 0o20000000
FORBIDDEN = """
ptrace process_vm_readv process_vm_writev pidfd_getfd pidfd_send_signal pidfd_open kcmp rt_sigqueueinfo
rt_tgsigqueueinfo tkill mount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsmount
chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat utimensat setxattr fsetxattr truncate bpf
perf_event_open userfaultfd keyctl add_key request_key io_uring_setup shmget msgget semget mq_open
name_to_handle_at open_by_handle_at memfd_create sendmsg sendmmsg inotify_init inotify_init1
inotify_add_watch fanotify_init sched_setscheduler sched_setparam sched_setattr sched_setaffinity setpriority
ioprio_set migrate_pages move_pages process_madvise clone3 setuid setresuid setgroups capset mknod mknodat
"""
"""Calls that reach other processes, files without Landlock, or memory without a limit."""


def decide(number: int, *arguments: int, architecture: int = ARCHITECTURES.get(MACHINE, 0)) -> int:
    """Run the filter on a call, and return its decision."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *[*arguments, *[0] * 6][:6])
    code, at, loaded = build_filter(), 0, 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        if kind == RETURN:
            return value
        if kind == LOAD:
            (loaded,) = struct.unpack_from("=I", data, value)
        elif kind == AND:
            loaded &= value
        else:
            holds = {
                IF_EQUAL: loaded == value,
                IF_GREATER_OR_EQUAL: loaded >= value,
                IF_SET: bool(loaded & value),
            }[kind]
            at += if_true if holds else if_false


@needs_seccomp
def test_each_listed_call_is_allowed_or_handed_over() -> None:
    for name in {*NUMBERS} - BY_ARGUMENT:
        number = number_of(name)
        if number is not None:
            assert decide(number) == (ASK if name in ASKED else ALLOW), name


@needs_seccomp
def test_what_is_not_listed_does_not_exist() -> None:
    listed = {number_of(name) for name in NUMBERS}
    for number in range(1000):
        if number not in listed:
            assert decide(number) == REFUSE | errno.ENOSYS
    assert not {*FORBIDDEN.split()} & {*NUMBERS}


@pytest.mark.parametrize(
    ("name", "refused", "allowed"),
    [
        ("fcntl", (0, 8), (0, 3)),  # F_SETOWN, F_GETFL
        ("fcntl", (0, 10), (0, 1030)),  # F_SETSIG, F_DUPFD_CLOEXEC
        ("fcntl", (0, 15), (0, 0)),  # F_SETOWN_EX, F_DUPFD
        ("fcntl", (0, 1026), (0, 4)),  # F_NOTIFY, F_SETFL
        ("ioctl", (0, 0x8901), (0, 0x5421)),  # FIOSETOWN, FIONBIO
        ("ioctl", (0, 0x5412), (0, 0x5401)),  # TIOCSTI, TCGETS
        ("prctl", (36,), (15,)),  # PR_SET_CHILD_SUBREAPER, PR_SET_NAME
        ("prlimit64", (4711,), (0,)),
        ("sendto", (0, 0, 0, 0, 0x1000), (0, 0, 0, 0x4000, 0)),
        ("sendto", (0, 0, 0, 0, 0x7F00_0000_0000), (0, 0, 0, 0, 0)),  # the lower half alone is 0
        ("socketpair", (1, 2), (1, 1 | 0x80000)),
        ("socketpair", (1, 5), (1, 1)),
        ("mmap", (0, 4096, 3, 0x21), (0, 4096, 3, 0x22)),  # private memory is limited
        ("mmap", (0, 4096, 3, 0x21), (0, 4096, 3, 0x01)),  # a file
    ],
)
@needs_seccomp
def test_an_argument_decides_about_some(
    name: str, refused: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    number = number_of(name)
    assert number is not None
    assert decide(number, *refused) == REFUSE | errno.EPERM
    assert decide(number, *allowed) == ALLOW


@needs_seccomp
def test_only_opening_that_makes_a_file_is_handed_over() -> None:
    number = number_of("openat")
    assert number is not None
    assert decide(number, 0, 0, 0o2) == ALLOW
    assert decide(number, 0, 0, O_CREAT | 0o2) == ASK
    assert decide(number, 0, 0, O_TMPFILE | 0o2) == ASK


@needs_seccomp
def test_other_architectures_are_not_allowed() -> None:
    assert decide(0x40000000) == REFUSE | errno.ENOSYS
    assert decide(0, architecture=0x40000003) == KILL


X86_TABLE = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
GENERIC_TABLE = Path("/usr/include/asm-generic/unistd.h")
"""The one that aarch64 uses."""
GENERIC_NAMES = {"newfstatat": "fstatat"}


@pytest.mark.needs("kernel headers")
def test_numbers_are_those_of_the_kernel() -> None:
    tables = [GENERIC_TABLE, *([X86_TABLE] if MACHINE == "x86_64" else [])]
    for table in tables:
        text = table.read_text()
        numbers = {name: int(n) for name, n in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
        for name, (x86, aarch64) in NUMBERS.items():
            number = x86 if table is X86_TABLE else aarch64
            if number is not None:
                assert numbers[name if name in numbers else GENERIC_NAMES[name]] == number, name
