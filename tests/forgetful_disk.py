"""A disk that knows what a power cut would leave of it.

forgetful_disk_program.py serves it over FUSE.
"""

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.patience import eventually, wait_for

STRICT, ORDERED = "strict", "ordered"
"""States after a power cut. Strict: names and content are those of the last sync of each directory and file.

Ordered: all changes of names have survived, but the content of files only as far as it was synced."""
SAID = "said.txt"
"""The output of csdctl, on the same disk: the disk knows what csdctl had said at each sync."""
State = dict[str, tuple[int, str]]
"""By path, parents first: the mode, and the hash of a file's content or the target of a link."""


@dataclass(frozen=True)
class Cut:
    """A sync. Before and after it, the power may fail."""

    call: str
    said: str
    """What csdctl had said when it synced."""
    states: dict[str, str]
    """The hashes of the states: ORDERED before the sync, STRICT after it."""


class ForgetfulDisk:
    """A directory that is such a disk for a while, and then has a state that the disk noted."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        self.directory, self._backing, self._notes = directory, scratch / "backing", scratch / "notes"

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Serve `directory` as such a disk. What it has counts as synced."""
        shutil.move(self.directory, self._backing)
        self.directory.mkdir()
        paths = map(str, (self.directory, self._backing, self._notes))
        command = [sys.executable, "-m", "tests.forgetful_disk_program", *paths]
        with subprocess.Popen(command, cwd=Path(__file__).parents[1]) as process:
            try:
                wait_for(self.directory.is_mount, process)
                yield
            finally:
                unmount(self.directory)

    def read_cuts(self) -> list[Cut]:
        """Return the cuts in order."""
        said = (self._backing / SAID).read_bytes()
        cuts = map(json.loads, (self._notes / "cuts.jsonl").read_text().splitlines())
        return [Cut(cut["call"], said[: cut["said"]].decode(), cut["states"]) for cut in cuts]

    def read_state(self, name: str) -> State:
        """Return the state with this hash."""
        state: State = json.loads((self._notes / "states" / name).read_text())
        return state

    def read_content(self, name: str) -> bytes:
        """Return the content of a file that has this hash."""
        return (self._notes / "blobs" / name).read_bytes()

    def restore(self, name: str) -> None:
        """Let the directory have the state with this hash."""
        shutil.rmtree(self.directory)
        for path, (mode, content) in self.read_state(name).items():
            target = self.directory / path
            if stat.S_ISLNK(mode):
                target.symlink_to(content)
                continue
            if stat.S_ISDIR(mode):
                target.mkdir()
            else:
                shutil.copyfile(self._notes / "blobs" / content, target)
            target.chmod(stat.S_IMODE(mode))


def unmount(mount: Path) -> None:
    """Unmount `mount` as soon as no process uses it any more."""
    assert eventually(lambda: subprocess.run(["umount", mount], check=False).returncode == 0)
