"""Values that the ranks of a group exchange, and the checks before any of it is used.

Values of another rank are read by an annotation that states its types and bounds (protocol/json_codec.py).

A vector ends with [n, stop, duration, seconds of each rank of the run, norm] (engine/layout.py). The hub
checks this before any rank has the whole sum. n follows from the schedule, only rank 0 may ask to stop and
knows the duration of a step, and a rank knows only its own seconds. Gradient and norm cannot be checked: only
the node knows its samples.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from csdctl.worker.protocol.json_codec import parse_json, read_as

MAX_REASON = 256
MAX_STEP_S = 3600.0
"""Maximum compute time of a step: a run without progress for this long has already failed."""
TOLERANCE = 1e-3
"""Relative tolerance of n, which is a sum of weights in float32."""


class LinkLostError(Exception):
    """The link or the hub is lost: MPI ended the job, or the other side closed the channel."""


class PeerFaultError(Exception):
    """Rank `rank` has violated the protocol."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank
        self.message = message


class RankLostError(Exception):
    """Rank `rank`, from which bytes were awaited, is lost."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is lost")
        self.rank = rank


class StepVoidError(Exception):
    """A rank was lost during the step. The remaining ranks repeat the step."""


def encode_value(value: Any) -> bytes:
    """Return `value` as JSON. NaN and infinity are not part of it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode_value(hint: Any, content: bytes | bytearray) -> Any:
    """Return a value as the annotation `hint` says. Raises ValueError for anything else."""
    return read_as(hint, parse_json(content.decode()))


def is_minority(ranks: Sequence[int], size: int) -> bool:
    """Return whether these are some ranks of a group of `size`, and fewer than half of them."""
    return 0 < 2 * len(ranks) < size


def is_near(count: float, expected: float) -> bool:
    """Return whether a sum of weights in float32 is as expected."""
    return abs(count - expected) <= TOLERANCE * expected


def find_fault(tail: Any, counts: Mapping[int, float], ranks: Collection[int]) -> str:
    """Return the fault in the end of the sum of vectors of `ranks`, from n on, '' for none.

    `counts`: n of each rank that takes part.
    """
    count, stop, duration_s, times_s = float(tail[0]), float(tail[1]), float(tail[2]), tail[3:-1]
    expected = sum(counts[rank] for rank in ranks)
    own_s = [float(times_s[rank]) for rank in ranks]
    if not is_near(count, expected):
        return f"sent the gradient of {count:g} samples, expected {expected:g}"
    if stop != 0:
        return "asked all ranks to stop, which only rank 0 may do"
    if duration_s != 0:
        return "sent the duration of a step, which only rank 0 knows"
    num_others = int((times_s != 0).sum()) - sum(map(bool, own_s))
    if num_others > 0 or not all(0 <= seconds <= MAX_STEP_S for seconds in own_s):
        return f"sent {own_s[0]:g} s as the time of its step, or the time of another rank"
    return ""
