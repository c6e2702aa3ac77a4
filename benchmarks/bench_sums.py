"""Sums of many ranks without TensorFlow: one server and several, flat and with two levels.

    make bench ARGS="-k 'sums and two and 144'"

A server and its nodes are a network namespace. Cables of 1 or 10 Gbit/s connect the servers (`tc tbf`). The
ranks of a server are threads of one process that wait for their links; the links are real MPI processes.
All of them share the cores of this machine, which in a rack every server has for itself: the CPU time of
the root's link is what one server needs. Root only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running import run_program
from csdctl.launch.mpirun import ALLOW_ROOT, COMMON_OPTIONS
from tests.lab.network import (
    Segment,
    connect_cable,
    limit_bandwidth,
    make_bridge,
    make_namespace,
    remove_namespace,
)

SIZES = {"50 kB": 12_500, "13.9 MB": 3_475_000}
LARGE = {"95 MB": 23_750_000}
CABLES = {"1 Gbit/s": 1000.0, "10 Gbit/s": 10_000.0}
MEASURED_S = 6.0
NUM_WARM_UP, MIN_SUMS = 2, 5
SWITCH = Segment("sums-switch", "br0", "10.98.0", "fd98")

RANKS = """
import json, os, sys, threading, time
import numpy as np
from csdctl.worker.group.channel import Listener, SharedVectors
from csdctl.worker.group.communicator import LinkCommunicator, TwoLevelCommunicator
run, first, num_ranks, num_servers, num_elements, is_flat = sys.argv[1], *map(int, sys.argv[2:])
servers = [list(range(n * num_ranks, (n + 1) * num_ranks)) for n in range(num_servers)]

class Rank(threading.Thread):
    def __init__(self, number):
        super().__init__(daemon=True)
        self.number, self.listener = number, Listener(run, number)
        self.go, self.done, self.work = threading.Event(), threading.Event(), None
        self.start()

    def run(self):
        levels = {}
        is_server = self.number % num_ranks == 0
        for _ in range(1 if is_flat else is_server + (num_ranks > 1)):
            channel, greeting = self.listener.accept_link(1, lambda: False)
            memory = SharedVectors(num_elements)
            levels[greeting.level] = LinkCommunicator(channel, greeting, memory, lambda missing: None)
        tunnel, between = levels.get("tunnel"), levels.get("between")
        ranks = levels.get("flat") or TwoLevelCommunicator(
            self.number, servers, (tunnel or between).local, tunnel, between)
        ranks.local[:] = 1
        while True:
            self.done.set()
            self.go.wait()
            self.go.clear()
            name, size, num_sums = self.work
            if name:
                ranks.choose_collective("" if name == "auto" else name, ((size, 0),))
            started = time.monotonic()
            for _ in range(num_sums):
                ranks.local[0], ranks.local[size - 1] = 1, self.number
                total = ranks.sum(ranks.local)
                assert total[0] == num_servers * num_ranks, total[0]
                assert total[size - 1] == sum(range(num_servers * num_ranks)), total[size - 1]
            self.took_s = time.monotonic() - started

def end(found):
    sys.excepthook(*found[:3])
    os._exit(1)

threading.excepthook = end
ranks = [Rank(number) for number in range(first, first + num_ranks)]
print("listening", flush=True)
for line in sys.stdin:
    work = json.loads(line)
    for rank in ranks:
        rank.done.wait()
        rank.done.clear()
        rank.work = work
    for rank in ranks:
        rank.go.set()
    for rank in ranks:
        rank.done.wait()
    print(json.dumps(ranks[0].took_s), flush=True)
"""
FLOOR = """
import json, os, selectors, socket, sys, time
import numpy as np
num_ranks, size, rounds = map(int, sys.argv[1:])
server = socket.create_server(("127.0.0.1", 0), backlog=num_ranks)
for _ in range(num_ranks - 1):
    if not os.fork():
        root = socket.create_connection(server.getsockname())
        own, total = memoryview(bytes(size)), memoryview(bytearray(size))
        for _ in range(rounds):
            root.sendall(own)
            place = 0
            while place < size:
                place += root.recv_into(total[place : place + (1 << 20)])
        os._exit(0)
nodes = [server.accept()[0] for _ in range(num_ranks - 1)]
received = [memoryview(bytearray(size)) for _ in nodes]
times = []
for _ in range(rounds):
    started = time.monotonic()
    for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
        selector, places = selectors.DefaultSelector(), [0] * len(nodes)
        for number, node in enumerate(nodes):
            node.setblocking(False)
            selector.register(node, event, number)
        while selector.get_map():
            for key, _ in selector.select():
                number, place = key.data, places[key.data]
                part = received[number][place : place + (1 << 20)]
                try:
                    moved = key.fileobj.recv_into(part) if event == 1 else key.fileobj.send(part)
                except BlockingIOError:
                    continue
                places[number] += moved
                if places[number] == size:
                    selector.unregister(key.fileobj)
    times.append(time.monotonic() - started)
print(json.dumps({"seconds": sorted(times)[rounds // 2]}))
"""
AGENT = """#!/bin/sh
host=$1; shift
exec ip netns exec "sums-${host##*.}" sh -c "$*"
"""


class Servers:
    """Processes of the ranks of every server, and an mpirun for each level."""

    def __init__(self, directory: Path, num_servers: int, num_ranks: int, elements: int, *, is_flat: bool):
        self.num_servers, self.num_ranks, self.is_flat = num_servers, num_ranks, is_flat
        self.run_id = f"sums-{os.getpid()}-{num_servers}-{num_ranks}-{elements}-{int(is_flat)}"
        self._directory = directory
        directory.mkdir(parents=True)
        (directory / "agent").write_text(AGENT)
        (directory / "agent").chmod(0o700)
        self._processes = [
            self._popen(
                number,
                *(sys.executable, "-c", RANKS, self.run_id),
                *map(str, (number * num_ranks, num_ranks, num_servers, elements, int(is_flat))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(num_servers)
        ]
        for process in self._processes:
            assert process.stdout
            assert process.stdout.readline() == b"listening\n"
        everyone = range(num_servers)
        if is_flat:
            self._mpiruns = [self._mpirun(everyone, num_ranks, "flat", "$OMPI_COMM_WORLD_RANK")]
        else:
            tunnels = [(n, f"$((OMPI_COMM_WORLD_RANK + {n * num_ranks}))") for n in everyone]
            self._mpiruns = [self._mpirun([n], num_ranks, "tunnel", rank) for n, rank in tunnels]
            between = f"$((OMPI_COMM_WORLD_RANK * {num_ranks}))"
            self._mpiruns.append(self._mpirun(everyone, 1, "between", between))

    def _popen(self, number: int, *command: str, **options: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["ip", "netns", "exec", f"sums-{number + 1}", *command], **options)

    def _mpirun(self, servers: Sequence[int], each: int, level: str, rank: str) -> "subprocess.Popen[bytes]":
        link = f"exec {sys.executable} -m csdctl.worker link --run {self.run_id} --rank {rank}"
        link += f" --generation 1 --level {level}"
        options = [word for option in COMMON_OPTIONS for word in option.split() if "node" not in word]
        options = [word for word in options if word != "--map-by"]
        hosts = ",".join(f"{SWITCH.ipv4(number + 1)}:{each}" for number in servers)
        if len(servers) == 1:
            hosts = f"localhost:{each}"
        else:
            options += ["--prtemca", "plm_ssh_agent", str(self._directory / "agent"), "--prefix", sys.prefix]
            options += ["--prtemca", "prte_if_include", f"{SWITCH.ipv4_prefix}.0/24"]
            options += ["--mca", "btl_tcp_if_include", f"{SWITCH.ipv4_prefix}.0/24"]
        scratch = self._directory / f"{level}-{servers[0]}"
        scratch.mkdir()
        return self._popen(
            servers[0],
            *(str(Path(sys.prefix) / "bin" / "mpirun"), *options, "--host", hosts, "--map-by", "slot"),
            *("-np", str(each * len(servers)), "sh", "-c", link),
            env={**os.environ, **ALLOW_ROOT, "TMPDIR": str(scratch)},
            stdout=subprocess.DEVNULL,
            stderr=(self._directory / "errors").open("ab"),
        )

    def _all(self, *work: Any) -> float:
        """Let every rank do its part of `work`; return the seconds of rank 0."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(json.dumps(work).encode() + b"\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout]
        assert all(answers), (self._directory / "errors").read_text()[-2000:]
        return float(json.loads(answers[0]))

    def measure(self, collective: str, size: int) -> tuple[float, float, float]:
        """Return the seconds of a sum, and the seconds of CPU of the root's links and of all links in it."""
        own_s = self._all(collective, size, NUM_WARM_UP) / NUM_WARM_UP
        num_sums = max(MIN_SUMS, int(MEASURED_S / max(own_s, 1e-4)))
        before = self._cpu_seconds()
        sum_s = self._all("", size, num_sums) / num_sums
        after = self._cpu_seconds()
        spent = {key: (after[key] - before[key]) / num_sums for key in after}
        return sum_s, sum(spent[key] for key in spent if key[0] == 0), sum(spent.values())

    def _cpu_seconds(self) -> dict[tuple[int, int], float]:
        """Return the seconds of every link, by rank and process."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_text().split("\0")
                    if self.run_id in words and "link" in words:
                        fields = (entry / "stat").read_text().rpartition(")")[2].split()
                        key = int(words[words.index("--rank") + 1]), int(entry.name)
                        found[key] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                except (OSError, ValueError):
                    continue
        return found

    def close(self) -> None:
        for process in [*self._mpiruns, *self._processes]:
            process.terminate()
        for process in [*self._mpiruns, *self._processes]:
            process.wait()


@contextmanager
def cabled(num_servers: int) -> Iterator[None]:
    """Keep the namespaces of the servers, each with a cable to one switch."""
    names = [SWITCH.namespace, *(f"sums-{number + 1}" for number in range(num_servers))]
    with ExitStack() as stack:
        for name in names:
            make_namespace(name)
            stack.callback(remove_namespace, name)
        make_bridge(SWITCH)
        for number, name in enumerate(names[1:], start=1):
            connect_cable(name, "eth0", SWITCH, f"port{number}", [SWITCH.ipv4(number)])
        yield


def set_cables(num_servers: int, mbit_per_s: float) -> None:
    """Limit both directions of every cable."""
    for number in range(1, num_servers + 1):
        for namespace, interface in ((f"sums-{number}", "eth0"), (SWITCH.namespace, f"port{number}")):
            limit_bandwidth(namespace, interface, mbit_per_s)


def show(num_servers: int, num_ranks: int, what: str, cable: str, size: str, found: Sequence[float]) -> None:
    sum_s, root_s, all_s = found
    ranks = f"{num_servers * num_ranks} ranks on {num_servers}"
    print(f"{ranks} | {what} | {cable} | {size} | {sum_s:.4f} s | {root_s:.4f} s | {all_s:.3f} s", flush=True)


@pytest.mark.parametrize("what", ["star", "allreduce", "two levels"])
@pytest.mark.parametrize(("num_servers", "num_ranks"), [(1, 36), (4, 36), (4, 64)], ids=["36", "144", "256"])
def test_sums(tmp_path: Path, num_servers: int, num_ranks: int, what: str) -> None:
    print("\nranks | collective | cable | vector | s a sum | CPU of the root's links | CPU of all links")
    is_flat = what != "two levels"
    for size, elements in (SIZES | LARGE if num_servers == 1 else SIZES).items():
        with cabled(num_servers), ExitStack() as stack:
            servers = Servers(tmp_path / str(elements), num_servers, num_ranks, elements, is_flat=is_flat)
            stack.callback(servers.close)
            for number, cable in enumerate(CABLES if num_servers > 1 else ["–"]):
                if num_servers > 1:
                    set_cables(num_servers, CABLES[cable])
                found = servers.measure("" if number else what if is_flat else "auto", elements)
                show(num_servers, num_ranks, what, cable, size, found)


def test_sums_floor() -> None:
    """Measure what the loopback itself takes for the bytes of a star, without MPI, and without adding."""
    for name, elements in SIZES.items():
        found = run_program(FLOOR, 36, 4 * elements, 8)
        print(f"\n36 ranks, {name} to one process and back: {found['seconds']:.4f} s")
