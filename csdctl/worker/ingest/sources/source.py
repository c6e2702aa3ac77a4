"""What every source gives, and decoding many pictures at once, in order."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from csdctl.worker.data.arrays import Array

BLOCK_SAMPLES = 256
BLOCK_BYTES = 32 << 20
"""Of what is held of a block at a time: encoded pictures on one side, samples on the other."""


class UnusableError(Exception):
    """One sample cannot be used; `reason` is the kind under which it is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Block:
    """Consecutive samples: `num_read` were looked at, images (n, …) and labels (n, …) are left of them."""

    num_read: int
    images: Array
    labels: Array
    skipped: Counter[str] = field(default_factory=Counter)


class SampleSource(Protocol):
    """Samples in an order that depends on nothing but the source's files and what the job says of them."""

    num_samples: int
    """How many there are to look at; 0 when that is not known beforehand."""
    sample_bytes: int
    """Of one prepared sample; 0 when that is not known beforehand."""
    class_names: tuple[str, ...] | None
    files_of_class: tuple[int, ...]
    """How many files each class has; empty when the source has no such thing."""

    def blocks(self, start: int) -> Iterator[Block]:
        """All samples from the one numbered `start` on."""


@dataclass(frozen=True)
class EncodedSample:
    """A sample before it is decoded: a path, bytes, an array, or None where one could not be read."""

    content: Any
    label: Any

    @property
    def held_bytes(self) -> int:
        """The memory it takes until it is decoded."""
        return getattr(self.content, "nbytes", 0) or (
            len(self.content) if isinstance(self.content, bytes) else 0
        )


def num_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def decode_blocks(
    candidates: Iterable[EncodedSample],
    decode: Callable[[EncodedSample], tuple[Array, Any]],
    *,
    threads: int,
    sample_bytes: int,
) -> Iterator[Block]:
    """Decode with `threads` threads; what raises UnusableError is counted and left out.

    However many threads there are, the samples and their order are the same.
    """

    def try_one(candidate: EncodedSample) -> tuple[Array, Any] | str:
        try:
            return decode(candidate)
        except UnusableError as error:
            return error.reason

    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        for group in _groups(candidates, max(1, min(BLOCK_SAMPLES, BLOCK_BYTES // max(1, sample_bytes)))):
            yield _as_block(list(pool.map(try_one, group)))


def _as_block(outcomes: list[tuple[Array, Any] | str]) -> Block:
    samples = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    skipped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    if not samples:
        return Block(len(outcomes), np.zeros((0,)), np.zeros((0,)), skipped)
    images, labels = zip(*samples, strict=True)
    return Block(len(outcomes), np.stack(images), np.stack(labels), skipped)


def _groups(candidates: Iterable[EncodedSample], num_most: int) -> Iterator[list[EncodedSample]]:
    group: list[EncodedSample] = []
    held_bytes = 0
    for candidate in candidates:
        group.append(candidate)
        held_bytes += candidate.held_bytes
        if len(group) >= num_most or held_bytes >= BLOCK_BYTES:
            yield group
            group, held_bytes = [], 0
    if group:
        yield group
