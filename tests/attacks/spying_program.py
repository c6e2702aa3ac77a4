"""A program that a node starts on the host: it looks for vectors of other nodes, and prints what it reaches.

Arguments: the secret, as hexadecimal bytes, and csdctl's process. Other runs are left alone.
sandbox_program.py has the attempts that do not depend on a run.
"""

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SECRET, PID = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
MAX_BYTES = 1 << 26


def find_processes() -> tuple[list[int], list[int]]:
    """Return csdctl's processes, and which are outside of this sandbox, its supervisor among them."""
    parents, commands = {}, {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")

    def descendants(ancestor: int) -> list[int]:
        family = [ancestor]
        for member in family:  # grows during the iteration
            family += [pid for pid, parent in parents.items() if parent == member]
        return family

    supervisor = os.getpid()
    while b"sandbox" not in commands[supervisor]:
        supervisor = parents[supervisor]
    processes, inside = descendants(PID), descendants(supervisor)[1:]
    return processes, [pid for pid in processes if pid not in inside]


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


def reach_any(reach: Callable[[int], bool]) -> bool:
    """Return whether `reach` is true for any process outside of the sandbox."""
    is_reached = False
    for pid in OUTSIDE:
        with contextlib.suppress(OSError):
            is_reached |= reach(pid)
    return is_reached


def connect_to_links() -> bool:
    socket_name = os.environ["CSDCTL_SOCKETS"]
    run = "/".join(socket_name.split("/")[:2])
    with open("/proc/net/unix") as table:
        names = set(re.findall(rf"@({re.escape(run)}/\S+)", table.read()))
    is_connected = False
    for name in names - {socket_name}:
        with socket.socket(socket.AF_UNIX) as connecting, contextlib.suppress(OSError):
            connecting.connect("\0" + name)
            is_connected = True
    return is_connected


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


PROCESSES, OUTSIDE = find_processes()
print(f"spawned as {os.getuid()}", flush=True)
for name, attempt in {
    "memory": lambda: reach_any(lambda pid: any(SECRET in part for part in memory_of(pid))),
    "files": lambda: reach_any(lambda pid: any(SECRET in content for content in files_of(pid))),
    "environment": lambda: reach_any(lambda pid: bool(Path(f"/proc/{pid}/environ").read_bytes())),
    "signal": lambda: reach_any(lambda pid: not os.kill(pid, 0)),
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
