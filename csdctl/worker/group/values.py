"""What the ranks of a group tell each other, and the checks before any of it is used.

Values are JSON. What another rank has sent is not trusted: it is parsed here alone, and each value passes a
check of its receiver, which returns it as it may be used and raises ValueError or TypeError for any other.

A vector ends with [n, stop, seconds of each rank of the run] (compute/step.py), which rank 0 checks before
it passes on the sum. Its gradient cannot be checked: only the node knows its samples. Its end can: n follows
from the schedule, only rank 0 may ask to stop, and a rank knows its own seconds alone.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
Check = Callable[[Any], T]

_SHOWN = 60
_HASH = re.compile(r"[0-9a-f]{64}")


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


def decode_value(content: bytes | bytearray) -> Any:
    """Parse one value; raises ValueError, also for NaN, infinity, and brackets nested too deeply."""
    try:
        return json.loads(bytes(content), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode_values(contents: Sequence[bytes], check: Check[T]) -> list[T]:
    """Return the checked value of every rank; raises PeerFaultError, which names the first rank at fault."""
    values = []
    for rank, content in enumerate(contents):
        try:
            values.append(check(decode_value(content)))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            shown = repr(content[:_SHOWN]).removeprefix("b")
            raise PeerFaultError(rank, f"sent {shown}, which is not allowed: {error}") from None
    return values


def as_none(value: Any) -> None:
    """Check a value that only says that its rank has come this far."""
    if value is not None:
        raise ValueError("expected null")


def as_hash(value: Any) -> str:
    """Check a SHA-256 in hex."""
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError("expected a SHA-256 in hex")
    return value


def as_count(value: Any, largest: int) -> int:
    """Check an integer from 0 to `largest`."""
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"expected an integer from 0 to {largest}")
    return value


def is_minority(ranks: Sequence[int], size: int) -> bool:
    """Return whether these are some ranks of a group of `size`, and fewer than half of them."""
    return 0 < 2 * len(ranks) < size


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is not allowed")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


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
