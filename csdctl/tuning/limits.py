"""The limits of a plan: the default limit of the global batch, and limits read from a plan; pure."""

from collections.abc import Mapping
from dataclasses import replace

from csdctl.tuning.search import Limits
from csdctl.tuning.stannis import TuningError

LINEAR_SCALING = 4
STEPS_PER_EPOCH = 10
"""The global batch is at most LINEAR_SCALING reference batches, over which the recipe's learning rate is
scaled, and leaves at least STEPS_PER_EPOCH steps in an epoch."""


def default_limits(given: Limits, reference_batch: int, num_samples: int | None, num_required: int) -> Limits:
    """Return `given` with a default limit of the global batch, and limits of at most an epoch.

    `num_samples` is that of an epoch, None if unknown; `num_required` ranks must train, on at least one
    sample each. Raises TuningError when the exact global batch is larger than an epoch.
    """
    if given.global_batch and num_samples is not None and given.global_batch > num_samples:
        raise TuningError(
            f"a global batch of {given.global_batch:,} samples exceeds an epoch of {num_samples:,} samples",
            remedy="give a smaller --global-batch",
        )
    if given.max_global_batch and num_samples is not None:
        return replace(given, max_global_batch=min(given.max_global_batch, num_samples))
    if given.largest_global_batch:
        return given
    largest = LINEAR_SCALING * reference_batch
    if num_samples is not None:
        largest = min(largest, num_samples // STEPS_PER_EPOCH)
    return replace(given, max_global_batch=max(num_required, largest))


def read_limits(written: Mapping[str, float | list[int]]) -> Limits:
    """Parse the limits in a plan's `method_arguments`, written from `Limits.given`; Algorithm 1 has none."""

    def number(name: str) -> float | None:
        value = written.get(name)
        return value if isinstance(value, int | float) else None

    def whole(name: str) -> int | None:
        value = number(name)
        return None if value is None else round(value)

    return Limits(whole("max_global_batch"), whole("global_batch"), number("max_step_s"))
