"""A model with a frozen prefix as two: the prefix, which makes features, and the head, which is trained."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.forward import BatchedPass, ForwardPass
from csdctl.worker.compute.lite import LitePass
from csdctl.worker.compute.model import load
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.run_spec import HeadSpec, Prefix


def as_features(prefix: Prefix) -> Callable[[list[Array]], Array]:
    """Return what makes features of the outputs of a batch."""
    dtype = np.dtype(prefix.precision)
    return lambda outputs: outputs[0].astype(dtype)


def feature_pass(
    prefix: Prefix, load_backend: Callable[[], tuple[Any, Any]], threads: int, *, is_keras: bool = False
) -> BatchedPass:
    """Return what computes features: LiteRT where the prefix is there for it, unless `is_keras`.

    Raises WorkerError if the prefix cannot be built here.
    """
    if prefix.lite and not is_keras:
        return LitePass(prefix, as_features(prefix), threads)
    return ForwardPass(prefix, as_features(prefix), *load_backend())


@functools.lru_cache(maxsize=1)  # to build it takes longer than to save it, and the best epochs do both
def _load_whole(spec: HeadSpec) -> Any:
    import keras

    return load(Path(spec.architecture), Path(spec.weights), keras, spec.prefix.code)


def assemble(spec: HeadSpec, head: Any) -> Any:
    """Return the whole model with the weights of `head`, and the state of its optimizer.

    It is the same object each time.
    """
    whole = _load_whole(spec)
    for place, variable in zip(spec.head_weights, head.weights, strict=True):
        whole.weights[place].assign(variable.value)
    whole.optimizer.build(whole.trainable_variables)
    for target, variable in zip(whole.optimizer.variables, head.optimizer.variables, strict=True):
        target.assign(variable.value)
    return whole
