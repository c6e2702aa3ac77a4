"""What the filter decides about each system call, as the kernel would run it; who gets in at the ports."""

import errno
import ipaddress
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from csdctl.worker.sandbox.seccomp_supervisor import (
    ARCHITECTURES,
    ASKED,
    MACHINE,
    MAX_LATE,
    MAX_STRANGERS,
    NUMBERS,
    Arrivals,
    Tokens,
    build_filter,
    number_of,
)
from tests.patience import WAIT_S, scaled

needs_seccomp = pytest.mark.needs("seccomp")

ALLOW, ASK, REFUSE, KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
BY_ARGUMENT = ("sendto", "sendmsg", "sendmmsg", "clone", "prlimit64")
LOAD, RETURN, IF_EQUAL, IF_GREATER_OR_EQUAL, IF_SET = 0x20, 0x06, 0x15, 0x35, 0x45


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
            continue
        holds = {
            IF_EQUAL: loaded == value,
            IF_GREATER_OR_EQUAL: loaded >= value,
            IF_SET: bool(loaded & value),
        }[kind]
        at += if_true if holds else if_false


@needs_seccomp
def test_each_listed_call_is_refused_or_handed_over() -> None:
    for name in {*NUMBERS} - {*BY_ARGUMENT}:
        number = number_of(name)
        if number is not None:
            refusal = REFUSE | (errno.ENOSYS if name == "clone3" else errno.EPERM)
            assert decide(number) == (ASK if name in ASKED else refusal), name


@pytest.mark.parametrize(
    ("name", "refused", "allowed"),
    [
        ("sendto", (0, 0, 0, 0x20000000), (0, 0, 0, 0x4000)),
        ("sendmsg", (0, 0, 0x20000000), (0, 0, 0x4000)),
        ("sendmmsg", (0, 0, 0, 0x20000000), (0, 0, 0, 0x4000)),
        ("prlimit64", (4711,), (0,)),
        *(
            ("clone", (flag,), (0x3D0F00,))  # new namespaces; a thread
            for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
        ),
    ],
)
@needs_seccomp
def test_flags_and_processes_decide_about_some(
    name: str, refused: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    number = number_of(name)
    assert number is not None
    assert decide(number, *refused) == REFUSE | errno.EPERM
    assert decide(number, *allowed) == ALLOW


@needs_seccomp
def test_other_calls_are_allowed_and_other_architectures_are_not() -> None:
    assert decide(0 if MACHINE == "x86_64" else 63) == ALLOW  # read
    assert decide(0x40000000) == REFUSE | errno.ENOSYS
    assert decide(0, architecture=0x40000003) == KILL


@pytest.mark.parametrize(
    "name",
    [
        "ptrace process_vm_readv process_vm_writev pidfd_getfd pidfd_send_signal",  # other processes
        "mount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsmount",
        "chmod fchmod fchmodat fchmodat2 chown fchown fchownat utimensat setxattr fsetxattr truncate",
        "bpf perf_event_open userfaultfd keyctl add_key request_key io_uring_setup",
        "shmget msgget semget mq_open name_to_handle_at open_by_handle_at",
    ],
)
@needs_seccomp
def test_what_landlock_does_not_cover_is_listed(name: str) -> None:
    assert {*name.split()} <= {*NUMBERS}
    assert not {*name.split()} & {*ASKED, *BY_ARGUMENT}


PEERS = [ipaddress.ip_network("127.0.0.0/8")]


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with socket.create_server((request.param, 0), backlog=1000) as listening:
        listening.setblocking(False)
        yield listening


def connect(listening: socket.socket) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listening.getsockname()[1]))


def wait_for(listening: socket.socket) -> None:
    assert select.select([listening], [], [], scaled(WAIT_S))[0]


def test_token_that_comes_late_wakes_the_sandbox_which_then_gets_the_connection(
    listening: socket.socket,
) -> None:
    tokens = Tokens(b"key")
    supervisor = Arrivals(tokens, PEERS)
    with connect(listening) as member:
        wait_for(listening)
        with pytest.raises(BlockingIOError):
            supervisor.accept(listening)
        member.sendall(tokens.make(member.getpeername()) + b"hello")
        wait_for(listening)
        accepted, peer = supervisor.accept(listening)
        with accepted:
            assert peer == member.getsockname()
            assert accepted.recv(5) == b"hello"


def test_silent_strangers_beyond_the_limit_make_room_for_members(listening: socket.socket) -> None:
    tokens = Tokens(b"key")
    supervisor = Arrivals(tokens, PEERS)
    strangers = [connect(listening) for _ in range(MAX_LATE)]
    with connect(listening) as member:
        for _ in range(len(strangers) // MAX_STRANGERS + 1):
            with pytest.raises(BlockingIOError):
                supervisor.accept(listening)
        assert strangers[0].recv(1) == b""
        member.sendall(tokens.make(member.getpeername()))
        wait_for(listening)
        accepted, _ = supervisor.accept(listening)
        accepted.close()
    for stranger in strangers:
        stranger.close()


def test_token_is_valid_once_also_where_the_address_is_mapped() -> None:
    tokens = Tokens(b"key")
    token = tokens.make(("10.0.0.1", 1024))
    assert not tokens.is_valid(token, ("10.0.0.2", 1024))
    assert tokens.is_valid(token, ("::ffff:10.0.0.1", 1024, 0, 0))
    assert not tokens.is_valid(token, ("10.0.0.1", 1024))
