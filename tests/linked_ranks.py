"""Ranks and their links: real processes, MPI included; the links are this program's children under mpirun."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from csdctl.launch.mpi_job import kill_session
from csdctl.launch.mpirun import ALLOW_ROOT, COMMON_OPTIONS
from tests.patience import scaled

SIZE = 3
ANSWER_S = 120.0
"""A rank that waits for links of an mpirun that has died never answers."""
NUM_ELEMENTS = (1 << 18) + 5
"""The last ones are [n, stop, seconds of each rank, norm]."""
SAMPLES = 8
"""Number of samples of every rank that rank 0 expects in a `checked` sum."""
RANK = """
import json, sys
import numpy as np
from csdctl.worker.group.values import LinkLostError, PeerFaultError
from csdctl.worker.group.communicator import LinkCommunicator
from csdctl.worker.group.channel import Listener
from csdctl.worker.group.channel import SharedVectors
from csdctl.worker.group.values import ExpectedTails
run, rank = sys.argv[1], int(sys.argv[2])
listener = Listener(run, rank)
memory = SharedVectors(int(sys.argv[3]))
print("listening", flush=True)
channel, greeting = listener.accept_link(1, lambda: False)
def on_waiting(missing):
    print(json.dumps({"missing": missing}), flush=True)
ranks = LinkCommunicator(channel, greeting, memory, on_waiting)
for request in sys.stdin:
    words = request.split()
    try:
        if words[0] == "choose":
            pairs = [(word + "/0").split("/")[:2] for word in words[2:]]
            sizes = [(int(size), int(num_halved)) for size, num_halved in pairs]
            ranks.choose_collective(words[1] if len(words) > 1 else "", sizes)
            print(json.dumps(ranks.collective), flush=True)
        elif words[0] == "sum":
            memory.local[:] = np.arange(len(memory.local)) * (ranks.rank + 1)
            total = ranks.sum(memory.local)
            bits = int(total.view(np.uint32).sum())
            print(json.dumps([float(total[1]), float(total[-1]), bits]), flush=True)
        elif words[0] == "part":
            size = int(words[1])
            memory.local[:size] = np.arange(size) * (ranks.rank + 1)
            total = ranks.sum(memory.local)[:size]
            print(json.dumps([float(total[-1]), int(total.view(np.uint32).sum())]), flush=True)
        elif words[0] == "checked":
            tail = [float(words[2]) if len(words) > 2 else 8.0, 0, 0, 0, 0, 9.0]
            tail[2 + ranks.rank] = 0.5
            memory.local[:] = float(words[1]) if len(words) > 1 else 1.0
            memory.local[-6:] = tail
            expected = ExpectedTails(len(memory.local) - 6, (0, 1, 2), (8.0, 8.0, 8.0))
            total = ranks.sum(memory.local, None if ranks.rank else expected)
            print(json.dumps([str(total[0]), *map(float, total[-6:-1])]), flush=True)
        elif words[0] == "waits":
            print(json.dumps(ranks.waits), flush=True)
            ranks.waits = []
        elif words[0] == "not-finite":
            print(json.dumps(ranks.find_not_finite()), flush=True)
        elif words[0] == "allgather":
            print(json.dumps(ranks.allgather({"rank": ranks.rank}, dict[str, int])), flush=True)
        elif words[0] == "send":
            ranks.send(int(words[1]), np.full(5000, 7, np.uint8), "samples")
            print("1", flush=True)
        elif words[0] == "post":
            content = np.full(int(words[2]), 7, np.uint8)
            ranks.send(int(words[1]), content, "samples", is_waiting=False)
            print("1", flush=True)
        elif words[0] == "expect":
            ranks.expect(int(words[1]), int(words[2]))
            print("1", flush=True)
        elif words[0] == "receive":
            print(json.dumps(sum(ranks.receive(int(words[1]), int(words[2]), "samples"))), flush=True)
        elif words[0] == "traffic":
            rows = [[one.what, one.sender, one.receiver, one.num_bytes] for one in ranks.traffic()]
            print(json.dumps(rows), flush=True)
        elif words[0] == "close":
            ranks.close()
            print("1", flush=True)
    except PeerFaultError as fault:
        ranks.disconnect()
        print(json.dumps({"culprit": fault.rank, "message": fault.message}), flush=True)
    except LinkLostError:
        print(json.dumps("lost"), flush=True)
"""


@contextlib.contextmanager
def links(
    run_id: str,
    ranks: Sequence[int],
    hostile: Mapping[int, str] = {},
    errors: IO[bytes] | None = None,
    level: str = "",
) -> Iterator["subprocess.Popen[bytes]"]:
    """Keep mpirun running with the links of `ranks`.

    `hostile`: programs that take the place of the links of some ranks, given run and rank.
    """
    # A killed mpirun leaves $TMPDIR/ompi.PID, and another one with the same number then refuses to start.
    with tempfile.TemporaryDirectory() as scratch:
        process = _start_links(run_id, ranks, hostile, errors, scratch, level)
        try:
            yield process
        finally:
            kill_session(process.pid)  # the links are mpirun's children, in groups of their own
            process.kill()
            process.wait()


def _start_links(
    run_id: str,
    ranks: Sequence[int],
    hostile: Mapping[int, str],
    errors: IO[bytes] | None,
    scratch: str,
    level: str,
) -> "subprocess.Popen[bytes]":
    options = [word for option in COMMON_OPTIONS for word in option.split() if "node" not in option]
    contexts: list[str] = []
    for number, rank in enumerate(ranks):
        link = [sys.executable, "-m", "csdctl.worker", "link", "--run", run_id, "--rank", str(rank)]
        link += ["--generation", "1", "--level", level]
        if rank in hostile:
            link = [sys.executable, "-c", hostile[rank], run_id, str(rank)]
        contexts += [":"] * bool(number) + ["-np", "1", *link]
    return subprocess.Popen(
        [str(Path(sys.prefix) / "bin" / "mpirun"), *options, "--map-by", ":OVERSUBSCRIBE", *contexts],
        env={**os.environ, **ALLOW_ROOT, "TMPDIR": scratch},
        stdout=subprocess.DEVNULL,
        stderr=errors or subprocess.DEVNULL,
        start_new_session=True,
    )


class Group:
    """Ranks that do what the lines on their input ask for, joined by links under one mpirun."""

    def __init__(self, run_id: str, hostile: Mapping[int, str] = {}) -> None:
        """`hostile` as for `start_links`."""
        self.run_id = run_id
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, run_id, str(rank), str(NUM_ELEMENTS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            for rank in range(SIZE)
        ]
        self._said = [b""] * SIZE
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this process
        for rank in range(SIZE):
            assert self.receive(rank, parse=False) == "listening"
        self._links = contextlib.ExitStack()
        self.mpirun = self._links.enter_context(links(run_id, range(SIZE), hostile, self._errors))

    def send(self, rank: int, request: str) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin
        stdin.write(request.encode() + b"\n")

    def receive(self, rank: int, *, parse: bool = True) -> Any:
        stdout = self.ranks[rank].stdout
        assert stdout
        deadline = time.monotonic() + scaled(ANSWER_S)
        while b"\n" not in self._said[rank]:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(stdout.fileno(), 1 << 16) if ready else b""
            assert received, f"rank {rank} does not answer; mpirun says: {self._mpirun_says()}"
            self._said[rank] += received
        line, _, self._said[rank] = self._said[rank].partition(b"\n")
        return json.loads(line) if parse else line.decode().strip()

    def _mpirun_says(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def answer(self, rank: int) -> Any:
        """Return what a rank answers, after whatever it says about waiting for others."""
        while isinstance(answer := self.receive(rank), dict) and "missing" in answer:
            pass
        return answer

    def all(self, request: str) -> list[Any]:
        for rank in range(SIZE):
            self.send(rank, request)
        return [self.answer(rank) for rank in range(SIZE)]

    def end(self) -> None:
        self._links.close()
        for process in self.ranks:
            process.kill()
            process.wait()
