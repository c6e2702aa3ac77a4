"""What a failed system call on a file means, and what to do about it."""

import errno
import os
from pathlib import Path

from csdctl.worker.protocol.limits import explain_error

WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of a write alone."""
IN_ITS_PLACE = "move away what is in its place"
PERMANENT = {
    errno.EACCES: "fix the permissions",
    errno.EPERM: "fix the permissions",
    errno.ENOTDIR: IN_ITS_PLACE,
    errno.EISDIR: IN_ITS_PLACE,
    errno.ELOOP: "remove that link",
}
"""What to do about errors that do not pass, by number."""
REMEDIES = PERMANENT | {
    errno.ENOSPC: "free space on {disk}",
    errno.EDQUOT: "free space on {disk}, or ask for a larger quota",
    errno.EROFS: "mount {disk} read-write: `dmesg` shows why it is not",
    errno.EIO: "check the disk at {disk}: `dmesg`",
}
"""What to do, by error number. `disk` is where the disk is mounted."""


def describe_os_error(error: OSError, path: str | Path = "") -> tuple[str, str]:
    """Return the problem, and what to do, '' if that is unknown. `path`: of an error that names no file."""
    code, name = error.errno or 0, error.filename or path
    path = Path(os.fsdecode(name) if isinstance(name, bytes) else str(name))
    disk = Path(os.path.realpath(path))
    while not os.path.ismount(disk):
        disk = disk.parent
    verb = "write" if code in WRITING else "access"
    what = f"cannot {verb} {path}" if name else f"a {'write' if code in WRITING else 'system call'} failed"
    cause = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{what}: {cause}{explain_error(str(error))}", REMEDIES.get(code, "").format(disk=disk)
