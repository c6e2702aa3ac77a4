"""A model with a frozen prefix as two: the prefix, which makes features, and the head, which is trained."""

from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import scale
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.run_spec import HeadSpec, Prefix

BATCH_SIZE = 32
"""Samples of a forward pass. Always as many: a kernel may round differently for another number."""


class FeatureExtractor:
    """Computes the features of samples with one thread pool, that of the process."""

    def __init__(self, prefix: Prefix, tf: Any, keras: Any) -> None:
        """Raise WorkerError if the prefix cannot be built here."""
        model = load(Path(prefix.architecture), Path(prefix.weights), keras, prefix.code)
        self._dtype = np.dtype(prefix.precision)
        (input_tensor,) = model.inputs

        def forward(samples: Any) -> Any:
            scaled = scale(samples, prefix.input_range, input_tensor.dtype, tf)
            return model(scaled, training=False)

        self._forward = tf.function(forward, autograph=False, reduce_retracing=True)
        self._tf = tf

    def extract(self, samples: Array) -> Array:
        """Return the features of `samples`, shape (n, …), shape (n, …)."""
        parts = [
            self._extract_batch(samples[start : start + BATCH_SIZE])
            for start in range(0, len(samples), BATCH_SIZE)
        ]
        return np.concatenate(parts) if parts else self._extract_batch(samples)

    def _extract_batch(self, samples: Array) -> Array:
        padded = np.zeros((BATCH_SIZE, *samples.shape[1:]), samples.dtype)
        padded[: len(samples)] = samples
        features = np.asarray(self._forward(self._tf.convert_to_tensor(padded)))
        return features[: len(samples)].astype(self._dtype)


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
