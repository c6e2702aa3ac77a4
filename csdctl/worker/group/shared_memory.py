"""Vectors in memory that a rank, its link and its hub share."""

import fcntl
import mmap
import os
from typing import Any

FLOAT_BYTES = 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def share_vector(num_elements: int) -> tuple[Any, int]:
    """Return a new float32 vector, and the descriptor of its memory, which no process can cut short."""
    descriptor = os.memfd_create("csdctl-vector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)  # another user with a descriptor for reading cannot open it again
    os.posix_fallocate(descriptor, 0, num_elements * FLOAT_BYTES)
    # A process that cut the memory short would end the others by SIGBUS.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return map_array(descriptor), descriptor


def map_array(descriptor: int) -> Any:
    """Return the vector behind a descriptor as a NumPy array."""
    import numpy as np  # not at the top: a link does without

    return np.frombuffer(map_view(descriptor), np.float32)


def map_view(descriptor: int, *, is_read_only: bool = False) -> Any:
    """Return the vector behind a descriptor as a memoryview."""
    access = mmap.PROT_READ | (0 if is_read_only else mmap.PROT_WRITE)
    mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, access)
    return memoryview(mapped).cast("f")
