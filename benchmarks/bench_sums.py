"""Sums of many ranks without TensorFlow: by hub and links, on one machine.

    make bench ARGS="-k 'sums and links36'"

The ranks but rank 0 are threads of one process that wait for their links; hubs and links are real processes.
All of them share the cores of this machine. What the host has to do is rank 0, its hub, and the ends of links
beside it; the other ends are on the nodes in a real fleet.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.running import run_program
from csdctl.worker.protocol.sandbox import SOCKETS_VARIABLE
from tests.linked_ranks import HUB_KEY, LINK_KEY, link

SIZES = {"50 kB": 12_500, "13.9 MB": 3_475_000}
LARGE = {"95 MB": 23_750_000}
MEASURED_S = 5.0
NUM_WARM_UP, MIN_SUMS = 3, 8
BATCH = 6
"""So many mpiruns start at a time."""

RANKS = """
import json, os, sys, threading, time
import csdctl.worker.group.communicator as communicator
from csdctl.worker.group.communicator import Communicator, HubCommunicator, HubProcess
from csdctl.worker.group.hub import HubSettings
from csdctl.worker.protocol.sandbox import link_address
run, hub_key, link_key, servers, size, own = json.loads(sys.argv[1])
communicator.build_hub_command = lambda descriptor: [
    sys.executable, "-m", "csdctl.worker", "hub", "--descriptor", str(descriptor), "--marker", run]
sizes, max_bytes, on_waiting = ((size, 0),), 1 << 20, lambda missing: None
total = sum(range(len(servers)))

def start(rank):
    if rank in servers:
        settings = HubSettings(run, rank, hub_key, link_key, tuple(servers), sizes, max_bytes)
        return HubCommunicator(HubProcess(), settings, on_waiting)
    return Communicator(rank, sizes, max_bytes, on_waiting, link_address(run, rank, link_key))

def sum_up(ranks):
    ranks.local[0], ranks.local[size - 1] = 1, ranks.rank
    summed = ranks.sum(ranks.local)
    assert (summed[0], summed[size - 1]) == (len(servers), total), (summed[0], summed[size - 1])

def serve(ranks):
    ranks.local[:] = 1
    ranks.connect(lambda: None)
    ranks.join("")
    ranks.take_state()
    while True:
        sum_up(ranks)

def end(found):
    sys.__excepthook__(*found[:3])
    os._exit(1)

threading.excepthook = end
started = [start(rank) for rank in own]
print("listening", flush=True)
if 0 not in own:
    threads = [threading.Thread(target=serve, args=[ranks]) for ranks in started]
    for thread in threads:
        thread.start()
else:
    (ranks,) = started
    ranks.local[:] = 1
    others = range(1, len(servers))
    while len(ranks.joining) < len(others):
        ranks.await_joining()
    ranks.admit(others)
    ranks.gather(None, type(None))
    for rank in others:
        ranks.give_state(rank, b"")
    print("joined", flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        for _ in range(int(line)):
            sum_up(ranks)
        print(time.monotonic() - began, flush=True)
    os._exit(0)
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


def find_processes(run_id: str) -> dict[int, str]:
    """Return the processes of a run: 'hub', 'host' for ends of links beside a hub, 'nodes' for others."""
    kinds = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
            if run_id in words and "csdctl.worker" in words and "mpirun" not in words[0]:
                at = (entry / "environ").read_text()
                is_beside_hub = f"\0{SOCKETS_VARIABLE}=csdctl/{run_id}/hub/" in at
                kinds[int(entry.name)] = "hub" if "hub" in words else "host" if is_beside_hub else "nodes"
        except (OSError, ValueError):
            continue
    return kinds


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


class Ranks:
    """All ranks of a run, their hubs and links."""

    def __init__(self, stack: ExitStack, servers: Sequence[int], elements: int) -> None:
        self.run_id = f"sums-{os.getpid()}-{time.monotonic_ns()}"
        everyone = range(len(servers))
        programs = []
        for own in ([0], [*everyone[1:]]):
            settings = json.dumps([self.run_id, HUB_KEY, LINK_KEY, list(servers), elements, own])
            process = subprocess.Popen(
                [sys.executable, "-c", RANKS, settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            programs.append(process)
        for process in programs:
            assert process.stdout
            assert process.stdout.readline() == "listening\n"
        began = time.monotonic()
        for rank in everyone[1:]:
            stack.enter_context(link(self.run_id, rank))
            if rank % BATCH == 0:
                time.sleep(1)
        self._root = programs[0]
        assert self._read() == "joined"
        self.start_s = time.monotonic() - began
        self._kinds = find_processes(self.run_id)
        self._kinds[self._root.pid] = "rank 0"

    def _read(self) -> str:
        assert self._root.stdout
        line = self._root.stdout.readline().strip()
        assert line
        return line

    def sum(self, num_sums: int) -> float:
        """Let all ranks sum; return the seconds of a sum."""
        assert self._root.stdin
        self._root.stdin.write(f"{num_sums}\n")
        self._root.stdin.flush()
        return float(self._read()) / num_sums

    def measure(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of a sum, and the CPU seconds in it of each kind of process."""
        first_s = self.sum(NUM_WARM_UP)
        num_sums = max(MIN_SUMS, int(MEASURED_S / max(first_s, 1e-4)))
        before = {pid: cpu_seconds(pid) for pid in self._kinds}
        sum_s = self.sum(num_sums)
        spent: dict[str, float] = {}
        for pid, kind in self._kinds.items():
            spent[kind] = spent.get(kind, 0.0) + (cpu_seconds(pid) - before[pid]) / num_sums
        return sum_s, spent


def make_servers(num_servers: int, num_each: int) -> list[int]:
    """Return the rank of the server of every rank."""
    return [rank // num_each * num_each for rank in range(num_servers * num_each)]


@pytest.mark.parametrize(
    ("num_servers", "num_each"),
    [(1, 6), (1, 13), (1, 37), (4, 9), (4, 36)],
    ids=["links5", "links12", "links36", "servers36", "servers144"],
)
@pytest.mark.parametrize("size", [*SIZES, *LARGE])
def test_sums(num_servers: int, num_each: int, size: str) -> None:
    servers = make_servers(num_servers, num_each)
    elements = (SIZES | LARGE)[size]
    with ExitStack() as stack:
        ranks = Ranks(stack, servers, elements)
        sum_s, spent = ranks.measure()
    of_kinds = ", ".join(f"{kind} {1e3 * spent[kind]:.2f}" for kind in sorted(spent))
    print(
        f"\n{len(servers) - 1} links, {num_servers} servers, {size}: {1e3 * sum_s:.2f} ms a sum, "
        f"CPU ms: {of_kinds}; links up in {ranks.start_s:.1f} s"
    )


def test_sums_floor() -> None:
    """Measure what the loopback itself takes for the bytes of a star, without MPI, and without adding."""
    for name, elements in SIZES.items():
        found = run_program(FLOOR, 36, 4 * elements, 8)
        print(f"\n36 ranks, {name} to one process and back: {found['seconds']:.4f} s")
