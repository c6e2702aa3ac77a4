"""What a plan keeps to when nobody says: a global batch that still learns; pure."""

from dataclasses import replace

from csdctl.tuning.best import Limits

LINEAR_SCALING = 4
STEPS_PER_EPOCH = 10
"""The global batch stays within LINEAR_SCALING reference batches, over which the recipe's learning rate is
scaled, and within what leaves so many steps in an epoch."""


def default_limits(given: Limits, reference_batch: int, num_samples: int | None, num_required: int) -> Limits:
    """`given`, with a largest global batch when it has none.

    `num_samples` of an epoch, None: not known; `num_required` ranks are never left out and take one sample
    at least.
    """
    if given.global_batch or given.max_global_batch:
        return given
    most = LINEAR_SCALING * reference_batch
    if num_samples is not None:
        most = min(most, num_samples // STEPS_PER_EPOCH)
    return replace(given, max_global_batch=max(num_required, most))
