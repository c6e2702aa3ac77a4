"""What the shell completes: nodes, jobs, plans and runs of this directory; nothing where that fails."""

from collections.abc import Iterable
from pathlib import Path

import typer

from csdctl.errors import CsdctlError
from csdctl.runs.private import STATE_DIRECTORY

MAX_JOB_BYTES = 1 << 16
"""A larger YAML file is not looked at: the shell waits."""


def complete_nodes(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of nodes in the fleet file of the command line."""
    from csdctl.fleet.fleet_file import load_fleet

    try:
        nodes = load_fleet(Path(context.params.get("fleet") or "fleet.yaml")).nodes
    except (CsdctlError, OSError):
        return []
    return _begun((node.name for node in nodes), incomplete)


def complete_jobs(incomplete: str) -> list[str]:
    """Return the YAML files, in the directory that was begun, that name a model."""
    directory = incomplete.rpartition("/")[0]
    begin = f"{directory}/" if incomplete.startswith(directory + "/") else ""
    return _begun(
        (f"{begin}{path.name}" for path in _list(Path(begin), "*.yaml") if _is_job(path)), incomplete
    )


def complete_plans(incomplete: str) -> list[str]:
    """Return the plans of this project."""
    return _begun((str(path) for path in _list(Path(STATE_DIRECTORY) / "plans", "*.yaml")), incomplete)


def complete_runs(incomplete: str) -> list[str]:
    """Return the ids of this project's runs, the latest first."""
    paths = reversed(_list(Path(STATE_DIRECTORY) / "runs", "*"))
    return _begun((path.name for path in paths), incomplete)


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _list(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def _is_job(path: Path) -> bool:
    try:
        if path.stat().st_size > MAX_JOB_BYTES:
            return False
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("model:") for line in lines)
