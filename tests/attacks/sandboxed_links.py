"""Ranks on this machine with real links: mpirun in its sandbox, and each daemon in one of its own.

A hostile node is its real rank, and any program in the place of its end of the link.
"""

import os
import secrets
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.launch.mpirun import Mpirun
from csdctl.runs.directory import RunDirectory
from csdctl.shipping.store import store_bytes
from csdctl.shipping.worker_zip import pack_worker
from csdctl.supervision.run_setup import Link
from csdctl.transport.local import LocalSession
from csdctl.worker.process.machine import list_interfaces
from csdctl.worker.protocol.sandbox import SandboxCheck
from tests.patience import eventually, scaled

SECRET = 12345.678
"""Behind the first element of the vector of a node's rank."""
RANK = """
import sys
import numpy as np
from csdctl.worker.group import communicator
from csdctl.worker.group.hub import HubSettings
from csdctl.worker.protocol.sandbox import link_address
run, link_key, hub_key = sys.argv[1:4]
rank, size, num_expected, secret = *map(int, sys.argv[4:7]), float(sys.argv[7])
sizes = ((4096, 0),)
hub_command = [sys.executable, "-m", "csdctl.worker", "hub", "--descriptor"]
say = lambda *words: print(*words, flush=True)
if rank == 0:
    settings = HubSettings(run, 0, hub_key, "", (0,) * size, sizes, 1 << 26)
    ranks = communicator.HubCommunicator(communicator.HubProcess(hub_command), settings, lambda missing: None)
    say("ready")
    while len(ranks.joining) < num_expected:
        ranks.await_joining()
    ranks.admit(list(ranks.joining))
    ranks.gather("start", str)
    for other in ranks.members[1:]:
        ranks.give_state(other, b"")
else:
    ranks = communicator.Communicator(rank, sizes, 1 << 26, address=link_address(run, rank, link_key))
    say("ready")
    ranks.connect(lambda: None)
    ranks.join("")
    ranks.take_state()
say("joined")
while True:
    if rank == 0 and not sys.stdin.readline().strip():
        break
    ranks.local[:] = secret if rank else 0
    ranks.local[0] = rank + 1
    total = ranks.sum(ranks.local)
    say("sum", float(total[0]), *ranks.counted)
    if rank == 0:
        for lost, reason, _ in ranks.lost:
            say("lost", lost, reason)
        ranks.lost.clear()
        say("over")
"""
"""With each line on its standard input, rank 0 takes a step. A rank's vector is its number plus one."""


HOSTILE_SANDBOX = """
import dataclasses, sys
worker = next(place for place, word in enumerate(sys.argv) if word.endswith(".pyz"))
sys.argv = sys.argv[worker:]
sys.path.insert(0, sys.argv[0])
from csdctl.worker.protocol.sandbox import SandboxPolicy
from csdctl.worker.sandbox import program
paths, read = program.python_paths, program.from_json
program.python_paths = lambda: [*paths(), {directory!r}]
def read_and_change(hint, text):
    policy = read(hint, text)
    if hint is not SandboxPolicy:
        return policy
    shell, option, command = policy.command
    command = "PYTHONPATH={directory}/site; export PYTHONPATH; " + command
    return dataclasses.replace(policy, command=(shell, option, command))
program.from_json = read_and_change
sys.exit(program.run_sandbox())
"""
HOSTILE_PYTHON = """#!/bin/sh
case "$*" in
  *" sandbox "*) shift; exec {python} {directory}/sandbox.py "$@" ;;
  *" link "*) PYTHONPATH={directory}/site exec {python} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""


def write_hostile_python(directory: Path, code: str) -> str:
    """Write a node's Python whose links run `code` first; return its path. The links may read `directory`."""
    (directory / "site").mkdir(parents=True)
    (directory / "site" / "sitecustomize.py").write_text(code)
    (directory / "sandbox.py").write_text(HOSTILE_SANDBOX.format(directory=str(directory)))
    python = directory / "python"
    python.write_text(HOSTILE_PYTHON.format(python=sys.executable, directory=directory))
    for path in (python, directory, directory / "site"):
        path.chmod(0o755)
    return str(python)


STALL_S = 5.0
"""After so long without a sum, a rank that others wait for is taken for one that is stopped."""


@dataclass
class Links:
    """Ranks, their links, and where what they print is."""

    directory: Path
    mpirun: Mpirun
    ranks: list[subprocess.Popen[str]]
    links: dict[int, Link] = field(default_factory=dict)

    def step(self, hostile: int = 0) -> list[str]:
        """Take a step; return what rank 0 has printed of it: 'sum', the sum, and the ranks in it.

        Lines that begin with 'lost' follow, and 'over'. The link of `hostile` is ended when its rank stalls.
        """
        stdin, stdout = self.ranks[0].stdin, self.ranks[0].stdout
        assert stdin
        stdin.write("step\n")
        stdin.flush()
        if hostile and not select.select([stdout], [], [], scaled(STALL_S))[0]:
            self.links[hostile].end()
        return self.read(0)

    def read(self, rank: int) -> list[str]:
        """Return the next line of a rank as words."""
        stdout = self.ranks[rank].stdout
        assert stdout
        return stdout.readline().split()

    def start_link(self, rank: int) -> None:
        """Start the link of a rank."""
        (path, *_) = self.mpirun.find_paths(f"csd{rank}", HOST_NAME)
        self.links[rank] = Link([self.mpirun.build_link(rank, f"csd{rank}", HOST_NAME, path)], lambda _: None)

    def printed(self) -> str:
        """Return what all links have printed."""
        return "".join(path.read_text() for path in sorted(self.directory.rglob("*.log")))


@contextmanager
def sandboxed_links(
    pythons: Mapping[int, str], num_nodes: int = 2, ranks: Sequence[int] = (1, 2)
) -> Iterator[Links]:
    """Start the host's rank and those of nodes, and the links of `ranks`; `pythons` are of hostile nodes."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        names = [f"csd{rank}" for rank in range(1, num_nodes + 1)]
        nodes = tuple(
            Node(name, address="127.0.0.1", python=pythons.get(rank, sys.executable))
            for rank, name in enumerate(names, start=1)
        )
        worker = store_bytes(pack_worker(), ".pyz", directory)
        (directory / "runs").mkdir()
        run = RunDirectory(directory / "runs" / f"test-{secrets.token_hex(4)}")
        keys = secrets.token_hex(16), secrets.token_hex(16)
        sessions = {name: LocalSession(name, directory) for name in (HOST_NAME, *names)}
        machines = [HOST_NAME, *names]
        mpirun = Mpirun(
            Fleet(nodes, network="127.0.0.0/8"),
            {name: Facts(name, prefix=sys.prefix) for name in machines},
            *(run, sessions, worker.path),
            dict.fromkeys(machines, SandboxCheck("", interfaces=tuple(list_interfaces()))),
            *keys,
        )
        processes = []
        for rank in range(num_nodes + 1):
            numbers = rank, num_nodes + 1, len(ranks), SECRET
            arguments = [run.run_id, *keys, *map(str, numbers)]
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        links = Links(directory, mpirun, processes)
        for rank in range(num_nodes + 1):
            assert links.read(rank) == ["ready"]
        stack.callback(_end, links)
        for rank in ranks:
            links.start_link(rank)
        for rank in (0, *ranks):
            assert links.read(rank) == ["joined"]
        yield links


def _end(links: Links) -> None:
    for link in links.links.values():
        link.end()
    assert eventually(lambda: all(link.has_ended for link in links.links.values()))
