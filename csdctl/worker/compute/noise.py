"""Differential privacy of a rank's private samples, by DP-SGD (Abadi et al., 2016), on the rank itself.

The gradient of each private sample is clipped to an L2 norm over all trainable variables together. The
clipped gradients are summed, and Gaussian noise is added to the sum once per step, before any other
code can read it. Only the node must be trusted, not the host or the other ranks.

The noise comes from the kernel's random bytes. The recipe's seed is not suitable: the host knows it and could
subtract the noise. The known weakness of Gaussian samples in floating point remains (Mironov, 2012).
"""

import os
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import regularization_losses
from csdctl.worker.compute.objective import Objective
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.recipe import Noise

CHUNK = 1 << 18
"""Elements of the vector that receive noise at a time: a slow node has little memory."""


class NoisySums:
    """Sums of clipped gradients of private samples, with noise."""

    def __init__(self, noise: Noise, model: Any, objective: Objective, tf: Any) -> None:
        self._noise, self._model, self._objective, self._tf = noise, model, objective, tf
        self._variables = model.trainable_variables
        signature = [*objective.signature, tf.TensorSpec((None,), tf.float32)]
        self._sum = tf.function(self._sum_graph, autograph=False, input_signature=signature)

    def add_to(self, vector: Array, images: Any, labels: Any, copies: Array, weight: float) -> None:
        """Add the noisy sum, times `weight`, to `vector`, shape (num_gradients,).

        `copies`, shape (n,), has how often each sample occurs in this batch: the norm limits all its copies
        together.
        """
        clip = self._noise.l2_norm_clip
        sums = np.asarray(self._sum(images, labels, (clip / copies).astype(np.float32)))
        for start in range(0, len(vector), CHUNK):
            part = slice(start, start + CHUNK)
            noise = secret_normal(len(vector[part])) * (self._noise.noise_multiplier * clip)
            vector[part] += (weight * (sums[part] + noise)).astype(np.float32)

    def _sum_graph(self, images: Any, labels: Any, limits: Any) -> Any:
        """Return the clipped sum, flat. Samples are processed one by one, in memory for one gradient."""
        tf = self._tf
        count = tf.shape(limits)[0]

        def add_one(number: Any, total: list[Any]) -> tuple[Any, list[Any]]:
            sample = slice(number, number + 1)
            with tf.GradientTape() as tape:
                one = tf.nest.map_structure(lambda array: array[sample], (images, labels))
                loss, penalty = self._objective.loss(*one), self._penalty()
                loss = loss if penalty is None else loss - penalty
            gradients = self._gradients(tape, loss)
            norm = tf.linalg.global_norm(gradients)
            # A gradient that is not finite must not be visible in the sum either: it counts as zero.
            factor = tf.where(tf.math.is_finite(norm), tf.minimum(1.0, limits[number] / norm), 0.0)
            clipped = [tf.math.multiply_no_nan(gradient, factor) for gradient in gradients]
            return number + 1, [so_far + new for so_far, new in zip(total, clipped, strict=True)]

        zeros = [tf.zeros(variable.shape) for variable in self._variables]
        _, total = tf.while_loop(
            lambda number, _: number < count, add_one, (tf.constant(0), zeros), parallel_iterations=1
        )
        with tf.GradientTape() as tape:
            penalty = self._penalty()
        if penalty is not None:
            scale = tf.cast(count, tf.float32)
            of_penalty = self._gradients(tape, penalty)
            total = [gradient + scale * other for gradient, other in zip(total, of_penalty, strict=True)]
        return tf.concat([tf.reshape(gradient, [-1]) for gradient in total], axis=0)

    def _penalty(self) -> Any:
        """Return the regularization of the weights, which does not depend on samples, or None."""
        tf, penalties = self._tf, regularization_losses(self._model)
        # They have the types that their layers compute in.
        return tf.add_n([tf.cast(one, tf.float32) for one in penalties]) if penalties else None

    def _gradients(self, tape: Any, objective: Any) -> list[Any]:
        values, zero = [variable.value for variable in self._variables], self._tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(objective, values, unconnected_gradients=zero)
        return list(map(self._tf.convert_to_tensor, gradients))


def secret_normal(count: int) -> Array:
    """Return standard normal numbers, shape (count,), float64, that cannot be reproduced (Box, Muller 1958).

    From `os.urandom`, the kernel's cryptographic generator: the state of numpy's and TensorFlow's generators
    could be recovered from their output.
    """
    pairs = (count + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2.0 * np.log((bits[0] + 1.0) / 2**53))  # of 0 < u ≤ 1
    angle = bits[1] * (2.0 * np.pi / 2**53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
