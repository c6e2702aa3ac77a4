"""A limit to the memory of a process in MPI.

MPI keeps every message that nobody has asked for. Without a limit, a rank that sends on and on would fill the
memory of another one's machine; with it, the process that receives ends, and its group is lost.
"""

from csdctl.worker.group.mpi import World
from csdctl.worker.process.machine import data_bytes, limit_data

BASE_BYTES, PER_RANK_BYTES, NUM_VECTORS = 1 << 30, 32 << 20, 8
"""Far above what is needed: MPI's buffers, vectors of every rank on rank 0, temporary ones of collectives."""


class MemoryLimit:
    """What this process may allocate from now on, for sums of vectors of `vector_bytes`."""

    def __init__(self, world: World, vector_bytes: int) -> None:
        num_vectors = NUM_VECTORS + (0 if world.rank else 2 * world.size)
        allowance_bytes = BASE_BYTES + world.size * PER_RANK_BYTES + num_vectors * vector_bytes
        self._limit_bytes = data_bytes() + allowance_bytes
        self._largest_bytes = 0
        limit_data(self._limit_bytes)

    def allow(self, num_bytes: int) -> None:
        """Allow messages of this size together; of several calls, the largest size counts."""
        if num_bytes > self._largest_bytes:
            self._largest_bytes = num_bytes
            limit_data(self._limit_bytes + num_bytes)
