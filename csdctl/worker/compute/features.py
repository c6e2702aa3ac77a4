"""A model with a frozen prefix as two: the prefix, which makes features, and the head, which is trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.forward import ForwardPass
from csdctl.worker.compute.model import load
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.run_spec import HeadSpec, Prefix


def as_features(prefix: Prefix) -> Callable[[list[Array]], Array]:
    """Return what makes features of the outputs of a batch."""
    dtype = np.dtype(prefix.precision)
    return lambda outputs: outputs[0].astype(dtype)


class FeatureExtractor:
    """Computes the features of samples."""

    def __init__(self, prefix: Prefix, tf: Any, keras: Any) -> None:
        """Raise WorkerError if the prefix cannot be built here."""
        self._forward = ForwardPass(prefix, as_features(prefix), tf, keras)

    def extract(self, samples: Array) -> Array:
        """Return the features of `samples`, shape (n, …), shape (n, …)."""
        return self._forward.run(samples)


def assemble(spec: HeadSpec, head: Any) -> Any:
    """Return the whole model with the weights of `head`, and the state of its optimizer."""
    import keras

    whole = load(Path(spec.architecture), Path(spec.weights), keras, spec.prefix.code)
    for place, variable in zip(spec.head_weights, head.weights, strict=True):
        whole.weights[place].assign(variable.value)
    whole.optimizer.build(whole.trainable_variables)
    for target, variable in zip(whole.optimizer.variables, head.optimizer.variables, strict=True):
        target.assign(variable.value)
    return whole
