"""The step file: rank 0's state after every step, in the machine's memory while the run trains."""

import contextlib
import os
import shutil
import stat
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def private_memory(parent: Path = SHARED_MEMORY) -> Path | None:
    """Return this user's own directory in the machine's memory, created when it is missing; None without one.

    Every user may create files in /dev/shm. A directory that another user has put in this one's place, or may
    write to, is not used.
    """
    path = parent / f"csdctl-{os.geteuid()}"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    return path if is_private else None


def keep_step_file(step_file: Path, kept: Path) -> None:
    """Move the step file of a run that has not finished to disk, as `kept`: nothing stays in memory.

    On a full disk the state after the latest step is lost; checkpoints remain.
    """
    if step_file == kept or not step_file.exists():
        return
    aside = kept.with_name(f"part-{kept.name}")
    aside.unlink(missing_ok=True)
    try:
        with contextlib.suppress(OSError), open(aside, "xb", opener=_open_private) as into:
            with step_file.open("rb") as content:
                shutil.copyfileobj(content, into, 1 << 20)
            into.flush()
            os.fsync(into.fileno())  # what was in memory is removed next
            os.replace(aside, kept)
    finally:
        aside.unlink(missing_ok=True)
        step_file.unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
