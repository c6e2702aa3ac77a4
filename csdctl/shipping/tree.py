"""A directory on the host as a tree that can be deployed.

Everything in it travels: hidden files, empty directories, permissions, symbolic links that stay inside. What
cannot travel is an error that names it, unless it is ignored.
"""

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import InputError
from csdctl.shipping.chunks import SharedChunks, SourceFile, printable, unreadable
from csdctl.shipping.parcel import PLAIN_MODE, StoreObject, Tree

DEFAULT_IGNORED = (".git/", "__pycache__/", ".csdctl/")


@dataclass(frozen=True)
class TreeRequest:
    """A directory of the host, and where it is to be on the nodes."""

    source: Path
    destination: str


def parse_tree(written: str) -> TreeRequest:
    """SOURCE[:DESTINATION] as written on the command line; raises InputError.

    The last colon counts. A source with a colon in its name is written with one more at its end.
    """
    source, colon, destination = written.rpartition(":")
    if not colon:
        source, destination = written, ""
    path = Path(os.path.realpath(Path(source).expanduser()))
    if not source or not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise InputError(
            f"--tree {printable(written)}: {printable(source)!r} {what}",
            remedy="name a directory; one with a colon in its name needs a colon at the end, too",
        )
    destination = (destination or path.name).removeprefix("~/").rstrip("/")
    if destination in ("", ".", "~") or ".." in destination.split("/") or "\0" in destination:
        raise InputError(
            f"--tree {printable(written)}: {printable(destination)!r} cannot be a destination",
            remedy="name a directory below the node's home, or an absolute path",
        )
    return TreeRequest(path, destination)


def read_tree(request: TreeRequest, chunks: SharedChunks, ignored: Sequence[str] = DEFAULT_IGNORED) -> Tree:
    """Read and hash the directory of `request`.

    `ignored` has patterns as in .gitignore, without negation. Raises InputError for what cannot travel.
    """
    root = str(request.source)
    directories: list[tuple[str, int]] = []
    files: list[tuple[str, StoreObject]] = []
    links: list[tuple[str, str]] = []
    for name, entry in _walk(root, "", ignored):
        if entry.is_symlink():
            links.append((name, _check_link(root, entry)))
        elif entry.is_dir():
            directories.append((name, entry.stat().st_mode & 0o777))
        elif entry.is_file():
            files.append((name, as_object(chunks.hash_source(entry.path))))
        else:
            raise InputError(
                f"{printable(entry.path)} is {_kind(entry)} and cannot be deployed",
                remedy=f"remove it, or leave it out: --ignore {printable(name)!r}",
            )
    return Tree(request.destination, tuple(directories), tuple(files), tuple(links))


def as_object(source: SourceFile, suffix: str = "") -> StoreObject:
    """How the store names a file of a tree: files of other permissions are other files."""
    mode = "" if source.mode == PLAIN_MODE else f"-{source.mode:03o}"
    return StoreObject(f"{source.sha256}{mode}", source, source.mode)


def _walk(root: str, prefix: str, ignored: Sequence[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below `root` that is not ignored, in order of name, directories before what they hold."""
    try:
        with os.scandir(f"{root}/{prefix}") as found:
            entries = sorted(found, key=lambda entry: entry.name)
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
    """Whether one of `patterns` fits `name`, a path inside the tree.

    A pattern without a slash fits a name at any depth, one with a slash the path from the top of the tree; a
    slash at its end lets it fit directories only.
    """
    for pattern in patterns:
        wanted = pattern.rstrip("/")
        if pattern.endswith("/") and not is_directory:
            continue
        subject = name if "/" in wanted else name.rpartition("/")[2]
        if fnmatch.fnmatchcase(subject, wanted.removeprefix("/")):
            return True
    return False


def _check_link(root: str, entry: os.DirEntry[str]) -> str:
    """The target of a symbolic link; raises InputError when it leads out of the tree."""
    target = os.readlink(entry.path)
    inside = os.path.realpath(entry.path)
    if target.startswith("/") or os.path.commonpath([root, inside]) != root:
        raise InputError(
            f"the symbolic link {printable(entry.path)} leads out of the tree, to {printable(target)}",
            remedy="replace it by what it leads to, or leave it out with --ignore",
        )
    return target


def _kind(entry: os.DirEntry[str]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    kinds = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device")
