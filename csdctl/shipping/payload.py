"""The desired content of a machine as one message: objects of the store, and trees of them; pure.

The same payload goes to many machines. A long manifest is first identified by its digest, and only sent to
machines that have no copy from an earlier deploy.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from csdctl.errors import InputError
from csdctl.shipping.chunks import SourceFile, printable
from csdctl.transport.meter import TrafficClass

MAX_INLINE_BYTES = 900
"""Up to this size a manifest is sent in the command line; dropbear accepts 9000 bytes in all."""

PLAIN_MODE = 0o600
"""The mode of a file without another one in its name; deployed trees keep the modes of their source."""


@dataclass(frozen=True)
class StoreObject:
    """A file of the store; its name begins with its SHA-256."""

    name: str
    source: SourceFile
    mode: int = PLAIN_MODE
    traffic_class: TrafficClass = TrafficClass.FILES


@dataclass(frozen=True)
class FileTree:
    """The desired content of the directory `destination`; all names are relative to it."""

    destination: str
    directories: tuple[tuple[str, int], ...] = ()
    """Name and mode, parents first."""
    files: tuple[tuple[str, StoreObject], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """Name and target of each symbolic link."""

    @cached_property
    def num_bytes(self) -> int:
        """The sum of the sizes of all files."""
        return sum(stored.source.size for _, stored in self.files)


@dataclass(frozen=True)
class Payload:
    """Objects in sending order, and the manifest that describes them."""

    objects: tuple[StoreObject, ...]
    trees: tuple[FileTree, ...]
    manifest: dict[str, Any] = field(repr=False)
    packed: bytes = field(repr=False)
    """The compressed manifest; empty when it is sent in the command line."""

    @property
    def destinations(self) -> list[str]:
        """The destinations of its trees."""
        return [tree.destination for tree in self.trees]

    def build_request(self, *, dry_run: bool = False) -> str:
        """Return the argument of the receiver."""
        request: dict[str, Any] = {"dry_run": True} if dry_run else {}
        if self.packed:
            request |= {"digest": hashlib.sha256(self.packed).hexdigest(), "num_bytes": len(self.packed)}
        else:
            request["manifest"] = self.manifest
        return _as_json(request)


def pack_payload(objects: Sequence[StoreObject] = (), trees: Sequence[FileTree] = ()) -> Payload:
    """Pack `objects` and `trees`; raises InputError for trees with overlapping destinations."""
    _check_disjoint([tree.destination for tree in trees])
    distinct = {stored.name: stored for stored in objects}
    for tree in trees:
        distinct |= {stored.name: stored for _, stored in tree.files if stored.name not in distinct}
    numbers = {name: number for number, name in enumerate(distinct)}
    manifest = {
        "objects": [
            [stored.name, stored.source.sha256, stored.source.size, stored.mode]
            for stored in distinct.values()
        ],
        "trees": [_describe(tree, numbers) for tree in trees],
        "keep": sorted({numbers[stored.name] for stored in objects}),
    }
    content = _as_json(manifest).encode()
    packed = zlib.compress(content, 1) if len(content) > MAX_INLINE_BYTES else b""
    return Payload(tuple(distinct.values()), tuple(trees), manifest, packed)


def _describe(tree: FileTree, numbers: dict[str, int]) -> dict[str, Any]:
    content = {
        "directories": tree.directories,
        "files": [(name, numbers[stored.name]) for name, stored in tree.files],
        "links": tree.links,
    }
    named = [tree.directories, [(name, stored.name) for name, stored in tree.files], tree.links]
    identity = hashlib.sha256(_as_json(named).encode()).hexdigest()[:32]
    return {"id": identity, "destination": tree.destination, **content}


def _check_disjoint(destinations: Sequence[str]) -> None:
    ordered = sorted(destination.rstrip("/") + "/" for destination in destinations)
    for first, second in pairwise(ordered):
        if second.startswith(first):
            raise InputError(
                f"the trees for {printable(first[:-1])} and {printable(second[:-1])} overlap",
                remedy="give each tree a separate destination",
            )


def _as_json(content: object) -> str:
    """Return ASCII JSON; bytes of names that are not UTF-8 become lone surrogates."""
    return json.dumps(content, separators=(",", ":"))
