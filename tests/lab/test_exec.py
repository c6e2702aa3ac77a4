"""`exec` of Fabric tasks over OpenSSH servers, with a node behind a jump host."""

import json
from dataclasses import replace

import pytest

from csdctl.fleet.fleet_file import render_fleet
from csdctl.fleet.model import Fleet
from tests.lab.project import Project

pytestmark = pytest.mark.lab

TASKS = """\
import io

from fabric import task


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
    print(f"{name}: {len(log.getvalue().split())} restarts")
"""


def test_task_runs_also_behind_a_jump_host_and_a_node_without_sftp_is_named(project: Project) -> None:
    lab = project.lab
    near, far = lab.near[0], lab.far[0]
    (project.path / "tasks.py").write_text(TASKS)
    (project.path / "settings.conf").write_text("interval = 5\n")
    project.trust(near, lab.gate, far)
    fleet = Fleet((near.node, replace(far.node, jump=lab.gate.node)))
    (project.path / "fleet.yaml").write_text(render_fleet(fleet, origin="Of a test"))
    words = ["--task", "tasks.py:restart_daemon", "--", "--name", "sampler"]
    (row,) = json.loads(project.succeed("exec", "--json", *words).stdout)["rows"]
    assert (row["machines"], row["stdout"]) == (["csd0", "far0"], "sampler: 1 restarts\n")
    assert row["stderr"] == "warned\n"
    assert "csd0, far0 (2)\n  sampler is up to date\n" in project.succeed("exec", *words).stdout
    project.csdctl("exec", "rm -f /tmp/sampler.* /tmp/new.conf")
    with lab.node("plain", 44, has_sftp=False) as node:
        project.use(node)
        said = project.refuse("exec", *words, code=1)
    assert "plain: its SSH server offers no SFTP, which `put` and `get` need" in said
    assert "Subsystem sftp internal-sftp" in said
