"""Memory that a rank and its link share: this rank's vector, and the sum over all ranks."""

import fcntl
import mmap
import os
from typing import Any

FLOAT_BYTES = 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedVectors:
    """The rank's side: it allocates the memory and passes `descriptor` to the link."""

    def __init__(self, num_elements: int) -> None:
        import numpy as np

        self.descriptor = os.memfd_create("csdctl-vectors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        half = num_elements * FLOAT_BYTES
        os.posix_fallocate(self.descriptor, 0, 2 * half)
        # A link that cut the memory short would end the rank by SIGBUS.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.descriptor, 2 * half)
        self.local = np.frombuffer(self._map, np.float32, num_elements, 0)
        self.total = np.frombuffer(self._map, np.float32, num_elements, half)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the arrays."""
        os.close(self.descriptor)


def map_vectors(descriptor: int, *, is_adding: bool) -> tuple[Any, Any]:
    """Return (local, total) as the link sees them: numpy arrays where it adds, else memoryviews.

    A link that does not add needs no numpy.
    """
    size = os.fstat(descriptor).st_size
    mapped = mmap.mmap(descriptor, size)
    os.close(descriptor)
    if is_adding:
        import numpy as np

        whole = np.frombuffer(mapped, np.float32)
        return whole[: len(whole) // 2], whole[len(whole) // 2 :]
    view = memoryview(mapped).cast("f")
    return view[: len(view) // 2], view[len(view) // 2 :]
