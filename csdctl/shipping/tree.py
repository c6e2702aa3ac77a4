"""Read a directory of the host as a tree to deploy.

A tree includes hidden files, empty directories, permissions, and symbolic links that stay inside. Anything
that cannot be deployed is an error that names it, unless it is ignored.
"""

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import InputError
from csdctl.shipping.chunks import SharedChunks, SourceFile, printable, unreadable
from csdctl.shipping.payload import PLAIN_MODE, FileTree, StoreObject

DEFAULT_IGNORED = (".git/", "__pycache__/", ".csdctl/")


@dataclass(frozen=True)
class TreeRequest:
    """A directory of the host, and its destination on the nodes."""

    source: Path
    destination: str


def parse_tree(written: str) -> TreeRequest:
    """Parse SOURCE[:DESTINATION] of the command line; raises InputError.

    The last colon separates. A source with a colon in its name needs another colon at the end.
    """
    source, colon, destination = written.rpartition(":")
    if not colon:
        source, destination = written, ""
    path = Path(os.path.realpath(Path(source).expanduser()))
    if not source or not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise InputError(
            f"--tree {printable(written)}: {printable(source)!r} {what}",
            remedy="give a directory; if its name contains a colon, append another colon",
        )
    destination = (destination or path.name).removeprefix("~/").rstrip("/")
    if destination in ("", ".", "~") or ".." in destination.split("/") or "\0" in destination:
        raise InputError(
            f"--tree {printable(written)}: {printable(destination)!r} cannot be a destination",
            remedy="give a path below the node's home, or an absolute path",
        )
    return TreeRequest(path, destination)


def read_tree(
    request: TreeRequest, chunks: SharedChunks, ignored: Sequence[str] = DEFAULT_IGNORED
) -> FileTree:
    """Read and hash the directory of `request`.

    `ignored` has patterns as in .gitignore, without negation. Raises InputError for entries that cannot be
    deployed.
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
                f"{printable(entry.path)} is {_file_type(entry)} and cannot be deployed",
                remedy=f"remove it, or exclude it: --ignore {printable(name)!r}",
            )
    return FileTree(request.destination, tuple(directories), tuple(files), tuple(links))


def as_object(source: SourceFile, suffix: str = "") -> StoreObject:
    """Return the store object of a file; its name depends on content and permissions."""
    mode = "" if source.mode == PLAIN_MODE else f"-{source.mode:03o}"
    return StoreObject(f"{source.sha256}{mode}", source, source.mode)


def _walk(root: str, prefix: str, ignored: Sequence[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all entries below `root` that are not ignored, by name, directories before their content."""
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
    """Return whether one of `patterns` matches `name`, a path inside the tree.

    A pattern without a slash matches a name at any depth; a pattern with a slash matches the path from the
    top of the tree; a slash at its end restricts it to directories.
    """
    for pattern in patterns:
        stripped = pattern.rstrip("/")
        if pattern.endswith("/") and not is_directory:
            continue
        subject = name if "/" in stripped else name.rpartition("/")[2]
        if fnmatch.fnmatchcase(subject, stripped.removeprefix("/")):
            return True
    return False


def _check_link(root: str, entry: os.DirEntry[str]) -> str:
    """Return the target of a symbolic link; raises InputError when it points outside the tree."""
    target = os.readlink(entry.path)
    inside = os.path.realpath(entry.path)
    if target.startswith("/") or os.path.commonpath([root, inside]) != root:
        raise InputError(
            f"the symbolic link {printable(entry.path)} points outside the tree, to {printable(target)}",
            remedy="replace it with its target, or exclude it with --ignore",
        )
    return target


def _file_type(entry: os.DirEntry[str]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    names = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}
    return names.get(stat.S_IFMT(mode), "a device")
