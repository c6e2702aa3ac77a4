"""A session of tests: its directory, and the reaper that removes what the session leaves.

The controlling pytest starts the reaper (tests/reaper.py), a process of its own, before anything else. It
outlives pytest however that ends: Ctrl-C, SIGTERM or SIGKILL.

Everything temporary of a session is in `/tmp/ct-XXXX`, its TMPDIR: short, because Open MPI creates Unix
sockets below it. The directory is locked while its session lives. It is kept if tests have failed, until the
next session begins.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "CSDCTL_TESTS_SESSION"
"""The session's directory, in the environment of everything that it starts."""
KEPT = "kept"
"""The file in a session's directory that says: do not remove it."""
PREFIX = "ct-"
REPOSITORY = Path(__file__).parents[1]


class Session:
    """The session of this process, which started it."""

    def __init__(self) -> None:
        self.directory = _make_directory()
        self._lock = lock(self.directory)
        os.environ[VARIABLE] = str(self.directory)
        os.environ["TMPDIR"] = str(self.directory)
        # As for csdctl's own: another transport leaves files in /dev/shm when its process is killed.
        os.environ["OMPI_MCA_btl"] = "tcp,self"  # noqa: SIM112 - Open MPI's name
        tempfile.tempdir = None  # it may have been looked up already
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "tests.reaper", str(self.directory), str(os.getpid())],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def end(self, *, keep: bool) -> None:
        """Let the reaper end and remove everything, except the directory if it is to be kept."""
        if keep:
            (self.directory / KEPT).touch()
            print(f"The files of this session are kept in {self.directory} until the next one.")
        assert self._reaper.stdin
        self._reaper.stdin.close()
        self._reaper.wait()
        if self._lock is not None:
            os.close(self._lock)


def remove_stale_sessions() -> None:
    """Remove the directories of this user's sessions that have ended."""
    for directory in _parent().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid != os.geteuid() or (held := lock(directory)) is None:
                continue
            shutil.rmtree(directory, ignore_errors=True)
            os.close(held)


def lock(directory: Path) -> int | None:
    """Lock `directory` until the descriptor is closed; return None if another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _parent() -> Path:
    return Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())


def _make_directory() -> Path:
    while True:
        directory = _parent() / f"{PREFIX}{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            directory.chmod(0o1777)  # like /tmp: some tests run programs as another user
            return directory
