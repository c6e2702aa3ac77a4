"""A compromised node uses its link: it sends in the name of others, and starts commands on the host by MPI.

The links are real, with mpirun in its sandbox, and each daemon in another one. Whoever controls a node
controls its Python. Its end of the link is a program of the attacker's, a member of its MPI job like any
other.
"""

import os
import re
import select
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tests.linked_ranks import HUB_KEY, LINK_KEY, Group, expect_sum
from tests.patience import eventually, scaled

HOSTILE, HONEST = 1, 2
"""Ranks of nodes."""
SERVERS, SIZE = (0, 0, 0), (4096, 0)
SECRET = 12345.678
"""The elements of the vectors of nodes, where it is looked for."""

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


class SandboxedGroup(Group):
    """The host and two nodes with links as csdctl starts them; `python` is that of the hostile node."""

    def __init__(self, directory: Path, python: str, linked: Sequence[int] = (HOSTILE, HONEST)) -> None:
        super().__init__(SERVERS, (SIZE,), linked=())
        self.directory = directory
        self.links: dict[int, Link] = {}
        pythons = {"csd1": python, "csd2": sys.executable}
        nodes = [Node(name, address="127.0.0.1", python=path) for name, path in pythons.items()]
        worker = store_bytes(pack_worker(), ".pyz", directory)
        (directory / "runs").mkdir()
        machines = [HOST_NAME, *pythons]
        self.mpirun = Mpirun(
            Fleet(tuple(nodes), network="127.0.0.0/8"),
            {name: Facts(name, prefix=sys.prefix) for name in machines},
            RunDirectory(directory / "runs" / self.run_id),
            {name: LocalSession(name, directory) for name in machines},
            worker.path,
            dict.fromkeys(machines, SandboxCheck("", interfaces=tuple(list_interfaces()))),
            LINK_KEY,
            HUB_KEY,
        )
        for rank in linked:
            self.start_link(rank)
        assert self.call(0, "begin", list(linked)) == [0, *linked]
        for rank in linked:
            assert self.answer(rank) == [0, *linked]

    def start_link(self, rank: int) -> None:
        """Start the link of a rank in its sandboxes."""
        self.send(rank, "connect")
        (path, *_) = self.mpirun.find_paths(f"csd{rank}", HOST_NAME)
        self.links[rank] = Link([self.mpirun.build_link(rank, f"csd{rank}", HOST_NAME, path)], lambda _: None)

    def end_link(self, rank: int) -> None:
        """End the link of a rank."""
        self.links[rank].end()
        assert eventually(lambda: self.links[rank].has_ended)

    def step(self, seed: int, ranks: Sequence[int], code: str = "") -> Any:
        """Let ranks sum their vectors; return the answer of rank 0.

        The link of the hostile rank is ended when that stalls, as csdctl ends the rank of a stopped machine.
        """
        for rank in ranks:
            self.send(rank, "sum_up", seed, 0, code, False)
        if HOSTILE in ranks and not select.select([self.ranks[0].stdout], [], [], scaled(STALL_S))[0]:
            self.end_link(HOSTILE)
        return self.answer(0)

    def end(self) -> None:
        """End everything."""
        for rank in self.links:
            self.end_link(rank)
        super().end()

    def printed(self) -> str:
        """Return what all links have printed."""
        return "".join(path.read_text() for path in sorted(self.directory.rglob("*.log")))


@contextmanager
def sandboxed(python: str, linked: Sequence[int] = (HOSTILE, HONEST)) -> Iterator[SandboxedGroup]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        group = SandboxedGroup(Path(directory), python, linked)
        try:
            yield group
        finally:
            group.end()


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
    with sandboxed(python) as group:
        lost = set()
        for seed in range(5):
            summed = group.step(seed, range(3))
            assert {0, HONEST} <= set(summed["counted"]), group.printed()
            assert summed["sha"] == expect_sum(seed, SERVERS, SIZE, summed["counted"]), group.printed()
            assert group.answer(HONEST) == summed
            lost |= {rank for rank, _, _ in group.call(0, "note", "lost")}
        assert not group.links[HONEST].has_ended
        if name == "lines of mpirun":
            assert lost == set()
            # mpirun forwards lines while the ranks go on.
            assert eventually(lambda: "prterun-host-1" in group.printed()), "the attack was not made"
        elif name == "a frame in the name of the host":
            assert lost <= {HOSTILE}
        else:
            assert lost == {HOSTILE}, "the attack was not noticed"


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
def attacked(directory: Path, arguments: list[str]) -> Iterator[SandboxedGroup]:
    """Let a node take part, and another one start a shell on both machines."""
    python = write_hostile_python(directory / "hostile", MEMBER.format(arguments=arguments))
    with sandboxed(python, linked=[HONEST]) as group:
        sum_secrets(group)
        group.start_link(HOSTILE)
        assert eventually(lambda: group.printed().count("\nover") + group.printed().count(": over") >= 2)
        yield group


def sum_secrets(group: SandboxedGroup) -> None:
    """Let the host and the honest node sum vectors, of which the node's are secret."""
    summed = group.step(1, (0, HONEST), f"vector[:] = {SECRET} if rank else 0")
    assert summed["counted"] == [0, HONEST]
    assert group.answer(HONEST) == summed


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
    with attacked(tmp_path, arguments) as group:
        printed = group.printed()
        if is_confined:
            sum_secrets(group)
    print(printed)
    users = set(map(int, re.findall(r"spawned as (\d+)", printed)))
    reached = set(re.findall(r"reached: (\w+)", printed))
    if is_confined:
        assert users == {user_of_link(group.run_id, HOSTILE) if os.getuid() == 0 else os.getuid()}
        assert reached == set()
    else:
        assert reached >= {"memory", "files", "environment", "signal", "signal_csdctl", "links"}
