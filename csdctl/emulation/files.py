"""The fleet.yaml of an emulated fleet, which may be outside of the fleet's directory.

Its first line names the writer, the fleet, and the hash of the rest: a file that the user has changed is not
removed.
"""

import hashlib
import re
from pathlib import Path

import yaml

from csdctl.documents import save_text
from csdctl.emulation.state import USER, FleetPaths, FleetState
from csdctl.errors import InputError
from csdctl.fleet.facts import facts_path
from csdctl.fleet.model import Fleet

GROUP = "emulated"
NETWORK = "127.0.0.0/8"

_HEADER = re.compile(
    r"# Written by csdctl emulate up for fleet (\w+), content (\w+); `csdctl emulate down` removes it\.\n"
)


def save_fleet_file(paths: FleetPaths, state: FleetState, python: str) -> None:
    """Write the fleet.yaml of a running emulated fleet."""
    content = {
        "emulated": True,
        "network": NETWORK,
        "defaults": {"user": USER, "key": str(paths.key), "python": python, "group": GROUP},
        "nodes": [{"name": node.name, "address": "127.0.0.1", "port": node.port} for node in state.nodes],
    }
    body = yaml.safe_dump(content, sort_keys=False)
    header = (
        f"# Written by csdctl emulate up for fleet {state.fleet_id}, content {_hash(body)}; "
        "`csdctl emulate down` removes it.\n"
    )
    save_text(state.fleet_path, header + body)


def is_unchanged(path: Path, fleet_id: str) -> bool:
    """Return whether `path` is byte for byte what the emulator wrote for this fleet."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    header = _HEADER.match(text)
    return header is not None and header.groups() == (fleet_id, _hash(text[header.end() :]))


def check_may_write(path: Path, fleet_id: str) -> None:
    """Raise InputError when `path` exists and was not written by the emulator for this fleet."""
    if path.exists() and not is_unchanged(path, fleet_id):
        raise InputError(
            f"{path} exists and does not belong to this emulated fleet; it is left unchanged",
            remedy="give another file with --fleet, or move this one away",
        )


def remove_fleet_file(path: Path, fleet_id: str) -> bool:
    """Remove fleet.yaml and its facts; if the user has changed it, leave it and return False."""
    if not path.exists():
        return True
    if not is_unchanged(path, fleet_id):
        return False
    facts_path(Fleet(nodes=(), path=path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return True


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
