"""A problem that stops provisioning is named in a sentence, and the second try finishes."""

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.bare import PREFIX, BareNode, bare_node, bundles
from tests.lab.lab import Lab
from tests.lab.project import Project
from tests.patience import communicate, wait_for
from tests.provision.conftest import NETWORK, provision

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


def start(project: Project) -> subprocess.Popen[str]:
    return project.start("provision", "--json", "--bundles", str(bundles()))


def read_failure(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return why csdctl says that it failed."""
    stdout, stderr = communicate(process)
    assert process.returncode in (1, 4), stderr
    assert "Traceback" not in stderr
    failed: dict[str, str] = json.loads(stdout)["failed"]["bare"]
    return failed


def cut_power_when(
    node: BareNode, process: subprocess.Popen[str], has_begun: Callable[[], bool]
) -> dict[str, str]:
    """Cut the node's power as soon as `has_begun`; return why csdctl says that it failed."""
    wait_for(has_begun, process)
    with node.switched_off():
        return read_failure(process)


def test_node_that_loses_power_while_sending_and_installing_is_finished_by_the_next_try(
    lab: Lab, project: Project, bundle: Path
) -> None:
    with bare_node(lab, "bare", 62) as node:
        project.use(node, network=NETWORK)
        root = node.tree / "root/.csdctl/objects"
        failed = cut_power_when(node, start(project), lambda: any(root.glob("*.part")))
        assert failed["message"]
        failed = cut_power_when(
            node, start(project), lambda: any((node.tree / PREFIX[1:]).glob("venv-*/lib/*/*/numpy"))
        )
        assert failed["message"]
        done = provision(project, "--set", "node_sshd=false")["nodes"]["bare"]
        assert done["num_bytes"] == 0  # everything had arrived
        assert provision(project, "--set", "node_sshd=false")["nodes"]["bare"]["tasks"]["changed"] == 0


def test_disk_that_fills_while_unpacking_is_named_and_more_space_is_enough(
    lab: Lab, project: Project, bundle: Path
) -> None:
    with bare_node(lab, "bare", 65, opt_size="1300m") as node:
        project.use(node, network=NETWORK)
        process = start(project)
        opt = node.root / "opt"
        wait_for(lambda: any((opt / "csdctl").glob("venv-*/lib/*/*/numpy")), process)
        fill(opt / "other")
        failed = read_failure(process)
        assert "Install the wheels" in failed["message"]
        assert "No space left on device" in failed["message"]
        assert "df -h" in failed["remedy"]
        failed = provision(project, code=1)["failed"]["bare"]
        assert "MiB are free at /opt/csdctl" in failed["message"]
        # What was unpacked is still there: no more space than at first is needed.
        (opt / "other").unlink()
        done = provision(project)["nodes"]["bare"]
        assert done["num_bytes"] == 0  # everything had arrived
        assert done["tasks"]["changed"] > 0


def fill(path: Path) -> None:
    """Write `path` until its disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
