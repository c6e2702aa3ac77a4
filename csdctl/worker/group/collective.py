"""Collectives: the ways to sum a vector over the ranks, and the choice of the fastest one.

A new collective is a class that implements `Collective`, registered in `COLLECTIVES`; its name goes into
`protocol.orders.COLLECTIVE_NAMES`, from which the command line takes the names that it accepts.
"""

import math
import struct
import time
from typing import Any, Protocol

from csdctl.worker.group.allreduce import Allreduce
from csdctl.worker.group.channel import PeerFaultError
from csdctl.worker.group.messages import allgather
from csdctl.worker.group.mpi import World
from csdctl.worker.group.star import Star
from csdctl.worker.group.tails import ExpectedTails
from csdctl.worker.group.waiting import OnWait, ignore_wait
from csdctl.worker.protocol.orders import ALLREDUCE, STAR

_SECONDS = struct.Struct("<d")
MAX_SUM_S = 3600.0
LONG_S = 2.0
"""A sum of so many seconds is timed once: opening the connections is a small part of it."""


class Collective(Protocol):
    """Sums a float32 vector over all ranks; waiting ranks sleep.

    The result has the same bits on all ranks and in every run.
    """

    def __init__(self, world: World, local: Any, total: Any) -> None:
        """`local` and `total`: contiguous float32 buffers of one size; numpy arrays on rank 0."""

    @property
    def is_sending(self) -> bool:
        """Whether the latest sum is still on its way to some rank."""

    def post_receives(self) -> None:
        """Post receives for the vectors of the next sum."""

    def progress(self) -> None:
        """Process what has arrived, without waiting."""

    def flush(self, on_wait: OnWait = ignore_wait) -> None:
        """Wait until the latest sum has left."""

    def sum(self, on_wait: OnWait = ignore_wait, expected: ExpectedTails | None = None) -> None:
        """Sum `local` over all ranks into `total` on all ranks.

        A collective in which rank 0 sees single vectors compares them with what it has `expected`, and
        raises PeerFaultError before their sum reaches any other rank.
        """

    def find_not_finite(self) -> list[int]:
        """Return the other ranks whose latest vectors are not finite, on rank 0; [] where that is unknown."""


COLLECTIVES: dict[str, type[Collective]] = {STAR: Star, ALLREDUCE: Allreduce}


def choose_collective(
    world: World,
    local: Any,
    total: Any,
    wanted: str = "",
    *,
    rounds: int = 2,
    on_wait: OnWait = ignore_wait,
) -> tuple[Collective, str, float]:
    """Return the fastest collective, its name, and the seconds of its fastest sum on the slowest rank.

    `wanted` names the collective to use instead. Call on all ranks.
    """
    measured: list[tuple[float, str, Collective]] = []
    for name in (wanted,) if wanted in COLLECTIVES else COLLECTIVES:
        collective = COLLECTIVES[name](world, local, total)
        # The first sum opens connections and does not count, if it is not long.
        slowest_s = max(gather_seconds(world, _time_sum(world, collective, on_wait), on_wait))
        if slowest_s < LONG_S:
            own_s = min(_time_sum(world, collective, on_wait) for _ in range(rounds))
            slowest_s = max(gather_seconds(world, own_s, on_wait))
        measured.append((slowest_s, name, collective))
    seconds, name, collective = min(measured, key=lambda row: row[0])
    return collective, name, seconds


def gather_seconds(world: World, own_s: float, on_wait: OnWait = ignore_wait) -> list[float]:
    """Return the seconds of all ranks; raises PeerFaultError for what cannot be the time of a sum."""
    gathered = allgather(world, _SECONDS.pack(own_s), _SECONDS.size, on_wait)
    seconds = []
    for rank, content in enumerate(gathered):
        value = _SECONDS.unpack(content)[0] if len(content) == _SECONDS.size else math.nan
        if not 0 <= value <= MAX_SUM_S:  # NaN neither
            raise PeerFaultError(rank, f"sent {content.hex()}, expected the seconds of a sum")
        seconds.append(value)
    return seconds


def _time_sum(world: World, collective: Collective, on_wait: OnWait) -> float:
    allgather(world, b"", 0, on_wait)
    started_s = time.perf_counter()
    collective.sum(on_wait)
    seconds = time.perf_counter() - started_s
    collective.flush(on_wait)
    return seconds
