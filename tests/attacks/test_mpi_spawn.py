"""A compromised node uses what MPI gives every member of a job: it starts commands on the other machines.

Whoever controls a node controls its Python. It follows the protocol, with one exception: code of the
attacker's choice runs in its MPI processes, as that of their link, a member of the job like any other.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.emulated.running import csdctl, emulated
from tests.patience import scaled

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

SANDBOX = """
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
PYTHON = """#!/bin/sh
case "$*" in
  *" sandbox "*) shift; exec {python} {directory}/sandbox.py "$@" ;;
  *" link "*|*" mpi-check "*) PYTHONPATH={directory}/site exec {python} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""
MEMBER = """
import os, sys, traceback
if "mpi-check" in sys.orig_argv:
    try:
        from mpi4py import MPI
        info = MPI.Info.Create()
        info["map_by"] = "node:OVERSUBSCRIBE"
        MPI.COMM_SELF.Spawn("/bin/sh", args=["-c", {command!r}], maxprocs={num_machines}, info=info)
    except BaseException:
        traceback.print_exc()
        os._exit(3)
"""
COMMAND = """\
exec 2>&1
echo "spawned as $(id -u) in $PWD"
echo secret=$(cat {private})
echo owned > {target} && echo wrote
ls {directory} && echo listed
kill -0 {pid} && echo signalled
echo agent=$SSH_AUTH_SOCK
sleep 1
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("spawn"), 2, cpu=0.5) as directory:
        yield directory


@pytest.mark.attack(2)
def test_commands_that_a_node_starts_on_all_machines_reach_nothing(project: Path) -> None:
    private, target = project / "private.txt", project / "owned"
    private.write_text("samples")
    command = COMMAND.format(private=private, target=target, directory=project, pid=os.getpid())
    hostile = project / "hostile"
    (hostile / "site").mkdir(parents=True)
    (hostile / "site" / "sitecustomize.py").write_text(MEMBER.format(command=command, num_machines=3))
    (hostile / "sandbox.py").write_text(SANDBOX.format(directory=str(hostile)))
    (hostile / "python").write_text(PYTHON.format(python=sys.executable, directory=hostile))
    (hostile / "python").chmod(0o755)
    content = yaml.safe_load((project / "fleet.yaml").read_text())
    content["nodes"][1]["python"] = str(hostile / "python")
    (project / "hostile.yaml").write_text(yaml.safe_dump(content))
    options = ("--fleet", "hostile.yaml", "--mpi-timeout", f"{scaled(12):.0f}")
    done = csdctl(project, "doctor", *options, environment={**os.environ, "SSH_AUTH_SOCK": "/run/agent"})
    assert "Traceback" not in done.stderr
    printed = "".join(path.read_text() for path in (project / ".csdctl" / "scratch").rglob("*.log"))
    print(done.stdout, done.stderr, printed)
    assert len(re.findall("spawned as [0-9]+ ", printed)) == 3, "the attack was not made on all machines"
    assert not target.exists()
    for success in ("samples", "wrote", "listed", "signalled", "agent=/run"):
        assert success not in printed
