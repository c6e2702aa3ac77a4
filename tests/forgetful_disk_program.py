"""Serve a directory over FUSE, and note at every sync what a power cut would leave of it.

    python -m tests.forgetful_disk_program MOUNT BACKING NOTES

Everything is passed on to the directory BACKING. NOTES gets a line of `cuts.jsonl` for each sync, states as
JSON in `states` and the content of files in `blobs`, by their hashes.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mfusepy

from tests.forgetful_disk import ORDERED, SAID, STRICT, State

HIDDEN = ".fuse_hidden"
"""The names of open files that were removed begin with this in libfuse."""
Names = dict[str, int]
"""The inodes in a directory by name."""


class Disk(mfusepy.Operations):
    """Operations on files in `backing`. No inode number is used again: removed files are kept in `notes`."""

    use_ns = True

    def __init__(self, backing: Path, notes: Path) -> None:
        self._backing, self._notes = backing, notes
        for name in ("removed", "states", "blobs"):
            (notes / name).mkdir(parents=True)
        self._empty = self._save("blobs", b"")
        self._modes: dict[int, int] = {}
        self._content: dict[int, str] = {}
        """The content of files when they were last synced, and the targets of links."""
        self._names: dict[int, Names] = {}
        """The content of directories when they were last synced."""
        for place, _, files in os.walk(backing):
            for path in (place, *(f"{place}/{file}" for file in files)):
                self._add(path)
            self._names[os.stat(place).st_ino] = names_in(place)
            for file in files:
                self._sync_file(f"{place}/{file}")

    def _at(self, path: str) -> str:
        return f"{self._backing}{path}"

    def _add(self, place: str) -> None:
        status = os.lstat(place)
        self._modes[status.st_ino] = status.st_mode
        if stat.S_ISLNK(status.st_mode):
            self._content[status.st_ino] = os.readlink(place)

    def _keep(self, place: str) -> None:
        """Keep the inode of what is removed or replaced now, if that is its last name."""
        status = os.lstat(place)
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink == 1:
            os.link(place, self._notes / "removed" / str(status.st_ino), follow_symlinks=False)

    def _save(self, kind: str, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        with contextlib.suppress(FileExistsError), open(self._notes / kind / name, "xb") as file:
            file.write(content)
        return name

    def _sync_file(self, place: str) -> None:
        if stat.S_ISREG(os.lstat(place).st_mode) or place.startswith("/proc/self/fd/"):
            with open(place, "rb") as file:
                self._content[os.fstat(file.fileno()).st_ino] = self._save("blobs", file.read())

    def _note(self, call: str, sync: Callable[[], object]) -> None:
        """Note the ordered state, sync, and note the strict state."""
        ordered = self._save_state(lambda _, path: names_in(self._at(path)))
        sync()
        strict = self._save_state(lambda inode, _: self._names.get(inode, {}))
        with contextlib.suppress(FileNotFoundError), open(self._notes / "cuts.jsonl", "a") as file:
            size = os.stat(self._at(f"/{SAID}")).st_size
            cut = {"call": call, "said": size, "states": {ORDERED: ordered, STRICT: strict}}
            file.write(json.dumps(cut) + "\n")

    def _save_state(self, read_names: Callable[[int, str], Names]) -> str:
        state: State = {}

        def add(inode: int, path: str) -> None:
            mode = self._modes[inode]
            state[path.removeprefix("/")] = (
                mode,
                "" if stat.S_ISDIR(mode) else self._content.get(inode, self._empty),
            )
            if stat.S_ISDIR(mode):
                for name, child in sorted(read_names(inode, path).items()):
                    add(child, f"{path}/{name}")

        add(os.stat(self._backing).st_ino, "")
        return self._save("states", json.dumps(state).encode())

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._note(f"fsync {path}", lambda: self._sync_file(f"/proc/self/fd/{fh}"))
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        place = self._at(path)
        self._note(f"fsync {path}/", lambda: self._names.update({os.stat(place).st_ino: names_in(place)}))
        return 0

    def destroy(self, path: str) -> None:
        self._note("the end", lambda: None)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._at(path))
        fields = (
            "st_dev",
            "st_ino",
            "st_mode",
            "st_nlink",
            "st_uid",
            "st_gid",
            "st_size",
            "st_blocks",
            "st_blksize",
        )
        times = {f"st_{name}time": getattr(status, f"st_{name}time_ns") for name in "amc"}
        return {name: getattr(status, name) for name in fields} | times

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        for name in (".", "..", *os.listdir(self._at(path))):
            status = os.lstat(f"{self._at(path)}/{name}")
            yield name, {"st_ino": status.st_ino, "st_mode": status.st_mode}, 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._at(path))
        return {name: getattr(status, name) for name in dir(status) if name.startswith("f_")}

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_APPEND)  # the kernel says where to write

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        descriptor = os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        self._add(self._at(path))
        return descriptor

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        self._add(self._at(path))
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times, follow_symlinks=False)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        self._add(self._at(path))
        return 0

    def mknod(self, path: str, mode: int, dev: int) -> int:
        os.mknod(self._at(path), mode, dev)
        self._add(self._at(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._at(target))
        self._add(self._at(target))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target), follow_symlinks=False)
        return 0

    def unlink(self, path: str) -> int:
        self._keep(self._at(path))
        os.unlink(self._at(path))
        return 0

    def rmdir(self, path: str) -> int:
        place = self._at(path)
        if os.listdir(place):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        os.rename(place, self._notes / "removed" / str(os.stat(place).st_ino))
        return 0

    def rename(self, old: str, new: str) -> int:
        if os.path.lexists(self._at(new)):
            self._keep(self._at(new))
        os.rename(self._at(old), self._at(new))
        return 0


def names_in(place: str) -> Names:
    """Return the inodes in a directory by name."""
    return {entry.name: entry.inode() for entry in os.scandir(place) if not entry.name.startswith(HIDDEN)}


if __name__ == "__main__":
    mount, backing, notes = map(Path, sys.argv[1:])
    mfusepy.FUSE(
        Disk(backing, notes),
        str(mount),
        foreground=True,
        nothreads=True,  # a note is of one moment
        use_ino=True,
        allow_other=True,
        default_permissions=True,
    )
