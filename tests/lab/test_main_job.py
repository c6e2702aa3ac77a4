"""The main job over real SSH servers on machines that share nothing: prepare, tune, train, deploy."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.project import Project

pytestmark = pytest.mark.lab


def last_line(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text.splitlines()[-1])
    return document


def test_host_and_two_nodes_are_discovered_tuned_and_trained(project: Project, job: Path) -> None:
    project.use(*project.lab.near[:2], network="10.77.0.0/24")
    code, machines, errors = project.discover()
    assert code == 0, errors
    assert set(machines) == {"host", "csd0", "csd1"}
    import time
    t = time.time()
    done = project.csdctl("tune", str(job))
    print(time.time() - t, done)
    assert done.returncode == 0, done.stderr
    t = time.time()
    done = project.csdctl("train", str(job), "--json")
    print(time.time() - t, done)
    assert done.returncode == 0, done.stderr
    document = last_line(done.stdout)
    assert document["state"] == "done"
    assert document["num_ranks"] == 3
    assert document["identical_weights"] is True
