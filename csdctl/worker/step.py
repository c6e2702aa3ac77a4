"""The exact weighted step (docs/explanation/exact-gradients.md).

Rank k turns its n_k samples into one flat float32 vector [Σ gradient, Σ loss, Σ correct, n_k]. The sum
of these vectors over the ranks, divided by its last element, is the mean gradient over all samples,
whatever the n_k: partial batches and ranks without samples come out right.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.contract import Recipe
from csdctl.worker.data import Array
from csdctl.worker.recipe import make_loss, make_optimizer

NUM_SUMS = 3
"""Elements after the gradient: loss sum, number of correct predictions, number of samples."""


@dataclass(frozen=True)
class Sums:
    """What the end of a reduced vector says: sums over all ranks."""

    loss: float
    correct: float
    samples: float


class Step:
    """Computes a rank's vector and applies the reduced one; owns the optimizer."""

    def __init__(self, model: Any, recipe: Recipe, example: tuple[Array, Array], tf: Any, keras: Any) -> None:
        """`example`: any images (n, …) and labels (n, …) of the data, for their shapes and types."""
        self.model = model
        self.optimizer = make_optimizer(recipe, keras)
        self.optimizer.build(model.trainable_variables)
        self.size = sum(int(np.prod(v.shape)) for v in model.trainable_variables) + NUM_SUMS
        self._tf = tf
        self._loss = make_loss(recipe, keras)
        self._input_range = recipe.input_range
        self.has_accuracy = "crossentropy" in recipe.loss.lower() and model.output_shape[-1] > 1
        self._empty = np.zeros(self.size, np.float32)
        # Nothing in the graphs depends on a tensor's value; AutoGraph would only leave a source file in the
        # temporary directory for each graph of a rank that is killed.
        batch = [tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in example]
        self._local = tf.function(self._local_graph, autograph=False, input_signature=batch)
        self._apply = tf.function(
            self._apply_graph, autograph=False, input_signature=[tf.TensorSpec((self.size,), tf.float32)]
        )
        self._evaluate = tf.function(self._evaluate_graph, autograph=False, input_signature=batch)

    def local(self, images: Array, labels: Array) -> Array:
        """This rank's vector, shape (size,), float32, not divided by anything."""
        if len(images) == 0:
            return self._empty
        return np.asarray(self._local(self._tensor(images), self._tensor(labels)))

    def apply(self, total: Array) -> Sums:
        """Divide the summed vector by its sample count and let the optimizer take one step."""
        sums = Sums(*(float(value) for value in total[-NUM_SUMS:]))
        if sums.samples:
            self._apply(self._tf.convert_to_tensor(total))
        return sums

    def evaluate(self, images: Array, labels: Array) -> Sums:
        """Loss sum, correct predictions and count of one batch, without training."""
        loss, correct = self._evaluate(self._tensor(images), self._tensor(labels))
        return Sums(float(loss), float(correct), float(len(images)))

    def compile_apply(self) -> None:
        """Trace the graph of `apply` without running it."""
        self._apply.get_concrete_function()

    def set_learning_rate(self, learning_rate: float) -> None:
        """From the next `apply` on."""
        self.optimizer.learning_rate.assign(learning_rate)

    def _tensor(self, array: Array) -> Any:
        return self._tf.convert_to_tensor(array)

    def _forward(self, images: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        tf = self._tf
        predictions = self.model(scale(images, self._input_range, tf), training=training)
        return tf.cast(self._loss(labels, predictions), tf.float32), num_correct(labels, predictions, tf)

    def _local_graph(self, images: Any, labels: Any) -> Any:
        tf = self._tf
        count = tf.cast(tf.shape(images)[0], tf.float32)
        with tf.GradientTape() as tape:
            loss, correct = self._forward(images, labels, training=True)
            if self.model.losses:
                # A regularisation loss is one number per model: by count, so that it survives the mean.
                loss += count * tf.add_n(self.model.losses)
        gradients = tape.gradient(loss, [v.value for v in self.model.trainable_variables])
        flat = [
            tf.reshape(gradient if gradient is not None else tf.zeros(variable.shape), [-1])
            for gradient, variable in zip(gradients, self.model.trainable_variables, strict=True)
        ]
        return tf.concat([*flat, [loss, correct, count]], axis=0)

    def _apply_graph(self, total: Any) -> None:
        tf = self._tf
        variables = self.model.trainable_variables
        sizes = [int(np.prod(v.shape)) for v in variables]
        pieces = tf.split(total[:-NUM_SUMS] / total[-1], sizes)
        gradients = [tf.reshape(piece, v.shape) for piece, v in zip(pieces, variables, strict=True)]
        self.optimizer.apply(gradients, variables)

    def _evaluate_graph(self, images: Any, labels: Any) -> tuple[Any, Any]:
        return self._forward(images, labels, training=False)


def scale(images: Any, input_range: tuple[float, float] | None, tf: Any) -> Any:
    """uint8 0…255 as float32 within `input_range`; other types as float32, unchanged."""
    values = tf.cast(images, tf.float32)
    if input_range is None or images.dtype != tf.uint8:
        return values
    low, high = input_range
    return values * ((high - low) / 255.0) + low


def num_correct(labels: Any, predictions: Any, tf: Any) -> Any:
    """How many predictions have their largest output at the label; integer or one-hot labels."""
    if predictions.shape.rank != 2 or predictions.shape[-1] == 1:
        return tf.constant(0.0)
    expected = labels if labels.dtype.is_integer and labels.shape.rank == 1 else tf.argmax(labels, axis=-1)
    hits = tf.equal(tf.cast(expected, tf.int64), tf.argmax(predictions, axis=-1))
    return tf.reduce_sum(tf.cast(hits, tf.float32))
