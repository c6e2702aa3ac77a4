"""The interface of a source, and parallel decoding of samples in order."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.limits import IngestLimits


class UnusableError(Exception):
    """A sample cannot be used; it is skipped and counted under `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Block:
    """Consecutive samples: of `num_read` processed ones, samples (n, …) and labels (n, …) are usable."""

    num_read: int
    samples: Array
    labels: Array
    skipped: Counter[str] = field(default_factory=Counter)


class SampleSource(Protocol):
    """Samples in an order that is determined by the source's files and the job alone."""

    num_samples: int
    """Samples to process; 0 if unknown in advance."""
    sample_bytes: int
    """Bytes of one prepared sample; 0 if unknown in advance."""
    class_names: tuple[str, ...] | None
    files_of_class: tuple[int, ...]
    """Number of files of each class; empty for sources without class folders."""
    padded: dict[str, tuple[int, ...]]
    """Inputs and outputs that were padded, and their shape; complete after `blocks`."""

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all samples from index `start` on."""


@dataclass(frozen=True)
class EncodedSample:
    """A sample before decoding: a file, bytes, an array, or None if it could not be read."""

    content: Any
    label: Any

    @property
    def held_bytes(self) -> int:
        """Memory that the encoded sample takes."""
        return getattr(self.content, "nbytes", 0) or (
            len(self.content) if isinstance(self.content, bytes) else 0
        )


def num_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def decode_blocks(
    candidates: Iterable[EncodedSample],
    decode: Callable[[EncodedSample], tuple[Array, Any]],
    limits: IngestLimits,
    *,
    threads: int,
    sample_bytes: int,
) -> Iterator[Block]:
    """Decode with `threads` threads; samples that raise UnusableError are counted and skipped.

    Samples and their order do not depend on the number of threads.
    """

    def decode_or_reason(candidate: EncodedSample) -> tuple[Array, Any] | str:
        try:
            return decode(candidate)
        except UnusableError as error:
            return error.reason

    max_samples = max(1, min(limits.block_samples, limits.block_bytes // max(1, sample_bytes)))
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        for group in _groups(candidates, max_samples, limits.block_bytes):
            yield _as_block(list(pool.map(decode_or_reason, group)))


def _as_block(outcomes: list[tuple[Array, Any] | str]) -> Block:
    usable = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    skipped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    if not usable:
        return Block(len(outcomes), np.zeros((0,)), np.zeros((0,)), skipped)
    samples, labels = zip(*usable, strict=True)
    return Block(len(outcomes), np.stack(samples), np.stack(labels), skipped)


def _groups(
    candidates: Iterable[EncodedSample], max_samples: int, max_bytes: int
) -> Iterator[list[EncodedSample]]:
    group: list[EncodedSample] = []
    held_bytes = 0
    for candidate in candidates:
        group.append(candidate)
        held_bytes += candidate.held_bytes
        if len(group) >= max_samples or held_bytes >= max_bytes:
            yield group
            group, held_bytes = [], 0
    if group:
        yield group
