"""Receive files on a node over standard input and output of one command, or lock the machine.

csdctl need not be installed there. The host sends this source (shipping/deliver.py), so it uses only the
standard library of Python 3.8 or newer. The first input is the request: compressed JSON with the manifest, of
as many bytes as the argument says. The node then lists its missing objects, receives exactly their bytes in
that order, and reports when everything is in place. Responses are frames, lines of `@csdctl-KIND JSON`:

    missing {"marks": ["01…", …]}  send the objects of the manifest with a 1, of all texts in order
    progress {}                    heartbeat. Expects no reply
    damaged {"number": 7}          the end: object 7 has another SHA-256
    result {…}    error {…}        the end

The host has checked the names in the manifest (shipping/deliver.py). Existing files are compared by content,
never only by time or size.

    .csdctl/objects/NAME            a file, addressed by content. NAME begins with its SHA-256
    .csdctl/objects/NAME.part       until it is synced
    .csdctl/trees/ID-xxxxxxxx/      a tree, of hard links to objects. Its destination is a link to it
    .csdctl/trees/ID-xxxxxxxx.link  its destination. The tree is in use while that links to it

With the argument `lock`, the first line of input describes the csdctl that wants the machine for itself. The
response is `held`, with a description of the current holder, or `locked`, with the other machines of the
home. The lock is then kept until the input ends, however that csdctl exits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
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
STORE_LOCK = STATE + b"/receive.lock"
MACHINE_LOCK = STATE + b"/lock"
SYNC_BYTES = 8 << 20
"""Objects are synced together when they have as many bytes. An interruption loses fewer."""
MAX_MARKS = 1 << 16
"""The longest text that the host takes."""
SILENCE_S = 120.0
"""The longest silence of the host before this command ends on its own."""
UNSYNCED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES)
NO_LINK = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)
REMEDIES = {
    errno.ENOSPC: "free disk space there: `df -h`, `csdctl clean`",
    errno.EDQUOT: "free space within the user's quota there",
    errno.EROFS: "the file system is mounted read-only: check `mount` and `dmesg` there",
    errno.EACCES: "fix the permissions there, or deploy as another user",
    errno.EPERM: "fix the permissions there, or deploy as another user",
    errno.EIO: "the disk there reports errors: check `dmesg`",
}
LAST_BEAT_S = [time.monotonic()]


class RefusedError(Exception):
    """The request must not be served. `remedy` says what to do."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def respond(kind: str, **response: Any) -> None:
    """Send one frame to the host."""
    sys.stdout.write("@csdctl-" + kind + " " + json.dumps(response) + "\n")
    sys.stdout.flush()


def beat() -> None:
    """Send a heartbeat, at most once a second, so that the host does not take long work for a hang."""
    if time.monotonic() - LAST_BEAT_S[0] > 1.0:
        respond("progress")
        LAST_BEAT_S[0] = time.monotonic()


def encoded(name: str) -> bytes:
    """Return the bytes of a name on the host's file system, whatever the locale is here."""
    return name.encode("utf-8", "surrogateescape")


def printable(path: bytes) -> str:
    """Return a path in printable form."""
    return path.decode("utf-8", "backslashreplace")


class ManifestObject:
    """An object of the manifest. Its name begins with its SHA-256."""

    def __init__(self, name: str, size: int, mode: int) -> None:
        self.path = OBJECTS + b"/" + name.encode()
        self.part = self.path + b".part"
        self.sha256 = name[:64]
        self.size, self.mode = size, mode


class ManifestTree:
    """A tree of the manifest."""

    def __init__(self, content: dict[str, Any], objects: list[ManifestObject]) -> None:
        self.id: str = content["id"]
        self.destination = check_destination(encoded(content["destination"]))
        self.directories = [(encoded(name), mode) for name, mode in content["directories"]]
        self.files = [(encoded(name), objects[number]) for name, number in content["files"]]
        self.links = [(encoded(name), encoded(target)) for name, target in content["links"]]

    def is_complete(self) -> bool:
        """Return whether the destination contains this tree, compared byte for byte."""
        directory = tree_at(self.destination)
        if not os.path.basename(directory).startswith(self.id.encode()):
            return False
        directory += b"/"
        return (
            all(os.path.isdir(directory + name) for name, _ in self.directories)
            and all(os.path.islink(directory + name) for name, _ in self.links)
            and all(os.readlink(directory + name) == target for name, target in self.links)
            and all(matches(directory + name, expected) for name, expected in self.files)
        )


def check_destination(destination: bytes) -> bytes:
    """Return the normalized `destination`. Raises RefusedError if it is occupied."""
    destination = os.path.normpath(os.path.join(os.fsencode(os.environ["HOME"]), destination))
    place = os.path.join(os.path.realpath(os.path.dirname(destination)), os.path.basename(destination), b"")
    if place.startswith(os.path.realpath(STATE) + b"/"):
        raise RefusedError(f"{printable(destination)} is inside another tree or csdctl's own directory")
    is_empty = os.path.isdir(destination) and not os.path.islink(destination) and not os.listdir(destination)
    if os.path.lexists(destination) and not is_empty and not tree_at(destination):
        message = f"{printable(destination)} already exists and was not created by `csdctl deploy`"
        raise RefusedError(message, "move it away, or use another destination")
    return destination


def tree_at(destination: bytes) -> bytes:
    """Return the tree that the destination links to, or b''. It may be of a machine with the same home."""
    target = os.readlink(destination) if os.path.islink(destination) else b""
    trees, place = os.path.realpath(TREES).split(b"/"), os.path.dirname(target).split(b"/")
    is_siblings = place[:-3] == trees[:-3] and place[-2:] == trees[-2:] and trees[-4:-3] == [b"machines"]
    return target if place == trees or is_siblings else b""


def matches(path: bytes, expected: ManifestObject) -> bool:
    """Return whether the file at `path` has the expected content and mode."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), open(os.open(path, flags), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        # Another owner could change the file later.
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if is_own and status.st_size == expected.size and stat.S_IMODE(status.st_mode) == expected.mode:
            return hash_of(file.fileno()) == expected.sha256
    return False


def hash_of(handle: int) -> str:
    """Return the SHA-256 of the rest of a file, in hex."""
    digest = hashlib.sha256()
    while chunk := os.read(handle, 1 << 20):
        digest.update(chunk)
        beat()
    return digest.hexdigest()


def read_input(num_bytes: int) -> Iterator[bytes]:
    """Yield the next `num_bytes` from the host in chunks. Raises BrokenPipeError when it no longer sends."""
    while num_bytes:
        is_readable = select.select([0], [], [], SILENCE_S)[0]
        chunk = os.read(0, min(num_bytes, 1 << 17)) if is_readable else b""
        if not chunk:
            raise BrokenPipeError
        num_bytes -= len(chunk)
        yield chunk


def check_store() -> None:
    """Take other users' permissions from the store. Raises RefusedError if another user could change it."""
    parent = os.getcwd()
    while parent != "/":
        mode = os.stat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise RefusedError(f"{parent} can be changed by every user", f"chmod o-w {parent}")
        parent = os.path.dirname(parent)
    for directory in (STATE, OBJECTS, TREES):
        if os.path.lexists(directory):
            check_own(directory)


def check_own(directory: bytes) -> None:
    """Take other users' permissions from a directory. Raises RefusedError for a directory of theirs."""
    if {os.lstat(directory).st_uid, os.stat(directory).st_uid} != {os.geteuid()}:
        raise RefusedError(f"{printable(os.path.abspath(directory))} belongs to another user", "remove it")
    if os.stat(directory).st_mode & 0o077:
        os.chmod(directory, 0o700)


def make_private(directory: bytes) -> None:
    """Create a directory of the store, for only this user."""
    make_directory(directory)
    check_own(directory)


def make_directory(directory: bytes) -> None:
    """Create a directory and its missing parents, and sync their names."""
    if not os.path.isdir(directory):
        parent = os.path.dirname(directory) or b"."
        make_directory(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        sync([parent])


class Receiver:
    """One deploy: the content of the manifest, and its missing objects."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.objects = [ManifestObject(*fields) for fields in manifest["objects"]]
        self.trees = [ManifestTree(content, self.objects) for content in manifest["trees"]]
        self.keep = [self.objects[number] for number in manifest["keep"]]
        self.stale: list[ManifestTree] = []

    def missing(self) -> list[int]:
        """Return the numbers of the objects that are needed and missing."""
        self.stale = [tree for tree in self.trees if not tree.is_complete()]
        needed = {*self.keep, *(expected for tree in self.stale for _, expected in tree.files)}
        objects = enumerate(self.objects)
        return [n for n, expected in objects if expected in needed and not matches(expected.path, expected)]

    def receive(self, missing: list[int]) -> None:
        """Receive, verify, sync and rename objects. After a full disk, nothing of them remains."""
        make_private(OBJECTS)
        self.report(missing)
        arrived: list[ManifestObject] = []
        num_bytes = 0
        try:
            for number in missing:
                if not receive_object(self.objects[number]):
                    respond("damaged", number=number)
                    raise SystemExit(1)
                arrived.append(self.objects[number])
                num_bytes += self.objects[number].size
                if num_bytes >= SYNC_BYTES or number == missing[-1]:
                    sync([expected.part for expected in arrived])
                    for expected in arrived:
                        os.replace(expected.part, expected.path)
                    sync([OBJECTS])
                    arrived, num_bytes = [], 0
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                for number in missing:
                    for path in (self.objects[number].part, self.objects[number].path):
                        with contextlib.suppress(OSError):
                            os.unlink(path)
            raise

    def report(self, missing: list[int]) -> None:
        """Report the objects to send."""
        marks = ["0"] * len(self.objects)
        for number in missing:
            marks[number] = "1"
        starts = range(0, len(marks), MAX_MARKS)
        respond("missing", marks=["".join(marks[start : start + MAX_MARKS]) for start in starts])


def receive_object(expected: ManifestObject) -> bool:
    """Read an object into its part. Return whether its hash is right."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(expected.part)
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL
    with open(os.open(expected.part, flags, 0o600), "wb") as part:
        digest = hashlib.sha256()
        num_written = 0
        for chunk in read_input(expected.size):
            digest.update(chunk)
            part.write(chunk)
            num_written += len(chunk)
            if num_written >= SYNC_BYTES:
                # Starts writing the pages, so that a later sync is fast.
                os.posix_fadvise(part.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                num_written = 0
        os.fchmod(part.fileno(), expected.mode)
    is_right = digest.hexdigest() == expected.sha256
    if not is_right:
        os.unlink(expected.part)
    return is_right


def sync(paths: list[bytes]) -> None:
    """Sync files, or the names in directories, to disk, so that they survive a power cut."""
    flush: Any = os.fsync
    if len(paths) > 32:  # one sync of the file system is faster than one per file
        with contextlib.suppress(ImportError, AttributeError, OSError):  # none in this Python
            import ctypes

            flush, paths = ctypes.CDLL(None).syncfs, [OBJECTS]
    for path in paths:
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                if flush(handle):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno not in UNSYNCED or not os.path.isdir(path):
                raise
        beat()


def build_tree(tree: ManifestTree) -> bytes:
    """Build the tree in a new directory and return its path. Leave nothing after a failure."""
    name = tree.id.encode() + b"-" + os.urandom(4).hex().encode()
    directory = os.path.realpath(TREES) + b"/" + name
    make_private(TREES)
    aside = TREES + b"/.part-" + name
    try:
        fill_tree(tree, aside)
        with open(directory + b".link", "wb") as file:
            file.write(os.path.abspath(tree.destination))
        os.rename(aside, directory)
        sync([directory + b".link", TREES])
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(directory + b".link")
        raise
    return directory


def fill_tree(tree: ManifestTree, directory: bytes) -> None:
    """Create directories, then files, then links, so that nothing is ever written through a link."""
    os.mkdir(directory)
    for name, _ in tree.directories:
        os.mkdir(directory + b"/" + name)
    copies = []
    for name, expected in tree.files:
        path = directory + b"/" + name
        try:
            os.link(expected.path, path)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            shutil.copy(expected.path, path)
            copies.append(path)
        beat()
    for name, target in tree.links:
        os.symlink(target, directory + b"/" + name)
    for name, mode in reversed(tree.directories):
        os.chmod(directory + b"/" + name, mode | stat.S_IRWXU)
    sync([*copies, *(directory + b"/" + name for name, _ in tree.directories), directory])


def switch(destination: bytes, directory: bytes) -> None:
    """Make `destination` a link to `directory`, atomically."""
    make_directory(os.path.dirname(destination))
    if os.path.isdir(destination) and not os.path.islink(destination):
        os.rmdir(destination)  # only empty directories pass the check; rmdir would refuse others
    aside = destination + b".csdctl-" + os.urandom(4).hex().encode()
    os.symlink(directory, aside)
    try:
        os.replace(aside, destination)
    except OSError:
        os.unlink(aside)
        raise
    sync([os.path.dirname(destination)])


def open_lock(path: bytes) -> int:
    """Open a lock's file, never through a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def has_locked(lock: int) -> bool:
    """Lock an open file, unless another process has locked it. Return whether this succeeded."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold the store's lock, which serializes deploys. A dead process holds no lock."""
    make_private(STATE)
    with open(open_lock(STORE_LOCK), "r+") as file:
        end_s = time.monotonic() + 600.0
        while not has_locked(file.fileno()):
            if time.monotonic() > end_s:
                raise RefusedError("another csdctl is deploying here and does not finish", "wait for it")
            time.sleep(0.05)
            beat()
        yield


def serve(request: dict[str, Any]) -> None:
    """Serve `request`."""
    receiver = Receiver(request)
    missing = receiver.missing()
    if request.get("dry_run"):
        receiver.report(missing)
    elif missing or receiver.stale:
        with locked():
            missing = receiver.missing()  # another deploy may have delivered it meanwhile
            if missing:
                receiver.receive(missing)
            # Redirect the destinations when all trees are there.
            built = [(tree.destination, build_tree(tree)) for tree in receiver.stale]
            for destination, directory in built:
                switch(destination, directory)
    respond("result")


def lock_machine() -> None:
    """Take the machine's lock, or report its holder."""
    make_private(STATE)
    place = os.path.abspath(printable(MACHINE_LOCK))
    if os.path.lexists(MACHINE_LOCK):
        status = os.lstat(MACHINE_LOCK)
        if status.st_uid != os.geteuid():
            raise RefusedError(place + " belongs to another user", "remove it")
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(place + " is not a regular file", "remove it")
    lock = open_lock(MACHINE_LOCK)
    os.fchmod(lock, 0o600)
    holder = json.loads(sys.stdin.readline())
    end_s = time.monotonic() + 3.0
    while not has_locked(lock):
        current = {}
        with contextlib.suppress(ValueError, TypeError):
            current = dict(json.loads(os.pread(lock, 4096, 0)))
        # A new holder writes after it has locked. Until then the file is empty or names an ended process.
        if os.path.exists("/proc/" + str(current.get("holding_pid"))) or time.monotonic() > end_s:
            respond("held", holder=current)
            return
        time.sleep(0.02)
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({**holder, "holding_pid": os.getpid()}).encode(), 0)
    here = os.getcwd()  # …/machines/THIS
    is_of_machine = os.path.basename(os.path.dirname(here)) == "machines"
    siblings = sorted(set(os.listdir("..")) - {os.path.basename(here)}) if is_of_machine else []
    respond("locked", siblings=siblings[:100])
    os.set_inheritable(lock, True)
    os.execvp("cat", ["cat"])  # waits with a tenth of the memory of Python


def main() -> int:
    """Serve the request that the host sends. Report errors as one line."""
    os.umask(0o077)
    try:
        check_store()
        if not os.path.isdir(STATE):
            with contextlib.suppress(PermissionError):  # of directories that the shell has not created
                sync([b"..", b"../..", b"../../.."])
        if sys.argv[1] == "lock":
            lock_machine()
        else:
            serve(json.loads(zlib.decompress(b"".join(read_input(int(sys.argv[1]))))))
        return 0
    except RefusedError as refused:
        respond("error", message=str(refused), remedy=refused.remedy, exit_code=2)
    except BrokenPipeError:
        pass
    except OSError as error:
        where = f" at {printable(error.filename)}" if isinstance(error.filename, bytes) else ""
        remedy = REMEDIES.get(error.errno or 0, "check the disk there: `df -h`, `mount`")
        message = f"receiving files failed{where}: {error.strerror or error}"
        respond("error", message=message, remedy=remedy, exit_code=1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
