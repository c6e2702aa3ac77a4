"""A program that a node starts on the host: it looks for vectors of other nodes, and prints what it reaches.

Arguments: the secret, as hexadecimal bytes, and csdctl's process. Other runs are left alone.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SECRET, PID = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
LIBC = ctypes.CDLL(None, use_errno=True)
IS_X86 = os.uname().machine == "x86_64"
PTRACE_SEIZE, MAX_BYTES = 0x4206, 1 << 26


def find_processes() -> tuple[list[int], list[int]]:
    """Return csdctl's processes, and which are outside of this sandbox, its supervisor among them."""
    parents, commands = {}, {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")

    def descendants(ancestor: int) -> list[int]:
        family = [ancestor]
        for one in family:  # grows during the iteration
            family += [pid for pid, parent in parents.items() if parent == one]
        return family

    supervisor = os.getpid()
    while b"sandbox" not in commands[supervisor]:
        supervisor = parents[supervisor]
    processes, inside = descendants(PID), descendants(supervisor)[1:]
    return processes, [pid for pid in processes if pid not in inside]


def call(number: int, *arguments: object) -> int:
    result = int(LIBC.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def memory_of(pid: int) -> Iterator[bytes]:
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1].startswith("r") and end - start < MAX_BYTES and "[v" not in line:
                with contextlib.suppress(OSError):
                    memory.seek(start)
                    yield memory.read(end - start)


def files_of(pid: int) -> Iterator[bytes]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        if "memfd" in os.readlink(f"/proc/{pid}/fd/{name}"):
            with open(f"/proc/{pid}/fd/{name}", "rb") as file:
                yield file.read()


def read_by_call(pid: int) -> None:
    (place, *_) = re.findall(r"^(\w+)-", Path(f"/proc/{pid}/maps").read_text())
    content = ctypes.create_string_buffer(64)
    parts = (ctypes.c_void_p * 2)(ctypes.addressof(content), 64), (ctypes.c_void_p * 2)(int(place, 16), 64)
    call(310 if IS_X86 else 270, pid, parts[0], 1, parts[1], 1, 0)


def duplicate(pid: int) -> None:
    call(438, os.pidfd_open(pid), 1, 0)


def find_secret(read: Callable[[int], Iterator[bytes]]) -> bool:
    found = False
    for pid in OTHERS:
        with contextlib.suppress(OSError):
            found |= any(SECRET in content for content in read(pid))
    return found


def reach_any(reach: Callable[[int], object]) -> bool:
    found = False
    for pid in OTHERS:
        with contextlib.suppress(OSError, ValueError):
            reach(pid)
            found = True
    return found


def connect_to_links() -> bool:
    own = os.environ["CSDCTL_SOCKETS"]
    with open("/proc/net/unix") as table:
        names = set(re.findall(r"@(csdctl/\S+)", table.read()))
    num_connected = 0
    for name in names - {own}:
        if name.split("/")[1] != own.split("/")[1]:
            continue
        with socket.socket(socket.AF_UNIX) as connecting, contextlib.suppress(OSError):
            connecting.connect("\0" + name)
            num_connected += 1
    return num_connected > 0


def write_the_sum() -> bool:
    """Open the memory of the sum, which a link may read, for writing; the sum is that of all ranks."""
    written = False
    for pid in PROCESSES:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                with contextlib.suppress(OSError):
                    is_vector = "memfd:csdctl" in os.readlink(path)
                    flags = re.findall(
                        r"^flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/{name}").read_text(), re.M
                    )
                    if is_vector and not int(flags[0], 8) & os.O_ACCMODE:
                        os.close(os.open(path, os.O_RDWR))
                        written = True
    return written


PROCESSES, OTHERS = find_processes()
print(f"spawned as {os.getuid()}", flush=True)
for name, attempt in {
    "memory": lambda: find_secret(memory_of),
    "files": lambda: find_secret(files_of),
    "environment": lambda: reach_any(lambda pid: Path(f"/proc/{pid}/environ").read_bytes()),
    "read_by_call": lambda: reach_any(read_by_call),
    "trace": lambda: reach_any(lambda pid: call(101 if IS_X86 else 117, PTRACE_SEIZE, pid, 0, 0)),
    "duplicate": lambda: reach_any(duplicate),
    "signal": lambda: reach_any(lambda pid: os.kill(pid, 0)),
    "signal_csdctl": lambda: not os.kill(PID, signal.SIGURG),
    "links": connect_to_links,
    "sum": write_the_sum,
}.items():
    try:
        is_reached = attempt()
    except OSError:
        is_reached = False
    print(f"{'reached' if is_reached else 'held'}: {name}", flush=True)
print("over", flush=True)
