"""Attempts of a program in the sandbox; prints the name of each that succeeded.

Arguments: the pid, a port, two Unix sockets and one of datagrams of a process outside, and a directory of its
user's.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

PID, PORT, ABSTRACT, PATH = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
DATAGRAMS, DIRECTORY = sys.argv[5], Path(sys.argv[6])
PRIVATE, OWNED = DIRECTORY / "private", f"/tmp/csdctl-owned-{os.getpid()}"
LIBC = ctypes.CDLL(None, use_errno=True)
IS_X86 = os.uname().machine == "x86_64"
CLONE_NEWUSER = 0x10000000
MSG_FASTOPEN = 0x20000000
PTRACE_SEIZE = 0x4206
FIOSETOWN = 0x8901
SCHED_IDLE = 5
SIGNAL_INFO = struct.pack("=iii112x", signal.SIGURG, 0, -1)


def call(number: int, *arguments: object) -> None:
    if LIBC.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def read_by_link() -> None:
    Path("link").symlink_to(PRIVATE)
    Path("link").read_text()


def write_to_tmp() -> None:
    Path(OWNED).write_text("owned")
    os.unlink(OWNED)


def read_environment() -> None:
    assert Path(f"/proc/{PID}/environ").read_bytes()


def read_memory() -> None:
    with open(f"/proc/{PID}/mem", "rb", buffering=0) as memory:
        line = Path(f"/proc/{PID}/maps").read_text().split("-")[0]
        memory.seek(int(line, 16))
        assert memory.read(1)


def connect(
    address: object, family: int = socket.AF_INET, *, timeout_s: float = 3, is_fast: bool = False
) -> None:
    """Connect to an address; `is_fast` sends data with it, a timeout of 0 does not wait for the answer."""
    with socket.socket(family) as connecting, contextlib.suppress(BlockingIOError):
        connecting.settimeout(timeout_s)
        if is_fast:
            connecting.sendto(b"x", MSG_FASTOPEN, address)  # type: ignore[call-overload]
        else:
            connecting.connect(address)  # type: ignore[arg-type]


def connect_while_the_address_changes() -> None:
    """Another thread writes the address while it is checked."""
    allowed, is_done = socket.socket(), threading.Event()
    allowed.bind(("127.0.0.1", 0))
    allowed.listen(1000)
    ports = [allowed.getsockname()[1], PORT]
    address = ctypes.create_string_buffer(struct.pack("=H", socket.AF_INET) + bytes(14), 16)
    struct.pack_into(">H4s", address, 2, ports[0], socket.inet_aton("127.0.0.1"))

    def change() -> None:
        while not is_done.is_set():
            for port in ports:
                struct.pack_into(">H", address, 2, port)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(50):
            with socket.socket() as connecting, contextlib.suppress(OSError):
                LIBC.connect(connecting.fileno(), address, 16)
                if connecting.getpeername()[1] == PORT:
                    return
        raise OSError("never connected")
    finally:
        is_done.set()
        changing.join()


def connect_by_a_port_of_its_own() -> None:
    """Take the service's port at another address of this machine, where it is free."""
    with socket.socket(socket.AF_INET6) as listening:
        listening.bind(("::1", PORT))
        listening.listen()
        connect(("127.0.0.1", PORT))


def bind_low_port() -> None:
    with socket.socket() as bound:
        for port in range(1023, 600, -1):
            try:
                bound.bind(("127.0.0.1", port))
            except PermissionError:
                raise
            except OSError:
                continue
            return


def send_to_path() -> None:
    """A pair of sockets of datagrams is made without `socket`, and sends to any path without `connect`."""
    sending, unused = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sending, unused:
        unused.close()
        sending.sendto(b"x", DATAGRAMS)


def own_signals(request: Callable[[int], object]) -> None:
    """Let the kernel signal the process outside when there is data on a socket."""
    near, far = socket.socketpair()
    with near, far:
        request(near.fileno())


def send_datagram() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.sendto(b"x", ("127.0.0.1", PORT))


def use_other_protocols() -> None:
    for family, kind, protocol in (
        (socket.AF_INET, socket.SOCK_STREAM, 262),  # MPTCP
        (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        (socket.AF_PACKET, socket.SOCK_RAW, 0),
        (socket.AF_UNIX, socket.SOCK_DGRAM, 0),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, 0),
        (socket.AF_NETLINK, socket.SOCK_RAW, 0),
    ):
        with contextlib.suppress(OSError):
            socket.socket(family, kind, protocol).close()
            return
    raise OSError("none")


ATTEMPTS: dict[str, Callable[[], object]] = {
    "read_file": PRIVATE.read_text,
    "read_by_link": read_by_link,
    "list_directory": lambda: os.listdir(DIRECTORY),
    "write_file": lambda: (DIRECTORY / "new").write_text("owned"),
    "write_to_tmp": write_to_tmp,
    "open_modes_to_others": lambda: PRIVATE.chmod(0o644),
    "change_times": lambda: os.utime(PRIVATE),
    "cut_file": lambda: os.truncate(PRIVATE, 1),
    "remove_file": PRIVATE.unlink,
    "read_environment": read_environment,
    "read_memory": read_memory,
    "open_files_of_others": lambda: os.readlink(f"/proc/{PID}/fd/0"),
    "trace": lambda: call(101 if IS_X86 else 117, PTRACE_SEIZE, PID, 0, 0),
    "get_descriptor": lambda: call(438, os.pidfd_open(PID), 0, 0),
    "signal_process": lambda: os.kill(PID, signal.SIGURG),
    "signal_through_descriptor": lambda: signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGURG),
    "connect_to_service": lambda: connect(("127.0.0.1", PORT)),
    "connect_to_any_address": lambda: connect(("0.0.0.0", PORT)),
    "connect_as_ipv6": lambda: connect(("::ffff:127.0.0.1", PORT), socket.AF_INET6),
    "connect_with_data": lambda: connect(("127.0.0.1", PORT), is_fast=True),
    "connect_without_blocking": lambda: connect(("127.0.0.1", PORT), timeout_s=0),
    "connect_while_the_address_changes": connect_while_the_address_changes,
    "connect_to_abstract_socket": lambda: connect("\0" + ABSTRACT, socket.AF_UNIX),
    "connect_to_socket": lambda: connect(PATH, socket.AF_UNIX),
    "connect_by_a_port_of_its_own": connect_by_a_port_of_its_own,
    "bind_low_port": bind_low_port,
    "send_to_path": send_to_path,
    "send_datagram": send_datagram,
    "use_other_protocols": use_other_protocols,
    "enter_user_namespace": lambda: call(272 if IS_X86 else 97, CLONE_NEWUSER),
    "use_rings": lambda: call(425, 8, ctypes.create_string_buffer(120)),
    "share_memory": lambda: call(29 if IS_X86 else 194, 0, 4096, 0o1600),
    "queue_signal": lambda: call(129 if IS_X86 else 138, PID, signal.SIGURG, SIGNAL_INFO),
    "own_signals": lambda: own_signals(lambda number: fcntl.fcntl(number, fcntl.F_SETOWN, PID)),
    "own_signals_by_ioctl": lambda: own_signals(
        lambda number: fcntl.ioctl(number, FIOSETOWN, struct.pack("=i", PID))
    ),
    "watch_directory": lambda: call(254 if IS_X86 else 27, LIBC.inotify_init(), b"/tmp", 0x100),
    "schedule_other_process": lambda: call(144 if IS_X86 else 119, PID, SCHED_IDLE, struct.pack("=i", 0)),
    "bind_other_process_to_a_core": lambda: os.sched_setaffinity(PID, {0}),
    "share_memory_without_a_file": lambda: mmap.mmap(-1, 4096),
    "make_memory_file": lambda: os.memfd_create("owned"),
}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        print(f"succeeded: {name}", flush=True)
    except (OSError, AssertionError) as error:
        print(f"refused: {name}: {error}", flush=True)
