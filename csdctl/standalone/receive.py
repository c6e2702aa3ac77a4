"""Receives files on a node: one command that is spoken to over its own input and output.

Started as `PYTHON -I -S -c SOURCE REQUEST`, so nothing of csdctl has to be there: standard library only,
Python 3.8 or newer. REQUEST holds the manifest, or its digest when it is long; a manifest that the node
does not have yet is asked for. Then the node says what it misses, gets the bytes of exactly that in the
same order, and says so when everything is in place. Answers are lines of JSON:

    {"need": "manifest"}                                     send the packed manifest
    {"missing": [[first, last], …], "resume": {"7": 4096}}   send these objects, number 7 from byte 4096 on
    {"busy": …}                                              still at work; no answer is wanted
    {"done": {…}}    {"refused": …}    {"failed": …}         the end

Nothing from the manifest is trusted: names that lead out of the store or of a tree are refused here too.
What is there counts by its content, never by its time or its size alone.

    .csdctl/objects/NAME            a file by its content; NAME begins with its SHA-256
    .csdctl/objects/NAME.part       what arrived of it so far; continued by the next deploy
    .csdctl/trees/ID-xxxxxxxx/      a tree, of hard links to objects; its destination is a link to it
    .csdctl/trees/ID-xxxxxxxx.link  the destination; the tree is in use while that links to it
    .csdctl/manifests/DIGEST        a long manifest, so that it need not be sent again
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

STATE = b".csdctl"
OBJECTS = STATE + b"/objects"
TREES = STATE + b"/trees"
MANIFESTS = STATE + b"/manifests"
LOCK = STATE + b"/receive.lock"

READ_BYTES = 1 << 20
INPUT_BYTES = 1 << 17
FLUSH_BYTES = 8 << 20
SYNC_FILE_RANGE_WRITE = 2
RESUME_BYTES = 1 << 20
"""A part shorter than this is sent anew."""

SILENCE_S = 120.0
"""How long the host may send nothing before this command ends by itself."""

BUSY_S = 1.0
LOCK_WAIT_S = 600.0
MAX_TRIES = 2
MAX_RANGES = 1000
"""In one line: the host reads no line of more than a megabyte."""

MAX_STEPS = 4096
"""How far a symbolic link is followed; a circle of links has no end."""

MANY_FILES = 32
"""From so many files on, syncing the whole file system once is quicker than syncing each."""

NO_LINK = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)
FULL = (errno.ENOSPC, errno.EDQUOT)


class Refused(Exception):
    """What was asked for must not be done; `remedy` says what to do about it."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class HostGone(Exception):
    """The host said nothing any more; parts are kept for the next time."""


def say(**answer: Any) -> None:
    """One line to the host."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Pulse:
    """Tells the host now and then that work goes on, so that it need not guess how long work may take."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def beat(self, what: str) -> None:
        """Say that we are at work, if nothing was said for a while."""
        if time.monotonic() - self._last_s > BUSY_S:
            say(busy=what)
            self._last_s = time.monotonic()


PULSE = Pulse()


def encoded(name: str) -> bytes:
    """A name as the bytes that the host's file system has, whatever the locale is here."""
    return name.encode("utf-8", "surrogateescape")


def shown(path: bytes) -> str:
    """A path as it can be printed."""
    return path.decode("utf-8", "backslashreplace")


class Wanted:
    """An object of the manifest."""

    def __init__(self, name: str, sha256: str, size: int, mode: int) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}[A-Za-z0-9._-]{0,40}", name) or not name.startswith(sha256):
            raise Refused(f"{name!r} is not the name of an object")
        self.path = OBJECTS + b"/" + name.encode()
        self.part = self.path + b".part"
        self.sha256 = sha256
        self.size = int(size)
        self.mode = int(mode) & 0o777


class Tree:
    """A tree of the manifest, its names checked."""

    def __init__(self, content: dict[str, Any], objects: list[Wanted]) -> None:
        self.id = str(content["id"])
        if not re.fullmatch(r"[0-9a-f]{32}", self.id):
            raise Refused(f"{self.id!r} is not the id of a tree")
        self.destination = check_destination(encoded(content["destination"]))
        self.directories = [(check_inside(encoded(name)), mode) for name, mode in content["directories"]]
        self.files = [(check_inside(encoded(name)), objects[number]) for name, number in content["files"]]
        links = {encoded(name): encoded(target) for name, target in content["links"]}
        self.links = [(check_inside(name), check_link(name, target, links)) for name, target in links.items()]

    def current(self) -> bytes:
        """The directory that the destination links to; empty when it is not one of ours."""
        try:
            target = os.readlink(self.destination)
        except OSError:
            return b""
        return target if os.path.dirname(target) == os.path.realpath(TREES) else b""

    def is_whole(self) -> bool:
        """Whether the destination holds this tree, every byte of it."""
        directory = self.current()
        if not os.path.basename(directory).startswith(self.id.encode()):
            return False
        return (
            all(os.path.isdir(directory + b"/" + name) for name, _ in self.directories)
            and all(is_link_to(directory + b"/" + name, target) for name, target in self.links)
            and all(is_right(directory + b"/" + name, wanted) for name, wanted in self.files)
        )


def check_inside(name: bytes) -> bytes:
    """`name` when it stays inside its tree; raises Refused."""
    if b"\0" in name or any(part in (b"", b".", b"..") for part in name.split(b"/")):
        raise Refused(f"{shown(name)!r} leads out of its tree")
    return name


def check_link(name: bytes, target: bytes, links: dict[bytes, bytes]) -> bytes:
    """`target` when the symbolic link `name` stays inside its tree, also by way of other links."""
    place: list[bytes] = []
    pending = [*os.path.dirname(name).split(b"/"), *target.split(b"/")]
    is_inside = not target.startswith(b"/") and b"\0" not in target
    for _ in range(MAX_STEPS):
        if not pending or not is_inside:
            break
        part = pending.pop(0)
        if part == b"..":
            is_inside = bool(place)
            del place[-1:]
        elif part not in (b"", b"."):
            place.append(part)
            followed = links.get(b"/".join(place))
            if followed is not None:
                is_inside = not followed.startswith(b"/")
                pending[:0] = followed.split(b"/")
                place.pop()
    if pending or not is_inside:
        raise Refused(f"the symbolic link {shown(name)!r} leads out of its tree")
    return target


def check_destination(destination: bytes) -> bytes:
    """`destination` when a tree may come there; raises Refused when something of others is there."""
    parts = [part for part in destination.split(b"/") if part not in (b"", b".")]
    if not parts or b".." in parts or b"\0" in destination or parts[0] == STATE:
        raise Refused(f"{shown(destination)!r} cannot be the destination of a tree")
    destination = (b"/" if destination.startswith(b"/") else b"") + b"/".join(parts)
    state = os.path.realpath(STATE)
    if (os.path.realpath(os.path.dirname(destination) or b".") + b"/").startswith(state + b"/"):
        raise Refused(f"{shown(destination)} lies inside another tree, or in csdctl's own directory")
    if os.path.lexists(destination) and not is_ours(destination):
        raise Refused(
            f"{shown(destination)} is there already and was not made by `csdctl deploy`",
            "move it away, or name another destination",
        )
    return destination


def is_ours(destination: bytes) -> bool:
    """Whether `destination` is a link that csdctl made, or an empty directory."""
    if os.path.islink(destination):
        return os.path.dirname(os.readlink(destination)) == os.path.realpath(TREES)
    return os.path.isdir(destination) and not os.listdir(destination)


def is_link_to(path: bytes, target: bytes) -> bool:
    """Whether `path` is a symbolic link to `target`."""
    return os.path.islink(path) and os.readlink(path) == target


def is_right(path: bytes, wanted: Wanted) -> bool:
    """Whether the file at `path` has the content and the mode that are wanted."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != wanted.size:
            return False
        is_mode_right = stat.S_IMODE(found.st_mode) == wanted.mode
        return is_mode_right and hash_of(handle, wanted.size).hexdigest() == wanted.sha256
    except OSError:
        return False
    finally:
        os.close(handle)


def hash_of(handle: int, num_bytes: int) -> Any:
    """SHA-256 over the next `num_bytes` of `handle`, or what there is of them."""
    digest = hashlib.sha256()
    while num_bytes:
        piece = os.read(handle, min(num_bytes, READ_BYTES))
        if not piece:
            break
        digest.update(piece)
        num_bytes -= len(piece)
        PULSE.beat("checking")
    return digest


def read_input(num_bytes: int) -> Iterator[bytes]:
    """The next `num_bytes` from the host, piece by piece; raises HostGone."""
    while num_bytes:
        if not select.select([0], [], [], SILENCE_S)[0]:
            raise HostGone
        piece = os.read(0, min(num_bytes, INPUT_BYTES))
        if not piece:
            raise HostGone
        num_bytes -= len(piece)
        yield piece


def load_manifest(request: dict[str, Any]) -> dict[str, Any]:
    """The manifest of `request`: in it, kept here from an earlier time, or asked for."""
    if "manifest" in request:
        content: dict[str, Any] = request["manifest"]
        return content
    packed = kept_manifest(request["digest"])
    if not packed:
        say(need="manifest")
        packed = b"".join(read_input(int(request["num_bytes"])))
        if hashlib.sha256(packed).hexdigest() != request["digest"]:
            raise Refused("the manifest arrived damaged", "try again")
        request["packed"] = packed
    content = json.loads(zlib.decompress(packed))
    return content


def kept_manifest(digest: str) -> bytes:
    """The packed manifest of an earlier time, or nothing."""
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise Refused(f"{digest!r} is not a digest")
    try:
        with open(MANIFESTS + b"/" + digest.encode(), "rb") as file:
            packed = file.read()
    except OSError:
        return b""
    return packed if hashlib.sha256(packed).hexdigest() == digest else b""


def keep_manifest(request: dict[str, Any]) -> None:
    """Keep a manifest that was sent, so that asking whether all is in place is one round trip."""
    if "packed" in request:
        os.makedirs(MANIFESTS, exist_ok=True)
        path = MANIFESTS + b"/" + request["digest"].encode()
        with open(path + b".part", "wb") as file:
            file.write(request["packed"])
        os.replace(path + b".part", path)


class Receiver:
    """One deploy: what the manifest wants, and what of it is not in place."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.objects = [Wanted(*fields) for fields in manifest["objects"]]
        self.trees = [Tree(content, self.objects) for content in manifest["trees"]]
        self.keep = [self.objects[number] for number in manifest["keep"]]
        self.stale: list[Tree] = []
        self.found: set[bytes] = set()
        """What lies in the store; asking it is quicker than opening thousands of files that are not there."""

    def missing(self) -> list[int]:
        """The numbers of the objects that are needed and not there."""
        self.stale = [tree for tree in self.trees if not tree.is_whole()]
        self.found = (
            {OBJECTS + b"/" + name for name in list_names(OBJECTS)} if self.stale or self.keep else set()
        )
        needed = {id(wanted) for wanted in self.keep}
        for tree in self.stale:
            needed.update(id(wanted) for _, wanted in tree.files)
        return [
            number
            for number, wanted in enumerate(self.objects)
            if id(wanted) in needed and not (wanted.path in self.found and is_right(wanted.path, wanted))
        ]

    def receive(self, missing: list[int]) -> None:
        """Get the objects `missing`, verify them, sync them and give them their names.

        After a full disk, nothing of them remains; after a lost connection, their parts do.
        """
        os.makedirs(OBJECTS, exist_ok=True)
        arrived = list(missing)
        offsets = {number: self.found_of_part(self.objects[number]) for number in missing}
        missing = [n for n in arrived if not offsets[n] or offsets[n] < self.objects[n].size]
        try:
            for _ in range(MAX_TRIES):
                tell_missing(missing, offsets)
                missing = [n for n in missing if not receive_object(self.objects[n], offsets[n])]
                if not missing:
                    break
                offsets = dict.fromkeys(missing, 0)
            if missing:
                tell_damaged(missing)
            sync([self.objects[number].part for number in arrived])
        except OSError as error:
            if error.errno in FULL:
                for number in arrived:
                    with contextlib.suppress(OSError):
                        os.unlink(self.objects[number].part)
            raise
        for number in arrived:
            os.replace(self.objects[number].part, self.objects[number].path)

    def found_of_part(self, wanted: Wanted) -> int:
        """How much of the object is there from an interrupted deploy; its hash is checked at the end."""
        if wanted.part not in self.found:
            return 0
        with open(os.open(wanted.part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == wanted.size and hash_of(file.fileno(), size).hexdigest() == wanted.sha256:
                os.chmod(wanted.part, wanted.mode)
                return size
        return size if RESUME_BYTES <= size < wanted.size else 0

    def build_trees(self) -> None:
        """Build every tree that is not whole beside the others, then let the destinations link to them."""
        built = [(tree, build_tree(tree)) for tree in self.stale]
        for tree, directory in built:
            switch(tree.destination, directory)


def tell_missing(missing: list[int], offsets: dict[int, int]) -> None:
    """Say what is to be sent, as ranges of numbers in the order that it is read."""
    ranges: list[list[int]] = []
    for number in missing:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    while True:
        now, ranges = ranges[:MAX_RANGES], ranges[MAX_RANGES:]
        numbers = (number for first, last in now for number in range(first, last + 1))
        resume = {str(number): offsets[number] for number in numbers if offsets[number]}
        say(missing=now, resume=resume, more=bool(ranges))
        if not ranges:
            return


def tell_damaged(missing: list[int]) -> None:
    """End: these objects came with another hash than they should have, however often they were sent."""
    say(failed="damaged", numbers=missing[:100])
    raise SystemExit(1)


def receive_object(wanted: Wanted, offset: int) -> bool:
    """Read the bytes of an object from `offset` on into its part; says whether its hash is right."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if offset else os.O_TRUNC)
    with open(os.open(wanted.part, flags, 0o600), "r+b", buffering=0) as part:
        digest = hashlib.sha256()
        if offset:
            digest = hash_of(part.fileno(), offset)
            part.seek(offset)
        num_written = 0
        for piece in read_input(wanted.size - offset):
            digest.update(piece)
            write_all(part.fileno(), piece)
            num_written += len(piece)
            if num_written >= FLUSH_BYTES:
                start_flush(part.fileno())
                num_written = 0
        os.fchmod(part.fileno(), wanted.mode)
    return bool(digest.hexdigest() == wanted.sha256)


def write_all(handle: int, data: bytes) -> None:
    """Write all of `data`; a file near the end of its disk takes less than it is given."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def start_flush(handle: int) -> None:
    """Let the system begin to write to the disk what a file holds, so that syncing it later is quick."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        whole = ctypes.c_int64(0)
        ctypes.CDLL(None).sync_file_range(handle, whole, whole, SYNC_FILE_RANGE_WRITE)


def sync(paths: list[bytes]) -> None:
    """Bring what was written to the disk itself: a file that has its name survives a power cut whole."""
    if len(paths) > MANY_FILES and sync_file_system():
        return
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        PULSE.beat("syncing")


def sync_file_system() -> bool:
    """Sync the store's file system; says whether the C library could."""
    try:
        import ctypes

        handle = os.open(OBJECTS, os.O_RDONLY)
        try:
            return bool(ctypes.CDLL(None).syncfs(handle) == 0)
        finally:
            os.close(handle)
    except (ImportError, OSError, AttributeError):
        return False


def build_tree(tree: Tree) -> bytes:
    """The tree as a new directory; returns its path. Nothing of it remains when that fails."""
    name = tree.id.encode() + b"-" + os.urandom(4).hex().encode()
    directory = os.path.realpath(TREES) + b"/" + name
    os.makedirs(TREES, exist_ok=True)
    aside = TREES + b"/.part-" + name
    try:
        fill_tree(tree, aside)
        with open(directory + b".link", "wb") as file:
            file.write(os.path.abspath(tree.destination))
        os.rename(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(directory + b".link")
        raise
    return directory


def fill_tree(tree: Tree, directory: bytes) -> None:
    """Directories, then files, then links: nothing is ever written by way of a link."""
    os.mkdir(directory)
    for name, _ in tree.directories:
        os.mkdir(directory + b"/" + name)
    copies = []
    for name, wanted in tree.files:
        path = directory + b"/" + name
        try:
            os.link(wanted.path, path)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            shutil.copyfile(wanted.path, path)
            os.chmod(path, wanted.mode)
            copies.append(path)
        PULSE.beat("linking")
    for name, target in tree.links:
        os.symlink(target, directory + b"/" + name)
    for name, mode in reversed(tree.directories):
        os.chmod(directory + b"/" + name, int(mode) & 0o777 | stat.S_IRWXU)
    sync(copies)


def switch(destination: bytes, directory: bytes) -> None:
    """Let `destination` link to `directory`, in one step."""
    parent = os.path.dirname(destination)
    if parent:
        os.makedirs(parent, exist_ok=True)
    if os.path.isdir(destination) and not os.path.islink(destination):
        os.rmdir(destination)  # only an empty one gets here, and only an empty one can be removed
    aside = destination + b".csdctl-" + os.urandom(4).hex().encode()
    os.symlink(directory, aside)
    try:
        os.replace(aside, destination)
    except OSError:
        os.unlink(aside)
        raise


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold the store's lock: two deploys to one store take turns. A dead one holds no lock."""
    os.makedirs(STATE, exist_ok=True)
    with open(LOCK, "a+") as file:
        end_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise Refused("another csdctl deploys here and does not end", "wait for it") from None
            time.sleep(0.05)
            PULSE.beat("waiting for another deploy")
        yield


def prune() -> int:
    """Remove what nothing uses: trees that no destination links to, objects of no tree, parts, manifests.

    Files that were sent for training (the worker, models, shards) go too: the next deploy sends them again.
    Returns how many names were removed.
    """
    num_removed = 0
    for name in list_names(TREES):
        path = os.path.realpath(TREES) + b"/" + name
        if name.startswith(b".part-") or (not name.endswith(b".link") and not is_in_use(path)):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(path + b".link")
            num_removed += 1
    unused = [OBJECTS + b"/" + name for name in list_names(OBJECTS)]
    unused = [path for path in unused if os.lstat(path).st_nlink == 1]
    for path in unused + [MANIFESTS + b"/" + name for name in list_names(MANIFESTS)]:
        os.unlink(path)
        num_removed += 1
    return num_removed


def is_in_use(directory: bytes) -> bool:
    """Whether the destination of a tree still links to it."""
    try:
        with open(directory + b".link", "rb") as file:
            return is_link_to(file.read(), directory)
    except OSError:
        return False


def list_names(directory: bytes) -> list[bytes]:
    """The names in `directory`; none when it is not there."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def serve(request: dict[str, Any]) -> None:
    """Do what `request` asks for."""
    if request.get("prune"):
        with locked():
            say(done={"num_removed": prune()})
        return
    receiver = Receiver(load_manifest(request))
    missing = receiver.missing()
    if request.get("dry_run"):
        tell_missing(missing, dict.fromkeys(missing, 0))
    elif missing or receiver.stale:
        with locked():
            missing = receiver.missing()  # another deploy may have brought it while we waited
            if missing:
                receiver.receive(missing)
            receiver.build_trees()
            keep_manifest(request)
    say(done={"num_missing": len(missing), "num_trees": len(receiver.stale)})


def main() -> int:
    """Serve the request on the command line; what goes wrong becomes one line."""
    os.umask(0o022)
    try:
        serve(json.loads(sys.argv[1]))
    except Refused as refused:
        say(refused=str(refused), remedy=refused.remedy)
        return 2
    except HostGone:
        return 1
    except BrokenPipeError:
        return 1
    except OSError as error:
        path = error.filename if isinstance(error.filename, bytes) else b""
        say(failed="system", errno=error.errno, words=error.strerror or str(error), path=shown(path))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
