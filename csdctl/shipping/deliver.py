"""Deliver objects of the store, and trees of them, to one machine, which receives only what it lacks.

A tree is a directory of the host, with hidden files, empty directories, permissions, and symbolic links that
stay inside. Anything else is an error that names it, unless it is ignored.

If nothing is missing, a delivery takes one round trip. The other end is `standalone/receive.py`. An invalid
answer ends the delivery to that machine with a RemoteCommandError.
"""

import fnmatch
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from csdctl.errors import CsdctlError, InputError, NodeError
from csdctl.shipping.store import CHUNK_BYTES, StoredFile, changed, hash_source, read_chunk, unreadable
from csdctl.transport.commands import build_program_command
from csdctl.transport.program import AnswerLimits, Nothing, Program
from csdctl.transport.session import SLICE_BYTES, Session
from csdctl.worker.protocol.json_codec import PROGRESS, RESULT, Count, ProtocolError, shorten

DEFAULT_IGNORED = (".git/", "__pycache__/", ".csdctl/")
MAX_OBJECTS = 1_000_000
"""The line of a request has a character for each object."""
RESPONSE_S = 60.0
"""The deadline of one answer. A receiver sends a heartbeat every second, so this detects one that hangs."""
WHOLE_S = 900.0
"""The deadline of a delivery without files: more than the receiver waits for another deploy to end."""
BYTES_PER_S = 128 * 1024
"""The time of all bytes at this rate is added to WHOLE_S. A usable link or disk is faster."""
# A node gets its first files before csdctl's Python is installed there. Until then python3 is used.
_START = 'command -v -- "$1" >/dev/null 2>&1 || { shift; set -- python3 "$@"; }; exec "$@"'
_REMEDY = (
    "check its disk and its network, and its Python (3.8 or newer: `python:` in fleet.yaml), or leave it out"
)


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
    if len(distinct) > MAX_OBJECTS:
        problem = f"{len(distinct):,} files are more than the {MAX_OBJECTS:,} that can be sent at once"
        raise InputError(problem, remedy="pack them into an archive")
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


@dataclass(frozen=True)
class Missing:
    """A request for the objects that are marked with a 1. The others have a 0."""

    marks: tuple[str, ...]
    """One text, divided into texts that a message may have."""


@dataclass(frozen=True)
class Damaged:
    """The number of an object that arrived damaged."""

    number: Count


ANSWERS: dict[str, type] = {PROGRESS: Nothing, "missing": Missing, "damaged": Damaged, RESULT: Nothing}


@dataclass(frozen=True)
class Delivery:
    """The result of a delivery to one machine, or of a dry run."""

    num_sent: int
    bytes_sent: int
    num_present: int


@dataclass(frozen=True)
class DeliveryProgress:
    """The progress of one machine. `bytes_total` is the size of its missing objects."""

    node: str
    bytes_sent: int
    bytes_total: int


OnDeliveryProgress = Callable[[DeliveryProgress], None]


def deliver(
    session: Session,
    payload: Payload,
    *,
    python: str = "python3",
    dry_run: bool = False,
    on_progress: OnDeliveryProgress = lambda progress: None,
    patience: AnswerLimits | None = None,
) -> Delivery:
    """Send the machine the missing part of `payload`. With `dry_run`, only determine that part.

    Raises InputError for a source that changes meanwhile or an occupied destination, RemoteCommandError when
    the machine cannot write or answers otherwise, UnreachableError, and DeadlineError after `patience`.
    """
    if not payload.objects and not payload.trees:
        return Delivery(0, 0, 0)
    command, request = build_receiver(python, {**payload.manifest, "dry_run": dry_run})
    objects, requested = payload.objects, list[StoredFile]()
    whole_s = WHOLE_S + sum(stored.size for stored in objects) / BYTES_PER_S
    patience = patience or AnswerLimits(RESPONSE_S, whole_s, whole_s)
    with closing(Program(session, command, "receiving files", patience, _REMEDY)) as program:
        try:
            _send(program, [request])
            kind, answer = _read(program, ANSWERS)
            if kind == "missing":
                requested = [objects[number] for number in check_request(answer, len(objects))]
                if not dry_run:
                    _send_files(program, session, requested, on_progress)
                kind, answer = _read(program, {name: ANSWERS[name] for name in ANSWERS if name != "missing"})
            if kind == "damaged" and answer.number >= len(objects):
                raise ProtocolError("received a report of damage of an object that was not offered")
            if kind == RESULT:
                program.finish()
        except ProtocolError as error:
            raise program.error(str(error)) from None
    if kind == "damaged":
        raise _explain_damage(session.name, objects[answer.number])
    num_bytes = sum(stored.size for stored in requested)
    return Delivery(len(requested), num_bytes, len(objects) - len(requested))


def _explain_damage(node: str, stored: StoredFile) -> CsdctlError:
    if hash_source(stored.source).sha256 != stored.sha256:
        return changed(stored.source)
    remedy = "check that machine for failing disk or memory, then retry"
    return NodeError(f"{stored.source} arrived damaged", node=node, remedy=remedy)


def build_receiver(python: str, request: Mapping[str, Any]) -> tuple[list[str], bytes]:
    """Return the argument list that serves `request` on a machine, and that request, packed."""
    packed = zlib.compress(json.dumps(request, separators=(",", ":")).encode(), 1)
    program = build_program_command(python, "receive", [str(len(packed))])
    return ["sh", "-c", _START, "csdctl-receive", *program], packed


def check_request(request: Missing, num_offered: int) -> list[int]:
    """Return the numbers of the requested objects. Raises ProtocolError."""
    marks = "".join(request.marks)
    if len(marks) != num_offered or not {*marks} <= {"0", "1"}:
        received = shorten(marks)
        raise ProtocolError(
            f"received the marks {received}, expected 0 or 1 for each of {num_offered} objects"
        )
    return [number for number, mark in enumerate(marks) if mark == "1"]


def _send_files(
    program: Program, session: Session, files: Sequence[StoredFile], on_progress: OnDeliveryProgress
) -> None:
    total = sum(stored.size for stored in files)

    def report(num_bytes: int) -> None:
        on_progress(DeliveryProgress(session.name, num_bytes, total))

    def read() -> Iterator[bytes]:
        """Yield the bytes of large files in chunks, of small files combined."""
        gathered = bytearray()
        for stored in files:
            for start in range(0, stored.size, CHUNK_BYTES):
                chunk = read_chunk(stored, start)
                session.meter.record(stored.traffic_class, sent=len(chunk))
                if len(gathered) + len(chunk) <= SLICE_BYTES:
                    gathered += chunk
                    continue
                yield bytes(gathered)
                gathered.clear()
                yield chunk
        yield bytes(gathered)

    report(0)
    _send(program, read(), report)


def _read(program: Program, answers: Mapping[str, type]) -> tuple[str, Any]:
    while (frame := program.read(answers))[0] == PROGRESS:
        pass
    return frame


def _send(
    program: Program, content: Iterable[bytes], report: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Send `content`. A receiver that ends early says why in its next response."""
    num_bytes = 0
    with suppress(EOFError):
        for chunk in content:
            for start in range(0, len(chunk), SLICE_BYTES):
                program.check_clock()
                part = chunk[start : start + SLICE_BYTES]
                program.conversation.send_bytes(part)
                num_bytes += len(part)
                report(num_bytes)
