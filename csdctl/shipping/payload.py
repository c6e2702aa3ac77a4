"""The desired content of many machines as one message: objects of the store, and trees of them.

A tree is a directory of the host, with hidden files, empty directories, permissions, and symbolic links that
stay inside. Anything else is an error that names it, unless it is ignored.
"""

import fnmatch
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from csdctl.errors import InputError
from csdctl.shipping.store import StoredFile, hash_source, unreadable

DEFAULT_IGNORED = (".git/", "__pycache__/", ".csdctl/")


@dataclass(frozen=True)
class FileTree:
    """The desired content of the directory `destination`. All names are relative to it."""

    destination: str
    directories: tuple[tuple[str, int], ...] = ()
    """Name and mode, parents first."""
    files: tuple[tuple[str, StoredFile], ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    @cached_property
    def num_bytes(self) -> int:
        """The sum of the sizes of all files."""
        return sum(stored.size for _, stored in self.files)


@dataclass(frozen=True)
class Payload:
    """Objects in sending order, and the manifest that describes them."""

    objects: tuple[StoredFile, ...]
    trees: tuple[FileTree, ...]
    manifest: dict[str, Any] = field(repr=False)


def pack_payload(objects: Sequence[StoredFile] = (), trees: Sequence[FileTree] = ()) -> Payload:
    """Pack `objects` and `trees`. Raises InputError for trees with overlapping destinations."""
    for first, second in pairwise(sorted(tree.destination.rstrip("/") + "/" for tree in trees)):
        if second.startswith(first):
            raise InputError(
                f"the trees for {first[:-1]} and {second[:-1]} overlap",
                remedy="give each tree a separate destination",
            )
    distinct = {stored.name: stored for stored in objects}
    for tree in trees:
        distinct |= {stored.name: stored for _, stored in tree.files if stored.name not in distinct}
    numbers = {name: number for number, name in enumerate(distinct)}
    manifest = {
        "objects": [[stored.name, stored.size, stored.mode] for stored in distinct.values()],
        "trees": [_describe(tree, numbers) for tree in trees],
        "keep": sorted({numbers[stored.name] for stored in objects}),
    }
    return Payload(tuple(distinct.values()), tuple(trees), manifest)


def _describe(tree: FileTree, numbers: dict[str, int]) -> dict[str, Any]:
    content = {
        "directories": tree.directories,
        "files": [(name, numbers[stored.name]) for name, stored in tree.files],
        "links": tree.links,
    }
    named = [tree.directories, [(name, stored.name) for name, stored in tree.files], tree.links]
    identity = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]
    return {"id": identity, "destination": tree.destination, **content}


@dataclass(frozen=True)
class TreeRequest:
    """A directory of the host, and its destination on the nodes."""

    source: Path
    destination: str


def parse_tree(written: str) -> TreeRequest:
    """Parse SOURCE[:DESTINATION], separated by the last colon. Raises InputError."""
    source, colon, destination = written.rpartition(":")
    if not colon:
        source, destination = written, ""
    path = Path(os.path.realpath(Path(source).expanduser()))
    if not source or not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        remedy = "pass a directory; if its name contains a colon, append another colon"
        raise InputError(f"--tree {written}: {source!r} {what}", remedy=remedy)
    destination = (destination or path.name).removeprefix("~/").rstrip("/")
    if destination in ("", ".", "~") or ".." in destination.split("/") or "\0" in destination:
        remedy = "use a path below the node's home, or an absolute path"
        raise InputError(f"--tree {written}: {destination!r} cannot be a destination", remedy=remedy)
    return TreeRequest(path, destination)


def read_tree(request: TreeRequest, ignored: Sequence[str] = DEFAULT_IGNORED) -> FileTree:
    """Read and hash a directory, without `ignored` as in .gitignore. Raises InputError."""
    root = str(request.source)
    directories: list[tuple[str, int]] = []
    files: list[tuple[str, StoredFile]] = []
    links: list[tuple[str, str]] = []
    for name, entry in _walk(root, "", ignored):
        if entry.is_symlink():
            links.append((name, _check_link(root, entry)))
        elif entry.is_dir():
            directories.append((name, entry.stat().st_mode & 0o777))
        elif entry.is_file():
            files.append((name, hash_source(Path(entry.path))))
        else:
            names = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}
            what = names.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode), "a device")
            remedy = f"remove it, or exclude it: --ignore {name!r}"
            raise InputError(f"{entry.path} is {what} and cannot be deployed", remedy=remedy)
    return FileTree(request.destination, tuple(directories), tuple(files), tuple(links))


def _walk(root: str, prefix: str, ignored: Sequence[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all entries below `root` that are not ignored, by name, directories before their content."""
    try:
        with os.scandir(f"{root}/{prefix}") as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(f"{root}/{prefix}", error) from error
    for entry in entries:
        name = prefix + entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        if is_ignored(name, ignored, is_directory=is_directory):
            continue
        yield name, entry
        if is_directory:
            yield from _walk(root, f"{name}/", ignored)


def is_ignored(name: str, patterns: Sequence[str], *, is_directory: bool) -> bool:
    """Return whether one of `patterns` matches `name`, a path inside the tree.

    A pattern without a slash matches a name at any depth. A pattern with a slash matches the path from the
    top of the tree. A slash at its end restricts it to directories.
    """
    for pattern in patterns:
        stripped = pattern.rstrip("/")
        subject = name if "/" in stripped else name.rpartition("/")[2]
        if (is_directory or stripped == pattern) and fnmatch.fnmatchcase(subject, stripped.removeprefix("/")):
            return True
    return False


def _check_link(root: str, entry: os.DirEntry[str]) -> str:
    target = os.readlink(entry.path)
    inside = os.path.realpath(entry.path)
    if target.startswith("/") or os.path.commonpath([root, inside]) != root:
        problem = f"the symbolic link {entry.path} points outside the tree, to {target}"
        raise InputError(problem, remedy="replace it with its target, or exclude it with --ignore")
    return target
