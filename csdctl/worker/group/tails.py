"""The end of every rank's vector, which rank 0 checks before it passes on the sum.

A vector ends with [n, stop, seconds of each rank of the run] (compute/step.py). Its gradient cannot be
checked: only the node knows its samples. Its end can: n follows from the schedule, only rank 0 may ask to
stop, and a rank knows its own seconds alone.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from csdctl.worker.group.channel import PeerFaultError

MAX_STEP_S = 3600.0
"""A longer step is none: the run would have ended for its silence."""
TOLERANCE = 1e-3
"""Relative, of n: a sum of weights in float32."""
_HEAD = struct.Struct("<QQ")


@dataclass(frozen=True)
class ExpectedTails:
    """What the vectors of one sum must end with; of every rank of the group, rank 0 included."""

    start: int
    """The index of n."""
    ranks: Sequence[int]
    """The run's rank of each rank of the group: its place among the seconds."""
    counts: Sequence[float]
    """n of each rank of the group."""

    def pack(self) -> bytes:
        """Return this as bytes."""
        size = len(self.ranks)
        return _HEAD.pack(self.start, size) + struct.pack(f"<{size}q{size}d", *self.ranks, *self.counts)

    @classmethod
    def unpack(cls, content: bytes | bytearray) -> "ExpectedTails":
        """Return what `pack` packed."""
        start, size = _HEAD.unpack_from(content)
        numbers = struct.unpack_from(f"<{size}q{size}d", content, _HEAD.size)
        return cls(start, numbers[:size], numbers[size:])

    def check(self, vectors: Sequence[Any]) -> None:
        """Raise PeerFaultError unless the `vectors` of ranks 1, 2, … end as expected."""
        import numpy as np

        if not vectors:
            return
        tails = np.stack([vector[self.start :] for vector in vectors])
        counts, seconds = np.array(self.counts[1:]), tails[:, 2:].copy()
        own = np.arange(len(vectors)), np.array(self.ranks[1:])
        own_s = seconds[own]
        seconds[own] = 0
        is_right = (
            (abs(tails[:, 0] - counts) <= TOLERANCE * counts)
            & (tails[:, 1] == 0)
            & (own_s >= 0)
            & (own_s <= MAX_STEP_S)
            & ~seconds.any(axis=1)
        )
        if not is_right.all():
            found = int(np.argmin(is_right))
            raise PeerFaultError(found + 1, self._describe(found + 1, tails[found]))

    def is_count_of(self, total: Any) -> bool:
        """Return whether the sum of all vectors has the sum of all counts."""
        count = sum(self.counts)
        return bool(abs(float(total[self.start]) - count) <= TOLERANCE * count)

    def _describe(self, rank: int, tail: Any) -> str:
        count, stop, *seconds = (float(number) for number in tail)
        if not abs(count - self.counts[rank]) <= TOLERANCE * self.counts[rank]:
            return f"sent the gradient of {count:g} samples, expected {self.counts[rank]:g}"
        if stop != 0:
            return "asked all ranks to stop, which only rank 0 may do"
        return f"sent {seconds[self.ranks[rank]]:g} s as the time of its step, or the time of another rank"
