"""What a receiver may answer, and when; pure.

An answer outside these rules ends the delivery to that machine: RemoteCommandError. They bound the number of
answers too: a manifest is requested once, every object at most MAX_ROUNDS times, and heartbeats are rare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from csdctl.transport.answer import Answer
from csdctl.worker.protocol.json_codec import shorten

MAX_ROUNDS = 2
"""A receiver requests an object that arrived damaged once more (MAX_TRIES there)."""

MAX_RANGES = 1000
MAX_DAMAGED = 100
MAX_HEARTBEATS_PER_S = 2.0
"""An honest receiver sends one per second."""

SPARE_HEARTBEATS = 60
"""Heartbeats that a slow network may deliver together."""


@dataclass(frozen=True)
class Refused:
    """The receiver refuses the request."""

    message: str
    remedy: str


@dataclass(frozen=True)
class SystemFailure:
    """The receiver's machine failed to write."""

    error_number: int
    words: str
    path: str


@dataclass(frozen=True)
class Damaged:
    """Objects, by number, that arrived damaged in every round."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Missing:
    """Objects to send: the byte to start from, by number."""

    offsets: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """Everything is in place."""


@dataclass(frozen=True)
class ManifestWanted:
    """The receiver lacks the manifest."""


ReceiverAnswer = Refused | SystemFailure | Damaged | Missing | Done | ManifestWanted


class ReceiverAnswers:
    """Reads the answers of one receiver, in order."""

    def __init__(self, sizes: Sequence[int], *, has_manifest: bool, is_dry_run: bool) -> None:
        """`sizes` are those of the offered objects; `has_manifest` says whether a manifest can be sent."""
        self._sizes = sizes
        self._may_want_manifest = has_manifest
        self._rounds_left = 1 if is_dry_run else MAX_ROUNDS
        self._allowed = set(range(len(sizes)))
        """Numbers that may be requested in this round: those of the round before."""
        self._requested: dict[int, int] = {}
        self._num_heartbeats = 0

    def read(self, answer: Answer, elapsed_s: float) -> ReceiverAnswer | None:
        """Return what is to be done, None for nothing yet; raises RemoteCommandError."""
        if "busy" in answer:
            self._num_heartbeats += 1
            if self._num_heartbeats > SPARE_HEARTBEATS + MAX_HEARTBEATS_PER_S * elapsed_s:
                raise answer.error(f"received {self._num_heartbeats} heartbeats in {elapsed_s:.1f} s")
            return None
        if "done" in answer:
            return Done()
        if "refused" in answer:
            return Refused(answer.text("refused"), answer.text("remedy", ""))
        if "failed" in answer:
            return self._read_failure(answer)
        if "need" in answer:
            if not self._may_want_manifest:
                raise answer.error("received a request for the manifest, which was sent already")
            self._may_want_manifest = False
            return ManifestWanted()
        if "missing" in answer:
            return self._read_missing(answer)
        raise answer.error("received an object that is no answer of a receiver")

    def _read_failure(self, answer: Answer) -> Damaged | SystemFailure:
        if answer.text("failed") == "damaged":
            numbers = answer.numbers("numbers", MAX_DAMAGED, high=len(self._sizes) - 1)
            return Damaged(tuple(dict.fromkeys(numbers)))
        return SystemFailure(answer.number("errno", high=1 << 16), answer.text("words"), answer.text("path"))

    def _read_missing(self, answer: Answer) -> Missing | None:
        """Add one part of a request; return the request when it is complete."""
        if not self._rounds_left:
            raise answer.error("received another request for objects after the last one")
        numbers = self._read_ranges(answer)
        offsets = self._read_offsets(answer, numbers)
        self._requested |= {number: offsets.get(number, 0) for number in numbers}
        if answer.flag("more"):
            if not numbers:
                raise answer.error("received a part of a request that is empty")
            return None
        missing, self._requested = Missing(self._requested), {}
        self._allowed = set(missing.offsets)
        self._rounds_left -= 1
        self._may_want_manifest = False
        return missing

    def _read_ranges(self, answer: Answer) -> list[int]:
        """Return the requested numbers: offered ones, ascending, each once in a request."""
        numbers: list[int] = []
        latest = max(self._requested, default=-1)
        for pair in answer.items("missing", MAX_RANGES):
            if not (
                isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
            ):
                raise answer.error("received a request for objects that are not [first, last]")
            first, last = pair
            if not latest < first <= last < len(self._sizes):
                raise answer.error(
                    f"received a request for objects {shorten(first)} to {shorten(last)}, expected ascending "
                    f"numbers from {latest + 1} to {len(self._sizes) - 1}"
                )
            numbers += range(first, last + 1)
            latest = last
        if not self._allowed.issuperset(numbers):
            raise answer.error("received a second request for objects that were not sent")
        return numbers

    def _read_offsets(self, answer: Answer, numbers: Sequence[int]) -> dict[int, int]:
        resume = answer.counts("resume", len(numbers))
        offsets = {number: resume.pop(str(number)) for number in numbers if str(number) in resume}
        is_inside = all(offset < self._sizes[number] for number, offset in offsets.items())
        if resume or not is_inside:
            raise answer.error("received an offset outside of a requested object")
        return offsets
