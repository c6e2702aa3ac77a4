"""Ranks that work together: real processes, real hubs, and for each link an mpirun of two processes."""

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.launch.mpi_job import kill_session
from csdctl.launch.mpirun import ALLOW_ROOT, COMMON_OPTIONS
from csdctl.worker.group import bf16
from csdctl.worker.protocol.sandbox import hub_address, link_address
from tests.patience import eventually, scaled

ANSWER_S = 60.0
"""A rank that waits for others that never come does not answer."""
NUM_ELEMENTS = (1 << 18) + 5
"""The usual size of a sum: two chunks. Its last elements are [n, stop, seconds of each rank, norm]."""
SAMPLES = 8
"""Number of samples of every rank."""
MAX_BYTES = 1 << 20
"""The largest message to one rank."""
HUB_KEY, LINK_KEY = "of-hubs", "of-links"
HUB_COMMAND = [sys.executable, "-m", "csdctl.worker", "hub", "--descriptor"]
RANK = """
import hashlib, json, sys
import numpy as np
from csdctl.worker.group.communicator import Communicator, HubCommunicator, HubProcess
from csdctl.worker.group.hub import HubSettings
from csdctl.worker.group.values import (
    LinkLostError, PeerFaultError, RankLostError, StepVoidError)
from csdctl.worker.protocol.sandbox import link_address
run, rank, servers, sizes, hub_key, link_key, max_bytes, hub_command = json.loads(sys.argv[1])

def say(answer):
    print(json.dumps(answer), flush=True)

def on_waiting(missing):
    say({"missing": missing})

if rank in servers:
    settings = HubSettings(run, rank, hub_key, link_key, tuple(servers), tuple(map(tuple, sizes)), max_bytes)
    ranks = HubCommunicator(HubProcess(hub_command), settings, on_waiting)
else:
    address = link_address(run, rank, link_key)
    ranks = Communicator(rank, tuple(map(tuple, sizes)), max_bytes, on_waiting, address)
say("listening")

def connect():
    while True:
        try:
            ranks.connect(lambda: None)
            ranks.join(f"hash of {rank}")
            ranks.take_state()
            return ranks.members
        except LinkLostError:
            pass

def make_vector(seed, size):
    vector = np.random.default_rng([seed, rank]).standard_normal(size, np.float32)
    tail = np.zeros(4 + len(servers), np.float32)
    tail[0], tail[3 + rank], tail[-1] = 8, 0.5, 2
    vector[-len(tail):] = tail
    return vector

def begin(others, is_waiting=True):
    while is_waiting and not set(others) <= set(ranks.joining):
        ranks.await_joining()
    ranks.admit(others)
    ranks.gather(None, type(None))
    return give(others)

def give(others):
    for other in others:
        ranks.give_state(other, b"")
    ranks.admitted = set()
    return ranks.members

def sum_up(seed, number=0, code="", checks=True):
    size = sizes[number][0]
    vector = ranks.local[:size]
    vector[:] = make_vector(seed, size)
    exec(code)
    counts = {other: 8.0 for other in ranks.members}
    total = ranks.sum(ranks.local, counts if checks else None, checks_finite=checks)[:size]
    sha = hashlib.sha256(total.tobytes()).hexdigest()
    return {"sha": sha, "counted": ranks.counted, "members": ranks.members}

def gather(value, kind="str"):
    values = ranks.gather(value, {"str": str, "int": int}[kind])
    return {"values": values, "members": ranks.members}

def look():
    ranks.look()
    return {"joining": ranks.joining}

def admit(others):
    ranks.look()
    ranks.admit(others)

def send(other, size):
    ranks.send(other, bytes([7]) * size, "samples")

def receive(other, max_bytes):
    return sum(ranks.receive(other, max_bytes, "samples"))

def note(name):
    noted, value = getattr(ranks, name), []
    setattr(ranks, name, value)
    return noted

def traffic():
    return [[row.what, row.sender, row.receiver, row.num_bytes] for row in ranks.traffic()]

for request in sys.stdin:
    name, *arguments = json.loads(request)
    try:
        function = globals().get(name) or getattr(ranks, name)
        say({"done": function(*arguments)})
    except PeerFaultError as fault:
        say({"fault": fault.rank, "message": fault.message})
    except RankLostError as loss:
        say({"lost": loss.rank})
    except StepVoidError:
        say({"void": ranks.members})
    except LinkLostError:
        say("link lost")
"""


def build_mpirun(*ends: Sequence[str], environments: Sequence[Mapping[str, str]] = ()) -> list[str]:
    """Return the command line of mpirun with one process for each of `ends`."""
    options = [word for option in COMMON_OPTIONS if "node" not in option for word in option.split()]
    contexts: list[str] = []
    for number, end in enumerate(ends):
        variables = [f"{key}={value}" for key, value in environments[number].items()] if environments else []
        contexts += [":"] * bool(number) + ["-np", "1", "env", *variables, *end]
    return [str(Path(sys.prefix) / "bin" / "mpirun"), *options, "--map-by", ":OVERSUBSCRIBE", *contexts]


@contextlib.contextmanager
def mpirun(command: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run mpirun; kill what it has started at the end."""
    # A killed mpirun leaves $TMPDIR/ompi.PID, and another one with the same number then refuses to start.
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ALLOW_ROOT, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill_session(process.pid)  # its processes are in groups of their own
            process.kill()
            process.wait()


@contextlib.contextmanager
def link(
    run_id: str, rank: int, hub_key: str = HUB_KEY, link_key: str = LINK_KEY, hostile: str = ""
) -> Iterator["subprocess.Popen[bytes]"]:
    """Keep mpirun running with both ends of the link of a rank.

    `hostile`: a program in the place of the node's end.
    """
    end = [sys.executable, "-m", "csdctl.worker", "link", "--rank", str(rank), "--marker", run_id]
    far_end = [sys.executable, "-c", hostile, str(rank)] if hostile else end
    sockets = hub_address(run_id, rank, hub_key), link_address(run_id, rank, link_key)
    environments = [{"CSDCTL_SOCKETS": name} for name in sockets]
    with mpirun(build_mpirun(end, far_end, environments=environments)) as process:
        yield process


class Group:
    """Ranks that do what their input asks for: a name of `RANK`, or of a method, and its arguments."""

    def __init__(
        self,
        servers: Sequence[int] = (0, 0, 0),
        sizes: Sequence[tuple[int, int]] = ((NUM_ELEMENTS, 0),),
        hostile: Mapping[int, str] = {},
        max_bytes: int = MAX_BYTES,
        linked: Collection[int] | None = None,
    ) -> None:
        """`servers`: the rank of the server of every rank. `linked`: ranks whose links start; by default all.

        `hostile` as for `link`.
        """
        self.run_id = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.servers, self.sizes, self.max_bytes, self._hostile = servers, sizes, max_bytes, hostile
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._said = [b""] * len(servers)
        self._links: dict[int, contextlib.ExitStack] = {}
        self.mpiruns: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(len(servers)):
            self.ranks.append(self._start_rank(rank))
        for rank in range(len(servers)):
            assert self.receive(rank) == "listening"
        for rank in self.others if linked is None else linked:
            self.start_link(rank)

    @property
    def others(self) -> range:
        """All ranks but rank 0."""
        return range(1, len(self.servers))

    def _start_rank(self, rank: int) -> "subprocess.Popen[bytes]":
        keys = [HUB_KEY, LINK_KEY]
        settings = [self.run_id, rank, list(self.servers), self.sizes, *keys, self.max_bytes, HUB_COMMAND]
        return subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def restart_rank(self, rank: int) -> None:
        """Start a rank that was killed, or end it first, and the link of it with it."""
        self.end_link(rank)
        self.ranks[rank].kill()
        self.ranks[rank].wait()
        self._said[rank] = b""
        self.ranks[rank] = self._start_rank(rank)
        assert self.receive(rank) == "listening"
        self.start_link(rank)

    def start_link(self, rank: int) -> None:
        """Start mpirun with the link of a rank, which waits for it from then on."""
        self.send(rank, "connect")
        addresses = hub_address(self.run_id, rank, HUB_KEY), link_address(self.run_id, rank, LINK_KEY)
        assert eventually(lambda: all(name in Path("/proc/net/unix").read_text() for name in addresses))
        self._links[rank] = contextlib.ExitStack()
        running = link(self.run_id, rank, hostile=self._hostile.get(rank, ""))
        self.mpiruns[rank] = self._links[rank].enter_context(running)

    def end_link(self, rank: int) -> None:
        """Kill the mpirun of a rank, and its processes."""
        self._links.pop(rank, contextlib.ExitStack()).close()

    def begin(self) -> None:
        """Let all ranks take part."""
        assert sorted(self.call(0, "begin", list(self.others))) == list(range(len(self.servers)))
        for rank in self.others:
            assert self.answer(rank) == list(range(len(self.servers)))

    def send(self, rank: int, *request: Any) -> None:
        """Let a rank begin something."""
        stdin = self.ranks[rank].stdin
        assert stdin
        stdin.write(json.dumps(request).encode() + b"\n")

    def receive(self, rank: int) -> Any:
        """Return what a rank says next."""
        stdout = self.ranks[rank].stdout
        assert stdout
        deadline = time.monotonic() + scaled(ANSWER_S)
        while b"\n" not in self._said[rank]:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(stdout.fileno(), 1 << 16) if ready else b""
            assert received, f"rank {rank} does not answer"
            self._said[rank] += received
        line, _, self._said[rank] = self._said[rank].partition(b"\n")
        return json.loads(line)

    def answer(self, rank: int) -> Any:
        """Return what a rank answers, after whatever it says about waiting for others."""
        while isinstance(answer := self.receive(rank), dict) and "missing" in answer:
            pass
        return answer["done"] if isinstance(answer, dict) and "done" in answer else answer

    def call(self, rank: int, *request: Any) -> Any:
        """Let one rank do something; return its answer."""
        self.send(rank, *request)
        return self.answer(rank)

    def all(self, *request: Any, ranks: Collection[int] | None = None) -> list[Any]:
        """Let all ranks, or these, do the same; return their answers."""
        chosen = range(len(self.servers)) if ranks is None else ranks
        for rank in chosen:
            self.send(rank, *request)
        return [self.answer(rank) for rank in chosen]

    def sum(self, seed: int, *arguments: Any, ranks: Collection[int] | None = None) -> Any:
        """Let ranks sum their vectors of a seed; return the answer, which must be the same on all."""
        answers = self.all("sum_up", seed, *arguments, ranks=ranks)
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def await_lost(self, rank: int) -> tuple[str, bool]:
        """Wait until rank 0 knows that a rank is lost; return why, and whether that is its fault."""
        losses: list[Any] = []

        def is_lost() -> bool:
            self.call(0, "look")
            losses.extend(loss for loss in self.call(0, "note", "lost") if loss[0] == rank)
            return bool(losses)

        assert eventually(is_lost)
        return losses[0][1], losses[0][2]

    def end(self) -> None:
        """End everything."""
        for rank in [*self._links]:
            self.end_link(rank)
        for process in self.ranks:
            process.kill()
            process.wait()


def make_vector(seed: int, rank: int, num_ranks: int, size: int) -> Any:
    """Return the vector of a rank, as RANK makes it."""
    vector = np.random.default_rng([seed, rank]).standard_normal(size, np.float32)
    tail = np.zeros(4 + num_ranks, np.float32)
    tail[0], tail[3 + rank], tail[-1] = SAMPLES, 0.5, 2
    vector[-len(tail) :] = tail
    return vector


def add(vectors: Sequence[Any]) -> Any:
    """Add vectors from the first to the last."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def expect_sum(
    seed: int,
    servers: Sequence[int],
    size: tuple[int, int] = (NUM_ELEMENTS, 0),
    ranks: Collection[int] | None = None,
) -> str:
    """Return the SHA-256 of the sum of `ranks`: nodes, then the server itself; servers, then the host.

    `size`: the elements, and how many of them are sent as bfloat16.
    """
    length, num_halved = size
    present = range(len(servers)) if ranks is None else ranks

    def on_wire(vector: Any) -> Any:
        halves = np.empty(num_halved, np.uint16)
        bf16.to_bf16(vector[:num_halved], halves)
        return np.concatenate([bf16.from_bf16(halves), vector[num_halved:]])

    def make(rank: int) -> Any:
        return make_vector(seed, rank, len(servers), length)

    def sum_of(server: int) -> Any:
        nodes = [rank for rank in present if servers[rank] == server != rank]
        return add([*(on_wire(make(rank)) for rank in nodes), make(server)])

    other_servers = [rank for rank in present if rank and servers[rank] == rank]
    total = sum_of(0)
    if other_servers:
        total = add([on_wire(sum_of(server)) for server in other_servers]) + total
    return hashlib.sha256(on_wire(total).tobytes()).hexdigest()
