"""Limits of memory and time while data is prepared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IngestLimits:
    """Block sizes, and intervals between syncs; the prepared bytes do not depend on them."""

    block_samples: int = 256
    block_bytes: int = 32 << 20
    """Memory that a block may take: for encoded samples, and again for decoded ones."""
    sync_interval_s: float = 5.0
    """Upper limit of the work that is repeated after an interruption."""
    lock_deadline_s: float = 10.0
    """How long to wait for a worker that has the lock; one whose csdctl was killed takes a moment to exit."""


DEFAULT_LIMITS = IngestLimits()
