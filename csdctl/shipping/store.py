"""The content-addressed store on every machine, and what is missing in it.

A stored file lies at `.csdctl/objects/<sha256><suffix>`, relative to where a session starts, on the host
as on the nodes. What is there with the right content is not sent again; what has the right name and
wrong content is replaced.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.documents import save_bytes
from csdctl.errors import NodeError
from csdctl.transport.session import Session

OBJECTS = ".csdctl/objects"
CHECK_DEADLINE_S = 600.0


@dataclass(frozen=True)
class StoredFile:
    """A file of the store; `source` is where the host has it."""

    sha256: str
    suffix: str
    source: Path

    @property
    def path(self) -> str:
        """Where it lies on every machine, relative to the session's home."""
        return f"{OBJECTS}/{self.sha256}{self.suffix}"


@dataclass(frozen=True)
class Delivery:
    """What bringing files to one machine came to."""

    num_sent: int
    bytes_sent: int
    num_present: int


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store_file(path: Path, project: Path) -> StoredFile:
    """Copy `path` into the host's own store below `project`."""
    digest = hash_file(path)
    target = project / OBJECTS / f"{digest}{path.suffix}"
    if not (target.exists() and hash_file(target) == digest):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".part-{target.name}")
        shutil.copyfile(path, aside)
        aside.replace(target)
    return StoredFile(digest, path.suffix, target)


def store_bytes(content: bytes, suffix: str, project: Path) -> StoredFile:
    """Put `content` into the host's own store below `project`."""
    digest = hashlib.sha256(content).hexdigest()
    target = project / OBJECTS / f"{digest}{suffix}"
    if not (target.exists() and hash_file(target) == digest):
        save_bytes(target, content)
    return StoredFile(digest, suffix, target)


def find_missing(session: Session, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Those of `files` that the machine lacks or has damaged; one round trip, hashed by the machine."""
    if not files:
        return []
    script = 'for f; do [ -f "$f" ] && sha256sum -- "$f"; done; true'
    done = session.run(
        ["sh", "-c", script, "sh", *(file.path for file in files)], deadline_s=CHECK_DEADLINE_S
    )
    done.check(
        session.name, doing="looking at what is deployed", remedy="the machine needs sha256sum (coreutils)"
    )
    present = {tuple(reversed(line.split(maxsplit=1))) for line in done.output.splitlines()}
    return [file for file in files if (file.path, file.sha256) not in present]


def deliver(session: Session, files: Sequence[StoredFile]) -> Delivery:
    """Bring `files` to the machine, only what is missing, and verify what arrived; raises NodeError."""
    missing = find_missing(session, files)
    sent = sum(session.upload(file.source, file.path) for file in missing)
    damaged = find_missing(session, missing)
    if damaged:
        raise NodeError(
            f"{len(damaged)} of {len(missing)} files arrived damaged",
            node=session.name,
            remedy="look for a full or failing disk and try again",
        )
    return Delivery(len(missing), sent, len(files) - len(missing))
