"""The nodes' host keys in `.csdctl/known_hosts`, plain, one line per node.

Each line ends in a comment that names the fleet, so that `down` removes only its own lines.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from csdctl.documents import save_text
from csdctl.transport.known_hosts import load_lines


def add_host_keys(path: Path, keys: Mapping[int, str], fleet_id: str) -> None:
    """Write the host key (`ssh-ed25519 AAAA…`) of every port; remove older keys of the same ports."""
    ports = {f"[127.0.0.1]:{port}" for port in keys}
    kept = [line for line in _existing_lines(path) if not ports & set(_first_word(line).split(","))]
    added = [
        f"[127.0.0.1]:{port} {' '.join(key.split()[:2])} {_comment(fleet_id)}" for port, key in keys.items()
    ]
    save_text(path, "".join(f"{line}\n" for line in (*kept, *added)))


def remove_host_keys(path: Path, public_keys: Iterable[str], fleet_id: str) -> None:
    """Remove the lines of a fleet, identified by their comment or, without it, by the key."""
    lines = _existing_lines(path)
    bodies = {key.split()[1] for key in public_keys if len(key.split()) > 1}
    kept = [
        line for line in lines if not line.endswith(_comment(fleet_id)) and not bodies & set(line.split())
    ]
    if kept == lines:
        return
    if kept:
        save_text(path, "".join(f"{line}\n" for line in kept))
    else:
        path.unlink(missing_ok=True)


def _comment(fleet_id: str) -> str:
    return f"csdctl-emulated-{fleet_id}"


def _first_word(line: str) -> str:
    return line.split(maxsplit=1)[0] if line.split() else ""


def _existing_lines(path: Path) -> list[str]:
    return load_lines(path) if path.exists() else []
