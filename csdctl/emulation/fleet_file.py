"""The fleet.yaml that the emulator writes, and whether one that is there is still as it was written.

Its first line says who wrote it, for which fleet, and the hash of the rest: nothing else needs to be
kept to tell a file that a person has changed from one that may be removed.
"""

import hashlib
import re
from pathlib import Path

import yaml

from csdctl.documents import save_text
from csdctl.emulation.state import FleetPaths, FleetState
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
        "defaults": {"user": state.user, "key": str(paths.key), "python": python, "group": GROUP},
        "nodes": [{"name": node.name, "address": "127.0.0.1", "port": node.port} for node in state.nodes],
    }
    body = yaml.safe_dump(content, sort_keys=False)
    header = (
        f"# Written by csdctl emulate up for fleet {state.fleet_id}, content {_hash(body)}; "
        "`csdctl emulate down` removes it.\n"
    )
    save_text(state.fleet_path, header + body)


def is_unchanged(path: Path, fleet_id: str) -> bool:
    """Whether `path` is what the emulator wrote for this fleet, to the byte."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    header = _HEADER.match(text)
    return header is not None and header.groups() == (fleet_id, _hash(text[header.end() :]))


def check_may_write(path: Path, fleet_id: str) -> None:
    """Raise InputError when `path` holds something that the emulator did not write for this fleet."""
    if path.exists() and not is_unchanged(path, fleet_id):
        raise InputError(
            f"{path} exists and is not this emulated fleet's; it is left as it is",
            remedy="name another file with --fleet, or move this one away",
        )


def remove_fleet_file(path: Path, fleet_id: str) -> bool:
    """Remove fleet.yaml and its facts; returns False when a person changed it, and leaves it then."""
    if not path.exists():
        return True
    if not is_unchanged(path, fleet_id):
        return False
    facts_path(Fleet(nodes=(), path=path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return True


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
