"""When a file is unchanged: the rule by which host and worker keep what they have read of it."""

import os


def file_state(status: os.stat_result) -> tuple[int, ...]:
    """Return device, inode, size, mtime and ctime: one differs after each change of content.

    Nobody can set ctime. The state must be older than a tick of the file system's clock before what was read
    is kept for it: another change within the tick leaves the same state.
    """
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
