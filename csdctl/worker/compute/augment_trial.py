"""Trying `data.augment` on the host, before anything is sent or started."""

import numpy as np

from csdctl.worker.compute.augment import TRY_IT, Augmentation, AugmentError
from csdctl.worker.compute.user_code import import_packed
from csdctl.worker.data.arrays import Array, as_labels, fields_of, open_arrays
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.model_info import AugmentTrial, AugmentTried

NUM_SAMPLES = 8
STEPS = (0, 1, 2)
Batch = tuple[Array, Array]


def try_augment(spec: AugmentTrial) -> AugmentTried:
    """Call the function as ranks do: on several samples, on one, and twice for the same step.

    Raises WorkerError, exit code 2, if it cannot be imported, fails, returns something else than samples and
    labels of the same form, or other ones when a step is repeated.
    """
    import_packed(spec.code.archive, spec.code.modules)
    augmentation = Augmentation(spec.reference, spec.seed)
    samples, labels = open_arrays(f"{spec.directory}/images.npy", f"{spec.directory}/labels.npy")
    samples, labels = samples[:NUM_SAMPLES], as_labels(labels[:NUM_SAMPLES])
    for size in dict.fromkeys((len(samples), 1)):
        for step in STEPS:
            _try_step(augmentation, (samples[:size], labels[:size]), step)
    return AugmentTried(len(samples))


def _try_step(augmentation: Augmentation, batch: Batch, step: int) -> None:
    # Ranks compute the steps of a group in order, a rank that is restarted one of them alone.
    first, _, again = (_guard(augmentation, batch, one) for one in (step, step + 1, step))
    if not all(map(_is_same, first, again)):
        raise WorkerError(
            f"{augmentation.name} returns something else when it is called again with the same rng: "
            "a step could not be repeated",
            remedy="draw all random numbers from rng; for TensorFlow, its stateless functions with "
            "`seed=rng.integers(2**31, size=2)`",
            exit_code=2,
        )


def _guard(augmentation: Augmentation, batch: Batch, step: int) -> Batch:
    """Call the function; of its errors with public samples all may be shown."""
    try:
        return augmentation.apply(*batch, step, 0)
    except AugmentError as error:
        raise WorkerError(f"{augmentation.name} {error}", remedy=error.remedy, exit_code=2) from None
    except BaseException as error:
        raise WorkerError(
            f"{augmentation.name} fails with {len(batch[0])} samples: {describe(error)}",
            remedy=TRY_IT,
            exit_code=2,
        ) from None


def _is_same(first: Array, second: Array) -> bool:
    return all(
        np.array_equal(one, other)
        for one, other in zip(fields_of(first).values(), fields_of(second).values(), strict=True)
    )
