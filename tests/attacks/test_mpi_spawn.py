"""A compromised node uses what MPI gives every member of a job: it starts commands on the host.

Whoever controls a node controls its Python: its end of the link is a program of the attacker's, a member of
its MPI job like any other.
"""

import os
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.launch.mpirun import Mpirun
from csdctl.worker.protocol.sandbox import SandboxPolicy, user_of_link
from tests.attacks.sandboxed_links import SECRET, Links, sandboxed_links, write_hostile_python
from tests.patience import eventually

HOSTILE, HONEST = 1, 2
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


COMMAND = """\
exec 2>&1
echo "spawned as $(id -u) in $PWD"
echo secret=$(cat {private})
echo owned > {target} && echo wrote
ls {directory} && echo listed
kill -0 {pid} && echo signalled
echo agent=$SSH_AUTH_SOCK
echo over
sleep 1
"""


@pytest.mark.attack(2)
def test_commands_that_a_node_starts_reach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    private, target, project = tmp_path / "private.txt", tmp_path / "owned", tmp_path / "project"
    private.write_text("samples")
    project.mkdir()
    command = COMMAND.format(private=private, target=target, directory=project, pid=os.getpid())
    with attacked(tmp_path, ["-c", command]) as links:
        printed = links.printed()
    print(printed)
    assert len(re.findall("spawned as [0-9]+ ", printed)) == 2, "the attack was not made on both machines"
    assert not target.exists()
    for success in ("samples", "wrote", "listed", "signalled", "agent=/run"):
        assert success not in printed
