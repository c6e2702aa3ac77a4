"""Attempts of a program in the sandbox; prints the name of each that succeeded.

Arguments: the pid, a port and two Unix sockets of processes outside, and a directory of their user's.
"""

import ctypes
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

PID, PORT, ABSTRACT, PATH = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
DIRECTORY = Path(sys.argv[5])
LIBC = ctypes.CDLL(None, use_errno=True)
IS_X86 = os.uname().machine == "x86_64"
PR_SET_DUMPABLE = 4
CLONE_NEWUSER = 0x10000000
MSG_FASTOPEN = 0x20000000
PTRACE_SEIZE = 0x4206


def call(number: int, *arguments: object) -> None:
    if LIBC.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def read_file() -> None:
    (DIRECTORY / "private").read_text()


def read_key_by_link() -> None:
    link = Path("link")
    link.symlink_to(DIRECTORY / "private")
    link.read_text()


def list_directory() -> None:
    os.listdir(DIRECTORY)


def write_file() -> None:
    (DIRECTORY / "new").write_text("owned")


def write_to_tmp() -> None:
    Path(f"/tmp/csdctl-owned-{os.getpid()}").write_text("owned")
    os.unlink(f"/tmp/csdctl-owned-{os.getpid()}")


def open_modes_to_others() -> None:
    os.chmod(DIRECTORY / "private", 0o644)


def change_times() -> None:
    os.utime(DIRECTORY / "private")


def cut_file() -> None:
    os.truncate(DIRECTORY / "private", 1)


def remove_file() -> None:
    os.unlink(DIRECTORY / "private")


def read_environment() -> None:
    assert Path(f"/proc/{PID}/environ").read_bytes()


def read_memory() -> None:
    with open(f"/proc/{PID}/mem", "rb", buffering=0) as memory:
        line = Path(f"/proc/{PID}/maps").read_text().split("-")[0]
        memory.seek(int(line, 16))
        assert memory.read(1)


def open_files_of_others() -> None:
    os.readlink(f"/proc/{PID}/fd/0")


def trace() -> None:
    call(101 if IS_X86 else 117, PTRACE_SEIZE, PID, 0, 0)


def get_descriptor() -> None:
    process = os.pidfd_open(PID)
    call(438, process, 0, 0)


def signal_process() -> None:
    os.kill(PID, signal.SIGURG)


def signal_through_descriptor() -> None:
    signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGURG)


def connect_to_service() -> None:
    socket.create_connection(("127.0.0.1", PORT), timeout=3).close()


def connect_to_any_address() -> None:
    with socket.socket() as connecting:
        connecting.settimeout(3)
        connecting.connect(("0.0.0.0", PORT))


def connect_as_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as connecting:
        connecting.settimeout(3)
        connecting.connect(("::ffff:127.0.0.1", PORT))


def connect_with_data() -> None:
    with socket.socket() as connecting:
        connecting.settimeout(3)
        try:
            connecting.sendto(b"x", MSG_FASTOPEN, ("127.0.0.1", PORT))
        except BlockingIOError:
            return


def connect_without_blocking() -> None:
    with socket.socket() as connecting:
        connecting.setblocking(False)
        try:
            connecting.connect(("127.0.0.1", PORT))
        except BlockingIOError:
            return


def connect_while_the_address_changes() -> None:
    """Another thread writes the address while it is checked."""
    allowed = socket.socket()
    allowed.bind(("127.0.0.1", 0))
    allowed.listen(1000)
    ports = [allowed.getsockname()[1], PORT]
    address = ctypes.create_string_buffer(struct.pack("=H", socket.AF_INET) + bytes(14), 16)
    struct.pack_into(">H4s", address, 2, ports[0], socket.inet_aton("127.0.0.1"))
    is_done = threading.Event()

    def change() -> None:
        while not is_done.is_set():
            for port in ports:
                struct.pack_into(">H", address, 2, port)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(50):
            with socket.socket() as connecting:
                LIBC.connect(connecting.fileno(), address, 16)
                try:
                    if connecting.getpeername()[1] == PORT:
                        return
                except OSError:
                    continue
        raise OSError("never connected")
    finally:
        is_done.set()
        changing.join()


def connect_while_the_socket_changes() -> None:
    """Another thread puts an inet socket in the place of a netlink one, which may be bound to anything."""
    inet, netlink = socket.socket(), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    place = os.dup(netlink.fileno())
    address = struct.pack("=H", socket.AF_INET) + struct.pack(">H4s8x", PORT, socket.inet_aton("127.0.0.1"))
    is_done = threading.Event()

    def change() -> None:
        while not is_done.is_set():
            os.dup2(inet.fileno(), place)
            os.dup2(netlink.fileno(), place)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(50):
            LIBC.connect(place, address, 16)
            try:
                inet.getpeername()
                return
            except OSError:
                continue
        raise OSError("never connected")
    finally:
        is_done.set()
        changing.join()


def connect_to_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect("\0" + ABSTRACT)


def connect_to_socket() -> None:
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(PATH)


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
        (socket.AF_NETLINK, socket.SOCK_RAW, 9),  # audit
    ):
        try:
            socket.socket(family, kind, protocol).close()
        except OSError:
            continue
        return
    raise OSError("none")


def enter_user_namespace() -> None:
    call(272 if IS_X86 else 97, CLONE_NEWUSER)


def use_rings() -> None:
    call(425, 8, ctypes.create_string_buffer(120))


def share_memory() -> None:
    call(29 if IS_X86 else 194, 0, 4096, 0o1600)


ATTEMPTS: list[Callable[[], None]] = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__module__", "") == __name__
]
for attempt in ATTEMPTS:
    if attempt is call:
        continue
    try:
        attempt()
        print(f"succeeded: {attempt.__name__}", flush=True)
    except (OSError, AssertionError) as error:
        print(f"refused: {attempt.__name__}: {error}", flush=True)
