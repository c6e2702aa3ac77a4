"""`exec` of commands and of Fabric tasks over OpenSSH servers, with a node behind a jump host."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.fleet.fleet_file import render_fleet
from csdctl.fleet.model import Fleet
from tests.lab.lab import Lab
from tests.lab.project import Project

pytestmark = pytest.mark.lab

TASKS = """\
import io

from fabric import task


def uptime_of(c):
    return float(c.run("cat /proc/uptime", hide=True).stdout.split()[0])


@task
def restart_daemon(c, name, settings="settings.conf", force=False):
    '''Replace the settings of a service and restart it, as people keep it for their boards.'''
    c.put(settings, "/tmp/new.conf")
    with c.cd("/tmp"):
        if c.run(f"cmp -s new.conf {name}.conf", warn=True).ok and not force:
            print(f"{name} is up to date")
            return
        c.run(f"mv new.conf {name}.conf && test -f {name}.conf")
    c.run(f"echo restarted >>/tmp/{name}.log; echo warned >&2")
    log = io.BytesIO()
    c.get(f"/tmp/{name}.log", local=log)
    print(f"{name}: {len(log.getvalue().split())} restarts", uptime_of(c) > 0)


@task
def collect(c):
    c.get("/etc/hostname", local="collected/{host}/")
    c.run("hostname", pty=True)
"""


@pytest.fixture
def fleet(project: Project) -> Project:
    """csd0, and far0 behind the gate; far0's address is on the gate's other network."""
    lab = project.lab
    project.trust(lab.near[0], lab.gate, lab.far[0])
    nodes = lab.near[0].node, replace(lab.far[0].node, jump=lab.gate.node)
    (project.path / "fleet.yaml").write_text(render_fleet(Fleet(nodes), origin="Of a test"))
    (project.path / "tasks.py").write_text(TASKS)
    (project.path / "settings.conf").write_text("interval = 5\n")
    return project


def test_task_runs_unchanged_also_behind_the_jump_host(fleet: Project, tmp_path: Path) -> None:
    words = ["--task", "tasks.py:restart_daemon", "--", "--name", "sampler"]
    first = fleet.csdctl("exec", "--json", *words)
    assert first.returncode == 0, first.stderr
    rows = json.loads(first.stdout)["rows"]
    assert len(rows) == 1, rows
    row = rows[0]
    assert (row["machines"], row["stdout"], row["stderr"]) == (
        ["csd0", "far0"],
        "sampler: 1 restarts True\n",
        "warned\n",
    )
    assert "csd0, far0 (2)\n  sampler is up to date\n" in fleet.csdctl("exec", *words).stdout
    assert fleet.csdctl("exec", "--task", "tasks.py:collect").returncode == 0
    assert sorted(path.name for path in (fleet.path / "collected").iterdir()) == ["csd0", "far0"]
    fleet.csdctl("exec", "rm -f /tmp/sampler.*  /tmp/new.conf")


def test_node_without_sftp_is_named_with_the_line_for_its_sshd(fleet: Project, lab: Lab) -> None:
    with lab.node("plain", 44, has_sftp=False) as node:
        fleet.use(node)
        said = fleet.refuse("exec", "--task", "tasks.py:restart_daemon", "--", "--name=x", code=1)
        assert "plain: its SSH server offers no SFTP, which `put` and `get` need" in said
        assert "Subsystem sftp internal-sftp" in said
