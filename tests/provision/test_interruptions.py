"""A problem that stops provisioning is named in a sentence, and the second try finishes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.bare import PREFIX, BareNode, bare_node, bundles
from tests.lab.lab import Lab
from tests.lab.project import Project
from tests.patience import communicate, wait_for
from tests.provision.conftest import NETWORK, provision

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


def cut_power_when(node: BareNode, project: Project, has_begun: Callable[[], bool]) -> str:
    """Cut the node's power as soon as provisioning `has_begun`; return why it says that it failed."""
    process = project.start("provision", "--json", "--bundles", str(bundles()))
    wait_for(has_begun, process)
    with node.switched_off():
        stdout, stderr = communicate(process)
    assert process.returncode in (1, 4), stderr
    assert "Traceback" not in stderr
    return str(json.loads(stdout)["failed"]["bare"]["message"])


def test_node_that_loses_power_while_sending_and_installing_is_finished_by_the_next_try(
    lab: Lab, project: Project, bundle: Path
) -> None:
    with bare_node(lab, "bare", 62) as node:
        project.use(node, network=NETWORK)
        root = node.tree / "root/.csdctl/objects"
        assert cut_power_when(node, project, lambda: any(root.glob("*.part")))
        installed = node.tree / PREFIX[1:]
        assert cut_power_when(node, project, lambda: any(installed.glob("venv-*/lib/*/*/numpy")))
        done = provision(project, "--set", "node_sshd=false")["nodes"]["bare"]
        assert done["num_bytes"] == 0  # everything had arrived
        assert provision(project, "--set", "node_sshd=false")["nodes"]["bare"]["tasks"]["changed"] == 0
