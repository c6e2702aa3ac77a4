"""A compromised node uses its link: it sends in the name of others, and starts commands on the host by MPI.

The links are real, with mpirun in its sandbox, and each daemon in another one. Whoever controls a node
controls its Python. Its end of the link is a program of the attacker's, a member of its MPI job like any
other.
"""

import os
import re
import secrets
import select
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.launch.mpirun import Mpirun
from csdctl.runs.directory import RunDirectory
from csdctl.shipping.store import pack_worker, store_bytes
from csdctl.supervision.run_setup import Link
from csdctl.transport.local import LocalSession
from csdctl.worker.process.machine import list_interfaces
from csdctl.worker.protocol.sandbox import SandboxCheck, SandboxPolicy, user_of_link
from tests.patience import eventually, scaled

HOSTILE, HONEST = 1, 2
"""Ranks of nodes."""
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


HONEST_SUMS = (["sum", "4.0", "0", "2"], ["sum", "6.0", "0", "1", "2"])
"""Of a step with and without the hostile node, whose own vector is honest."""

HEAD = f"""
import json, os, socket, struct, sys
if "link" in sys.orig_argv:
    worker = next(word for word in sys.orig_argv if word.endswith(".pyz"))
    sys.path.insert(0, os.path.abspath(worker))
    from csdctl.worker.group import link
    from csdctl.worker.group.channel import Letter, NUMBER
    OTHER, sequence = {HONEST}, [0]

    def frame(sender, tag, content):
        sequence[0] += 1
        head = struct.pack("=BBHI", 0x41, 1, 0, 14 + len(content))
        return head + struct.pack("=BBHiiH", 0x41, 0, 0, sender, tag, sequence[0]) + content

    def write_to_mpi(content):
        descriptor = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{{name}}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                        descriptor = max(descriptor, int(name))
            except OSError:
                pass
        os.write(descriptor, content)

    honest = link.RankEnd.handle_local
    def handle_local(end, letter, content):
        if letter == Letter.VECTOR:
"""
TAIL = """\
        honest(end, letter, content)
    link.RankEnd.handle_local = handle_local
"""
CHUNK_OF_OTHERS = "struct.pack('=4096f', *[1e9] * 4096)"
FORGERIES = {
    "a frame in the name of another node": f"write_to_mpi(frame(OTHER, link.CHUNK, {CHUNK_OF_OTHERS}))",
    "a frame in the name of the host": f"write_to_mpi(frame(0, link.CHUNK, {CHUNK_OF_OTHERS}))",
    "another node's vector": "letter, content = Letter.VECTOR, json.dumps([OTHER]).encode()",
    "a vector of both nodes": "letter, content = Letter.VECTOR, json.dumps([1, OTHER]).encode()",
    "the sum": "end.pass_over(Letter.TOTAL, bytes(1))",
    "the loss of another node": "end.pass_over(Letter.NOTE, json.dumps([[OTHER, 'is lost', True]]).encode())",
    "another node that joins": "end.pass_over(Letter.JOIN, NUMBER.pack(OTHER))",
    "bytes of another node": "end.pass_over(Letter.DATA, NUMBER.pack(OTHER) + b'state')",
    "lines of mpirun": """for _ in range(10):
                print("Remote daemon: [prterun-host-1@0,2]", flush=True)
                print("Remote host: rank2-csd2", file=sys.stderr, flush=True)""",
}
"""Letters and frames in the name of others, and what mpirun prints when a daemon is lost."""


@pytest.mark.attack(21)
@pytest.mark.parametrize("name", FORGERIES)
def test_node_speaks_for_itself_alone(tmp_path: Path, name: str) -> None:
    python = write_hostile_python(tmp_path / "hostile", f"{HEAD}            {FORGERIES[name]}\n{TAIL}")
    with sandboxed_links({HOSTILE: python}) as links:
        lost = []
        for _ in range(5):
            summed = links.step(HOSTILE)
            assert summed in HONEST_SUMS, links.printed()
            while (words := links.read(0))[0] == "lost":
                lost.append(words)
            assert words == ["over"]
        assert all(words[1] == str(HOSTILE) for words in lost), lost
        assert not links.links[HONEST].has_ended
        if name == "lines of mpirun":
            assert lost == []
            # mpirun forwards lines while the ranks go on.
            assert eventually(lambda: "prterun-host-1" in links.printed()), "the attack was not made"
        elif name != "a frame in the name of the host":
            assert lost, "the attack was not noticed"


MEMBER = """
import os, sys, traceback
if "link" in sys.orig_argv:
    try:
        from mpi4py import MPI
        info = MPI.Info.Create()
        info["map_by"] = "node:OVERSUBSCRIBE"
        MPI.COMM_SELF.Spawn("/bin/sh", args={arguments!r}, maxprocs=2, info=info)
    except BaseException:
        traceback.print_exc()
        os._exit(3)
"""


@contextmanager
def attacked(directory: Path, arguments: list[str]) -> Iterator[Links]:
    """Let a node take part, and another one start a shell on both machines."""
    python = write_hostile_python(directory / "hostile", MEMBER.format(arguments=arguments))
    with sandboxed_links({HOSTILE: python}, ranks=[HONEST]) as links:
        for _ in range(3):
            assert links.step() == ["sum", "4.0", "0", "2"]
            assert links.read(0) == ["over"]
        links.start_link(HOSTILE)
        assert eventually(lambda: links.printed().count("\nover") + links.printed().count(": over") >= 2)
        yield links


@pytest.mark.attack(2)
@pytest.mark.attack(20)
@pytest.mark.parametrize("is_confined", [True, False])
def test_program_that_a_node_starts_on_the_host_does_not_see_the_gradients_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_confined: bool
) -> None:
    build = Mpirun._build_policy

    def build_policy(mpirun: Mpirun, rank: int, machine: str, *arguments: object) -> SandboxPolicy:
        policy = build(mpirun, rank, machine, *arguments)  # type: ignore[arg-type]
        return replace(policy, is_confined=is_confined)

    monkeypatch.setattr(Mpirun, "_build_policy", build_policy)
    program = Path(__file__).with_name("spying_program.py").read_text()
    run = ["-c", 'exec "$0" "$@"', sys.executable, "-c", program]  # mpirun asks for a file open to all
    arguments = [*run, (4 * struct.pack("=f", SECRET)).hex(), str(os.getpid())]
    with attacked(tmp_path, arguments) as links:
        printed = links.printed()
        assert not is_confined or links.step() == ["sum", "4.0", "0", "2"]
    print(printed)
    users = set(map(int, re.findall(r"spawned as (\d+)", printed)))
    reached = set(re.findall(r"reached: (\w+)", printed))
    if is_confined:
        assert users == {user_of_link(links.mpirun.run.run_id, HOSTILE) if os.getuid() == 0 else os.getuid()}
        assert reached == set()
    else:
        assert reached >= {"memory", "files", "environment", "signal", "signal_csdctl", "links"}
