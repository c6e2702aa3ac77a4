"""The host's content-addressed store.

A stored file has the path `.csdctl/objects/<sha256><suffix>`, relative to a session's home, on the host and
on the nodes. A file with the right name and wrong content is replaced. `deliver` sends files to the nodes.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from csdctl.documents import save_bytes, write_atomically
from csdctl.shipping.chunks import CHUNK_BYTES, StoreObject, unreadable
from csdctl.transport.meter import TrafficClass

OBJECTS = ".csdctl/objects"


@dataclass(frozen=True)
class StoredFile:
    """A file of the store; `source` is its path on the host."""

    sha256: str
    suffix: str
    source: Path
    traffic_class: TrafficClass = TrafficClass.CONTROL
    """The traffic class in the ledger."""

    @property
    def path(self) -> str:
        """The path on every machine, relative to the session's home."""
        return f"{OBJECTS}/{self.sha256}{self.suffix}"

    def as_object(self) -> StoreObject:
        """Return its object for a payload; raises InputError when the file is gone."""
        try:
            status = self.source.stat()
        except OSError as error:
            raise unreadable(str(self.source), error) from error
        path, name = str(self.source), f"{self.sha256}{self.suffix}"
        return StoreObject(name, path, status.st_size, status.st_mtime_ns, traffic_class=self.traffic_class)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store_file(path: Path, project: Path, traffic_class: TrafficClass = TrafficClass.CONTROL) -> StoredFile:
    """Copy `path` into the host's store below `project`."""
    digest = hash_file(path)
    target = project / OBJECTS / f"{digest}{path.suffix}"
    if not (target.exists() and hash_file(target) == digest):
        with write_atomically(target) as file, path.open("rb") as source:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
    return StoredFile(digest, path.suffix, target, traffic_class)


def store_bytes(
    content: bytes, suffix: str, project: Path, traffic_class: TrafficClass = TrafficClass.CONTROL
) -> StoredFile:
    """Write `content` into the host's store below `project`."""
    digest = hashlib.sha256(content).hexdigest()
    target = project / OBJECTS / f"{digest}{suffix}"
    if not (target.exists() and hash_file(target) == digest):
        save_bytes(target, content)
    return StoredFile(digest, suffix, target, traffic_class)
