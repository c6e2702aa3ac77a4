"""What the shell completes besides files: nodes and runs of this directory; nothing where that fails."""

from collections.abc import Iterable
from pathlib import Path

import typer

from csdctl.errors import CsdctlError
from csdctl.runs.private import STATE_DIRECTORY


def complete_nodes(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of nodes in the fleet file of the command line."""
    from csdctl.fleet.fleet_file import load_fleet

    try:
        nodes = load_fleet(Path(context.params.get("fleet") or "fleet.yaml")).nodes
    except (CsdctlError, OSError):
        return []
    return _begun((node.name for node in nodes), incomplete)


def complete_runs(incomplete: str) -> list[str]:
    """Return the ids of this project's runs, the latest first."""
    try:
        paths = sorted(Path(STATE_DIRECTORY, "runs").iterdir(), reverse=True)
    except OSError:
        return []
    return _begun((path.name for path in paths), incomplete)


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
