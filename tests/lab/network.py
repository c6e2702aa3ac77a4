"""The lab's network: one namespace per machine, veth cables, and bridges as switches.

Bridges are in namespaces too, so that no address of the lab exists on the machine itself. Namespaces are
named after the lab, so that the remains of a killed lab can be found.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.patience import eventually

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


@dataclass(frozen=True)
class Segment:
    """A switch with its namespace and network."""

    namespace: str
    bridge: str
    ipv4_prefix: str
    ipv6_prefix: str

    def ipv4(self, number: int) -> str:
        return f"{self.ipv4_prefix}.{number}"

    def ipv6(self, number: int) -> str:
        return f"{self.ipv6_prefix}::{number:x}"


def run_command(*command: str, input_text: str = "") -> str:
    """Run `command` and return its output; raises RuntimeError with its stderr."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=input_text)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{input_text}")
    return done.stdout


def run_ip(namespace: str, *lines: str) -> None:
    """Run several `ip` commands in one namespace, in one process."""
    run_command("ip", "-n", namespace, "-batch", "-", input_text="\n".join(lines) + "\n")


def make_namespace(name: str) -> None:
    run_command("ip", "netns", "add", name)
    run_ip(name, "link set lo up")


def make_bridge(segment: Segment) -> None:
    run_ip(segment.namespace, f"link add {segment.bridge} type bridge", f"link set {segment.bridge} up")


def forget_neighbours(segment: Segment) -> None:
    """Let another node have an address there. `ip neigh flush` fails where an entry expires meanwhile."""
    run_ip(segment.namespace, f"link set {segment.bridge} arp off", f"link set {segment.bridge} arp on")


def give_addresses(namespace: str, interface: str, addresses: Sequence[str]) -> None:
    """Assign `addresses` to `interface`; IPv6 without duplicate address detection, to be usable at once."""
    lines = []
    for address in addresses:
        is_ipv6 = ":" in address
        lines.append(f"addr add {address}/{64 if is_ipv6 else 24} dev {interface}{' nodad' * is_ipv6}")
    run_ip(namespace, *lines)


def connect_cable(
    namespace: str, interface: str, segment: Segment, port: str, addresses: Sequence[str]
) -> None:
    """Connect `interface` in `namespace` to port `port` of the switch."""
    run_ip(
        segment.namespace,
        f"link add {port} type veth peer name {interface} netns {namespace}",
        f"link set {port} master {segment.bridge} up",
    )
    give_addresses(namespace, interface, addresses)
    run_ip(namespace, f"link set {interface} up")


def limit_bandwidth(namespace: str, interface: str, mbit_per_s: float) -> None:
    """Limit the rate of outgoing packets of `interface`."""
    rate = f"rate {mbit_per_s}mbit burst 32k latency 400ms".split()
    run_command("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *rate)


def clear_link(namespace: str, interface: str) -> None:
    """Undo `limit_bandwidth`."""
    run_command("tc", "-n", namespace, "qdisc", "del", "dev", interface, "root")


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Let this thread, and threads started in the block, open their sockets in `namespace`."""
    with open("/proc/thread-self/ns/net") as before, (NAMESPACES / namespace).open() as inside:
        _set_namespace(inside.fileno())
        try:
            yield
        finally:
            _set_namespace(before.fileno())


def list_namespaces(prefix: str) -> list[str]:
    if not NAMESPACES.exists():
        return []
    return sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(prefix))


def list_processes(namespace: str) -> list[int]:
    """Return the pids of all processes in `namespace`, except this process."""
    pids = (int(pid) for pid in run_command("ip", "netns", "pids", namespace).split())
    return [pid for pid in pids if pid != os.getpid()]


def remove_namespace(name: str) -> None:
    """End every process in the namespace, then remove it with its cables."""
    end_all(lambda: list_processes(name))
    run_command("ip", "netns", "del", name)


def end_all(list_pids: Callable[[], list[int]]) -> None:
    """Kill the processes of `list_pids` until none is left; raises RuntimeError if they do not end."""

    def is_done() -> bool:
        pids = list_pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    if not eventually(is_done, list_pids):
        raise RuntimeError(f"processes that do not end: {list_pids()}")


def _set_namespace(descriptor: int) -> None:
    # os.setns needs Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
