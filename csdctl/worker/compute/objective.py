"""Loss and metrics of a compiled model over one batch, as Keras' fit computes them, as sums over samples.

Keras' loss is a mean over the batch: over samples, over time steps or pixels of each, with weights, of
several outputs. Multiplied by the count that it was divided by, it becomes a sum that ranks can add.

A Keras metric is a state that batches add to. The result of the sum of the ranks' states is the one of a
single process with all samples.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute import keras_internals as internals
from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.data.arrays import Array, map_fields
from csdctl.worker.engine.step import LOSS, Slice
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.datasets import INPUT, SAMPLE_WEIGHT, as_inputs, is_position
from csdctl.worker.protocol.recipe import Recipe

MAX_RESULTS = 64
"""Results that are reported of one metric with a value for each of many classes."""


class MetricStates:
    """The states of a compiled model's metrics, as one flat vector."""

    def __init__(self, metrics: Sequence[Any]) -> None:
        """`metrics`: built, without the tracker of the whole loss."""
        self._metrics = list(metrics)
        for metric in metrics:  # a layer may have one, which the call that builds the model adds to
            metric.reset_state()
        self.variables = [variable for metric in self._metrics for variable in metric.variables]
        """Keras' variables of the states."""
        self._initial = [np.asarray(variable.value).copy() for variable in self.variables]
        self.size = sum(int(initial.size) for initial in self._initial)

    def reset(self) -> None:
        """Set the initial state. Inside a graph."""
        for variable, initial in zip(self.variables, self._initial, strict=True):
            variable.assign(initial)

    def read(self, of_batches: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return what a batch added. `of_batches`: metrics that count batches, and for what one counts."""
        counts = {id(variable): count for metric, count in of_batches for variable in metric.variables}
        added = []
        for variable, initial in zip(self.variables, self._initial, strict=True):
            change = tf.reshape(tf.cast(variable.value - initial, tf.float32), [-1])
            added.append(change * counts.get(id(variable), 1.0))
        return added

    def results(self, states: Any) -> list[tuple[Slice, Any]]:
        """Return the results of summed states, shape (size,), with their names and places of states."""
        parts = tf.split(states, [initial.size for initial in self._initial])
        for part, variable, initial in zip(parts, self.variables, self._initial, strict=True):
            value = tf.reshape(part, initial.shape) + tf.cast(initial, tf.float32)
            variable.assign(tf.cast(value, variable.dtype))
        results: list[tuple[Slice, Any]] = []
        stop = 0
        for metric in self._metrics:
            start, stop = stop, stop + sum(math.prod(variable.shape) for variable in metric.variables)
            result = metric.result()
            for name, value in (result if isinstance(result, dict) else {metric.name: result}).items():
                tensor = tf.convert_to_tensor(value)
                numbers = tf.unstack(tf.reshape(tensor, [-1])[:MAX_RESULTS])
                names = [f"{name}_{place}" for place in range(len(numbers))] if tensor.shape.rank else [name]
                slices = [Slice(name, start, stop) for name in names]
                results += zip(slices, numbers, strict=True)
        return results


@dataclass(frozen=True)
class BatchLoss:
    """Loss and metrics of one batch, as tensors."""

    mean: Any
    """With the penalties of layers, as in fit; a scalar."""
    summed: Any
    """Losses that layers add for each sample, summed as in fit; a scalar, or None."""
    loss_count: Any
    """Divisor of the mean: samples, or unmasked elements."""
    samples: Any
    states: list[Any]


class Objective:
    """Loss and metrics of one compiled model on one rank."""

    def __init__(
        self, model: Any, recipe: Recipe, example: tuple[Array, Array], *, is_per_sample: bool = False
    ) -> None:
        """`example`: see `make_compiler`. With `is_per_sample`, a mask does not change the loss' divisor."""
        self._model, self._input_range, self._is_per_sample = model, recipe.input_range, is_per_sample
        self._class_weights = recipe.class_weight
        self.signature = specs_of(example)
        self.counts_elements = False
        """Whether the loss is not divided by the number of samples, but by a number that varies."""
        self._of_batches: list[Any] = []
        with noting_batches(self._of_batches):  # creates the state of losses and metrics, as the first batch
            symbols = tf.nest.map_structure(symbolic, self.signature)
            internals.run_symbolically(lambda *batch: self._run_model(*batch, with_metrics=True)[0], *symbols)
        self.metrics = MetricStates([metric for metric in model.metrics if metric.name != LOSS])

    def forward(self, samples: Any, labels: Any, *, training: bool) -> BatchLoss:
        """Compute loss and metrics of one batch. Inside a graph."""
        self.metrics.reset()
        mean, summed, divisor = self._run_model(samples, labels, training=training, with_metrics=True)
        count = tf.cast(tf.shape(tf.nest.flatten(labels)[0])[0], tf.float32)
        if summed is not None and self._is_per_sample:
            mean, summed = mean + summed / count, None
        loss_count = count if divisor is None else divisor
        of_batches = [(metric, count) for metric in self._of_batches]
        of_batches += [(metric, loss_count) for metric in internals.loss_trackers(self._model)]
        return BatchLoss(mean, summed, loss_count, count, self.metrics.read(of_batches))

    def loss(self, samples: Any, labels: Any) -> Any:
        """Return the loss of a batch in training, without its metrics. Inside a graph."""
        mean, summed, _ = self._run_model(samples, labels, with_metrics=False)
        return mean if summed is None else mean + summed

    def _run_model(
        self, samples: Any, labels: Any, *, training: bool = True, with_metrics: bool
    ) -> tuple[Any, Any, Any]:
        """Return the loss as mean and sum, and the mean's divisor if that is not the number of samples."""
        model = self._model
        inputs = inputs_of(model, samples, self._input_range)
        predictions = model(inputs, training=training)
        targets, weights = self.targets(labels, predictions, training=training)
        by_key: dict[Any, tuple[Any, ...]] = {}
        with internals.noting_divisors(by_key):
            if type(model).compute_loss is keras.Model.compute_loss:
                mean, summed = self._add_losses(internals.compiled_loss(model, targets, predictions, weights))
            else:
                loss = internals.compute_loss(model, inputs, targets, predictions, weights, training=training)
                mean, summed = keras.ops.cast(loss, "float32"), None
        divisors = [] if self._is_per_sample else [divisor for divisor, *_ in by_key.values()]
        if len(divisors) > 1:
            raise JobError(
                "the losses are divided by different numbers, such as samples, unmasked elements and the sum "
                "of the weights: they cannot be summed over ranks",
                "use one reduction for all, and let masks end before the outputs (supports_masking = False)",
            )
        if with_metrics:
            model.compute_metrics(inputs, targets, predictions, weights)
        divisor = divisors[0] if divisors else None
        self.counts_elements |= divisor is not None
        return mean, summed, divisor

    def _add_losses(self, compiled: Any) -> tuple[Any, Any]:
        """Return the sum of the losses that are means, and of those with a value for each sample, or None."""
        ops = keras.ops
        means: list[Any] = [] if compiled is None else [compiled]
        of_samples: list[Any] = []
        for loss in self._model.losses:
            (of_samples if has_samples(loss) else means).append(loss)
        mean, summed = (
            sum((ops.sum(ops.cast(loss, "float32")) for loss in losses), start=ops.zeros((), "float32"))
            for losses in (means, of_samples)
        )
        return mean, summed if of_samples else None

    def targets(self, labels: Any, predictions: Any, *, training: bool) -> tuple[Any, Any]:
        """Return the labels in the structure of the predictions, and the samples' weights or None."""
        weights = None
        if isinstance(labels, dict):
            labels = dict(labels)
            weights = labels.pop(SAMPLE_WEIGHT, None)
            if isinstance(predictions, dict):
                if not set(labels) <= set(predictions):
                    labels = dict(zip(predictions, labels.values(), strict=False))
            elif isinstance(predictions, list | tuple) and len(predictions) > 1:
                names = list(getattr(self._model, "output_names", None) or ())
                by_name = set(labels) <= set(names)
                # An output without a loss needs no labels.
                labels = [labels.get(name) for name in names] if by_name else list(labels.values())
            else:
                (labels,) = labels.values()
        if training and self._class_weights:
            class_weights = self._weigh_classes(labels)
            if weights is not None and weights.shape.rank > 1:
                raise JobError(
                    f"recipe.class_weight weighs samples; the weights of the data have shape {weights.shape}",
                    "multiply the weights in the function of the data, and remove class_weight",
                )
            weights = class_weights if weights is None else weights * class_weights
        return labels, weights

    def _weigh_classes(self, labels: Any) -> Any:
        if isinstance(labels, dict | list):
            raise JobError("recipe.class_weight is for models with one output")
        table = np.ones(max(map(int, self._class_weights)) + 2, np.float32)
        for number, weight in self._class_weights.items():
            table[int(number)] = weight
        is_one_hot = labels.shape.rank > 1 and labels.shape[-1] != 1
        classes = tf.argmax(labels, axis=-1) if is_one_hot else tf.reshape(labels, [-1])
        classes = tf.cast(tf.round(tf.cast(classes, tf.float32)), tf.int32)
        return tf.gather(tf.constant(table), tf.clip_by_value(classes, 0, len(table) - 1))


@contextmanager
def noting_batches(metrics: list[Any]) -> Iterator[None]:
    """Add to `metrics` those that a number is added to for a whole batch."""
    original = keras.metrics.Mean.update_state

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        is_number = sample_weight is None and getattr(values, "shape", ()) == ()
        if is_number and not any(metric is noted for noted in metrics):
            metrics.append(metric)
        return original(metric, values, sample_weight=sample_weight)

    with mock.patch.object(keras.metrics.Mean, "update_state", update_state):
        yield


def has_samples(loss: Any) -> bool:
    """Return whether a loss that a layer adds has a value for each sample, which fit sums over the batch."""
    return len(loss.shape) > 0 and loss.shape[0] is None


def inputs_of(model: Any, samples: Any, input_range: tuple[float, float] | None) -> Any:
    """Return what `model` is called with: by name where both have names, else in order."""
    structure = getattr(model, "input", None) if getattr(model, "inputs", None) else None
    if not isinstance(samples, dict):
        return scale(samples, input_range, getattr(structure, "dtype", None))
    if structure is None:
        return as_inputs({name: scale(part, input_range, None) for name, part in samples.items()})
    positions = iter(samples.values()) if all(is_position(name, INPUT) for name in samples) else None

    def pick(tensor: Any, name: str) -> Any:
        part = next(positions) if positions else samples[name]
        return scale(part, input_range, tensor.dtype)

    if isinstance(structure, dict):  # a tensor may have another name than the key that it is given by
        return {name: pick(tensor, name) for name, tensor in structure.items()}
    return tf.nest.map_structure(lambda tensor: pick(tensor, tensor.name), structure)


def specs_of(example: Iterable[Array], batch_size: int | None = None) -> list[Any]:
    """Return the signature of batches like `example`, samples and labels. None: of any size."""
    return [
        map_fields(lambda field: tf.TensorSpec((batch_size, *field.shape[1:]), field.dtype), array)
        for array in example
    ]


def symbolic(spec: Any) -> Any:
    """Return a symbolic tensor with the shape and type of `spec`."""
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def as_tensors(array: Array) -> Any:
    """Return a batch as a tensor. Records become a dict of their fields."""
    return map_fields(tf.convert_to_tensor, array)


def scale(values: Any, input_range: tuple[float, float] | None, dtype: Any) -> Any:
    """Return uint8 0…255 as float32 within `input_range`, and others in the type that the input has.

    Of an input of unknown type (None), integers stay integers: they may be indices.
    """
    if values.dtype == tf.uint8 and input_range is not None:
        low, high = input_range
        return tf.cast(values, tf.float32) * ((high - low) / 255.0) + low
    if dtype is not None:
        return tf.cast(values, dtype)
    return tf.cast(values, tf.float32) if values.dtype.is_floating or values.dtype == tf.uint8 else values
