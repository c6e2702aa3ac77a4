"""Values that the ranks of a group exchange, and the checks before any of it is used.

Values are JSON. What another rank has sent is not trusted: it is read by an annotation that states its types
and bounds (protocol/json_codec.py), and anything else is that rank's fault.

A vector ends with [n, stop, seconds of each rank of the run, norm] (compute/step.py), which rank 0 checks
before any rank has the whole sum. Its gradient and its norm cannot be checked: only the node knows its
samples. Its end can: n follows from the schedule, only rank 0 may ask to stop, and a rank knows its own
seconds alone.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from csdctl.worker.protocol.json_codec import Between, parse_json, read_as

SumSeconds = Annotated[float, Between(0.0, 3600.0)]
"""Seconds of a timed sum."""


class LinkLostError(Exception):
    """The link is lost: MPI ended the job, or the other side closed the channel."""


class PeerFaultError(LinkLostError):
    """Another rank has sent what no rank may send; `rank` is its rank within the group."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank
        self.message = message


def encode_value(value: Any) -> bytes:
    """Return `value` as JSON; NaN and infinity are not part of it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode_value(hint: Any, content: bytes | bytearray) -> Any:
    """Return a value as the annotation `hint` says; raises ValueError for anything else."""
    return read_as(hint, parse_json(content.decode()))


def decode_values(hint: Any, contents: Sequence[bytes]) -> list[Any]:
    """Return the value of every rank; raises PeerFaultError, which names the first rank at fault."""
    values = []
    for rank, content in enumerate(contents):
        try:
            values.append(decode_value(hint, content))
        except ValueError as error:
            raise PeerFaultError(rank, f"sent an invalid value: {error}") from None
    return values


def is_minority(ranks: Sequence[int], size: int) -> bool:
    """Return whether these are some ranks of a group of `size`, and fewer than half of them."""
    return 0 < 2 * len(ranks) < size


MAX_STEP_S = 3600.0
"""A longer step is none: the run would have ended for its silence."""
TOLERANCE = 1e-3
"""Relative, of n: a sum of weights in float32."""


@dataclass(frozen=True)
class ExpectedTails:
    """Required ends of the vectors of one sum; of every rank of the group, rank 0 included."""

    start: int
    """The index of n."""
    ranks: tuple[int, ...]
    """The run's rank of each rank of the group: its place among the seconds."""
    counts: tuple[float, ...]
    """n of each rank of the group."""
    stops: tuple[int, ...] = ()
    """The end of its places among the seconds: one place, more for a server, which sums for its nodes."""

    def __post_init__(self) -> None:
        if not self.stops:
            object.__setattr__(self, "stops", tuple(rank + 1 for rank in self.ranks))

    def pack(self) -> bytes:
        """Return this as bytes: it goes from rank 0 to its link before every sum."""
        size, numbers = len(self.ranks), (*self.ranks, *self.counts, *self.stops)
        return struct.pack(f"<qq{size}q{size}d{size}q", self.start, size, *numbers)

    @classmethod
    def unpack(cls, content: bytes | bytearray) -> "ExpectedTails":
        """Return what `pack` packed."""
        start, size = struct.unpack_from("<qq", content)
        numbers = struct.unpack_from(f"<{size}q{size}d{size}q", content, 16)
        return cls(start, numbers[:size], numbers[size : 2 * size], numbers[2 * size :])

    def of(self, places: Sequence[int]) -> "ExpectedTails":
        """Return what the ranks at these places of the group send."""
        ranks = tuple(self.ranks[place] for place in places)
        return ExpectedTails(self.start, ranks, tuple(self.counts[place] for place in places))

    def of_servers(self, servers: Sequence[Sequence[int]]) -> "ExpectedTails":
        """Return what servers send that have summed the vectors of the ranks at these places."""
        parts = [self.of(places) for places in servers]
        return ExpectedTails(
            self.start,
            tuple(min(part.ranks) for part in parts),
            tuple(sum(part.counts) for part in parts),
            tuple(max(part.ranks) + 1 for part in parts),
        )

    def check(self, vectors: Sequence[Any]) -> None:
        """Raise PeerFaultError unless the `vectors` of ranks 1, 2, … end as expected."""
        for rank, vector in enumerate(vectors, start=1):
            tail, expected = vector[self.start :], self.counts[rank]
            count, stop = float(tail[0]), float(tail[1])
            own_s = tail[2 + self.ranks[rank] : 2 + self.stops[rank]]
            num_others = (tail[2:-1] != 0).sum() - (own_s != 0).sum()
            if not abs(count - expected) <= TOLERANCE * expected:
                problem = f"sent the gradient of {count:g} samples, expected {expected:g}"
            elif stop != 0:
                problem = "asked all ranks to stop, which only rank 0 may do"
            elif num_others > 0 or not all(0 <= one <= MAX_STEP_S for one in own_s):
                problem = f"sent {float(own_s[0]):g} s as the time of its step, or the time of another rank"
            else:
                continue
            raise PeerFaultError(rank, problem)

    def is_count_of(self, total: Any) -> bool:
        """Return whether the sum of all vectors has the sum of all counts."""
        count = sum(self.counts)
        return bool(abs(float(total[self.start]) - count) <= TOLERANCE * count)
