"""A bare Debian without Python is provisioned, trains, and is as before after uninstalling."""

import json
from pathlib import Path

import pytest

from csdctl.workflows.provision.provision import PREFIX as LINE
from csdctl.workflows.provision.provision import ansible_directory, build_environment
from tests.lab.bare import PREFIX, PYTHON, bare_node, bundles
from tests.lab.lab import Lab
from tests.lab.project import CSDCTL, Project
from tests.provision.conftest import NETWORK, provision

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


def test_bare_node_trains_and_is_as_before_after_uninstalling(
    lab: Lab, project: Project, job: Path, bundle: Path
) -> None:
    with bare_node(lab, "bare", 60) as node:
        project.use(node, network=NETWORK)
        before = node.list_files()
        assert not [name for name in before if "/python3" in name]
        assert provision(project, "--dry-run")["nodes"]["bare"]["tasks"] is None
        assert node.list_files() == before

        assert provision(project)["nodes"]["bare"]["tasks"]["changed"] > 0
        second = provision(project)["nodes"]["bare"]
        assert second["tasks"]["changed"] == 0
        assert second["num_bytes"] == 0
        assert provision(project, "--dry-run")["nodes"]["bare"]["tasks"]["changed"] == 0
        assert run_ansible(project)["bare"]["changed"] == 0
        assert node.run(PYTHON, "-c", "import sys; print(sys.prefix)").strip() == f"{PREFIX}/venv"

        for command in (["discover"], ["doctor"], ["tune", str(job)]):
            project.succeed(*command)
        for command in ("train", "verify"):  # a plan may leave a slow node out
            project.succeed(command, str(job), "--batch-size", "16")
        assert "bare" in project.succeed("report", "--json").stdout

        provision(project, "--uninstall", "--yes")
        after = node.list_files()
        assert {name for name in before | after if before.get(name) != after.get(name)} == set()
        assert provision(project, "--uninstall", "--yes")["nodes"]["bare"]["tasks"]["changed"] == 0


def run_ansible(project: Project) -> dict[str, dict[str, int]]:
    """Run the playbook by Ansible alone, which lets csdctl send; return what it did on each node."""
    directory = ansible_directory()
    project.succeed("inventory", "--output", "hosts.yml")
    values = {"node_csdctl": str(CSDCTL), "node_bundles": str(bundles())}
    playbook = str(directory / "playbooks/nodes.yml")
    done = project.lab.host.run(
        *["ansible-playbook", "-i", "hosts.yml", playbook, "-e", json.dumps(values)],
        cwd=project.path,
        environment={**build_environment({}, directory, 1), "PWD": str(project.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1].removeprefix(LINE))["nodes"]
    return summary
