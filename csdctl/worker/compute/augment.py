"""`data.augment`: the user's function that changes the samples of every training batch of a rank.

It gets what was prepared, never what other ranks have, and its result is not stored. Its random numbers are a
function of seed, step and rank, as those of the model's layers are (statistics.py): a step that is computed
again, after a loss or by `verify`, has the same samples. The host tries it before anything is sent.
"""

import random
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.user_code import import_packed, load_function
from csdctl.worker.data.arrays import Array, as_labels, fields_of, open_arrays
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.model_info import AugmentTrial, AugmentTried

_AUGMENT = 2
"""The last element of the seed: it keeps these numbers apart from the order of samples (prepared.py)."""
TRY_IT = "fix the function, and try it with `csdctl prepare`"
_MAX_GLOBAL_SEED = 1 << 32

Parts = Array | dict[str, Array]
"""An array, or the arrays of a model with several inputs or outputs by name."""


class AugmentError(Exception):
    """The result of the function cannot be trained on."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class Augmentation:
    """The function of one rank."""

    def __init__(self, reference: str, seed: int) -> None:
        """Find the function `FILE.py:NAME` in the job's code; raises WorkerError, exit code 2, without it."""
        path, _, name = reference.rpartition(":")
        self.name = f"{Path(path).name}:{name}"
        self._function = load_function(reference)
        self._seed = seed

    def __call__(
        self, samples: Array, labels: Array, step: int, rank: int, num_single: int = 0
    ) -> tuple[Array, Array]:
        """Return as many samples and labels, with the same shapes and types.

        The first `num_single` samples are passed one by one: with noise, no sample may depend on another.
        Raises WorkerError if the function fails or returns something else; it names no value of a sample.
        """
        try:
            return self.apply(samples, labels, step, rank, num_single)
        except AugmentError as error:
            raise WorkerError(f"{self.name} {error}", remedy=error.remedy, exit_code=2) from None
        except BaseException as error:
            traceback.print_exc()  # to the rank's log: the message may contain values of private samples
            raise WorkerError(
                f"{self.name} fails: {type(error).__name__}; its message is in the rank's log",
                remedy=TRY_IT,
                exit_code=2,
            ) from None

    def apply(
        self, samples: Array, labels: Array, step: int, rank: int, num_single: int = 0
    ) -> tuple[Array, Array]:
        """Do the same; raises AugmentError, or whatever the function raises."""
        seed = [self._seed, step, rank, _AUGMENT]
        parts = [slice(number, number + 1) for number in range(num_single)]
        changed = [self._call(samples[one], labels[one], [*seed, number]) for number, one in enumerate(parts)]
        if num_single < len(samples) or not changed:
            changed.append(self._call(samples[num_single:], labels[num_single:], seed))
        if len(changed) == 1:
            return changed[0]
        all_samples, all_labels = zip(*changed, strict=True)
        return np.concatenate(all_samples), np.concatenate(all_labels)

    def _call(self, samples: Array, labels: Array, seed: list[int]) -> tuple[Array, Array]:
        if not len(samples):
            return samples, labels
        generator = np.random.default_rng(seed)
        # For functions of libraries that draw from the global generators.
        random.seed(seed_of_all := int(generator.integers(_MAX_GLOBAL_SEED)))
        np.random.seed(seed_of_all)
        returned = self._function(_unpack(samples), _unpack(labels), generator)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            found = f"{len(returned)} values" if isinstance(returned, tuple | list) else _type_of(returned)
            raise AugmentError(f"returned {found}, expected (samples, labels)", "return samples, labels")
        return _pack(returned[0], samples, "samples"), _pack(returned[1], labels, "labels")


def _unpack(array: Array) -> Parts:
    """Return a copy, which the function may write to: an array, or a dict of arrays by field."""
    if array.dtype.names is None:
        return np.array(array)
    return {name: np.array(part) for name, part in fields_of(array).items()}


def _pack(returned: Any, expected: Array, what: str) -> Array:
    """Return what the function returned as an array like `expected`; raises AugmentError."""
    if expected.dtype.names is None:
        return _convert(returned, expected, what)
    names = expected.dtype.names
    if not isinstance(returned, Mapping) or set(returned) != set(names):
        found = ", ".join(map(str, returned)) if isinstance(returned, Mapping) else _type_of(returned)
        raise AugmentError(
            f"returned {what} {found}, expected a dict of {', '.join(names)}",
            "return the same names as it gets",
        )
    packed = np.empty(expected.shape, expected.dtype)
    for name in names:
        packed[name] = _convert(returned[name], expected[name], f"{what} {name}")
    return packed


def _convert(returned: Any, expected: Array, what: str) -> Array:
    """Return an array or tensor in the type of `expected`, if that changes no value; raises AugmentError."""
    try:
        array = np.asarray(returned)
    except Exception:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf" and str(array.dtype) != "bfloat16":
        raise AugmentError(
            f"returned {what} that are no numbers but {_type_of(returned)}", "return arrays or tensors"
        )
    if array.shape != expected.shape:
        raise AugmentError(
            f"returned {what} of shape {_shape(array)}, expected {_shape(expected)}",
            "return as many samples as it gets, each of the same shape",
        )
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(expected.dtype, copy=False)
    is_float = expected.dtype.kind == "f"
    if array.dtype != expected.dtype and not (is_float or np.array_equal(converted, array)):
        raise AugmentError(
            f"returned {what} of type {array.dtype}, expected {expected.dtype}",
            "convert the result back: `np.clip(np.rint(x), 0, 255).astype(np.uint8)` for pictures"
            if expected.dtype == np.uint8
            else f"convert the result back to {expected.dtype}",
        )
    if is_float and not np.isfinite(converted).all() and np.isfinite(expected).all():
        raise AugmentError(f"returned {what} that are not finite", "return finite numbers")
    return converted


def _shape(array: Array) -> str:
    return "×".join(map(str, array.shape)) or "one number"


def _type_of(value: Any) -> str:
    return f"a {type(value).__name__}"


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
