"""The lab, and what is collected once for all tests on the machine itself, as the lab has no internet."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bare import bundles
from tests.lab.conftest import job, lab, project
from tests.lab.project import CSDCTL, Project

__all__ = ["job", "lab", "project"]

NETWORK = "10.77.0.0/24"
COLLECT_DEADLINE_S = 1800.0


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Fail where a program is missing that the lab does not need."""
    for program, remedy in (
        ("ansible-playbook", "make test-provision"),
        ("mmdebstrap", "apt-get install mmdebstrap"),
    ):
        if not shutil.which(program):
            pytest.fail(f"{program} is not on PATH: {remedy}", pytrace=False)


@pytest.fixture(scope="session")
def bundle() -> Path:
    """Everything for bare x86_64 nodes; return the directory of bundles."""
    return collect("x86_64")


def collect(kind: str) -> Path:
    """Collect what nodes of `kind` need, unless it is there; return the directory of bundles."""
    command = [str(CSDCTL), "provision", "--collect", "--kind", kind, "--bundles", str(bundles())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COLLECT_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return bundles()


def provision(project: Project, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run `csdctl provision --json` and return its document."""
    done = project.csdctl("provision", "--json", "--bundles", str(bundles()), *arguments)
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document
