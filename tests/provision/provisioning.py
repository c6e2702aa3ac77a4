"""`csdctl provision` as a test runs it."""

import json
from pathlib import Path
from typing import Any

from tests.lab.bare import bundles
from tests.lab.project import Project

NETWORK = "10.77.0.0/24"


def provision(project: Project, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run `csdctl provision --json` and return its document."""
    done = project.csdctl("provision", "--json", "--bundles", str(bundles()), *arguments)
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def check(project: Project, *arguments: str | Path) -> str:
    """Run csdctl, which must succeed; return its standard output."""
    done = project.csdctl(*map(str, arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
