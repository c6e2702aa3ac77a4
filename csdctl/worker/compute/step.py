"""The exact weighted step (docs/explanation/exact-gradients.md).

Each rank turns its n samples of a step into one flat float32 vector (vector.py) and leaves the model as it
was. The sum of these vectors over the ranks, divided by its last element, is the mean over all samples,
whatever n is on each rank: partial batches and ranks without samples come out right. A rank whose samples
have a weight multiplies its vector, including n, by that weight.

With noise (noise.py), private samples contribute to gradients and n alone; loss and metrics are those of the
public samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import regularization_losses
from csdctl.worker.compute.noise import NoisySums
from csdctl.worker.compute.recipe import make_loss, make_metrics, make_optimizer
from csdctl.worker.compute.statistics import MovingStatistics, Seeds
from csdctl.worker.compute.vector import VectorLayout
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.recipe import Noise, Recipe


@dataclass(frozen=True)
class Sums:
    """Loss and metrics summed over samples, of one rank or of all."""

    loss: float
    metrics: tuple[float, ...]
    samples: float
    """The number of these samples, each counted with its weight."""


class Step:
    """Computes a rank's vector and applies the summed one; owns the optimizer."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        example: tuple[Array, Array],
        tf: Any,
        keras: Any,
        *,
        rank: int = 0,
        micro_batch_size: int | None = None,
        weight: float = 1.0,
        own_metrics: Mapping[str, Any] | None = None,
        noise: Noise | None = None,
    ) -> None:
        """`example`: images (n, …) and labels (n, …) with the shapes and types of the data; n may be 0.

        A batch larger than `micro_batch_size` is computed in micro-batches whose vectors are added: the
        same gradient in less memory. `weight` is the weight of each of the rank's samples in the mean of
        all ranks. `own_metrics`, by name, are functions (labels, predictions) → one value per sample, for
        `evaluate` only.
        """
        self.model = model
        self.optimizer = make_optimizer(recipe, keras)
        self.optimizer.build(model.trainable_variables)
        self._tf = tf
        self._loss = make_loss(recipe, keras)
        self.metric_names, self._metrics = make_metrics(recipe, model, keras)
        own = own_metrics or {}
        self.evaluated_names = (*self.metric_names, *own)
        self._evaluated = [*self._metrics, *own.values()]
        self._input_range = recipe.input_range
        self.statistics = MovingStatistics(model, tf, keras)
        self.seeds = Seeds(model, recipe.seed, rank)
        """The random states of the model's layers."""
        self.micro_batch_size = micro_batch_size
        self._weight = weight
        self.has_noise = noise is not None
        """Whether private samples are clipped and get noise."""
        self.layout = VectorLayout(
            num_gradients=sum(int(np.prod(v.shape)) for v in model.trainable_variables),
            num_statistics=self.statistics.size,
            num_metrics=len(self._metrics),
            has_public_count=self.has_noise,
        )
        """The layout of the rank's vector, without what a training loop appends."""
        # No graph depends on a tensor's value. AutoGraph would only leave a source file in the temporary
        # directory for each graph of a rank that is killed.
        batch = [self._spec_of(array) for array in example]
        self._local_signature = batch
        self.retrace()
        self._alone = tf.function(self._alone_graph, autograph=False, input_signature=batch)
        self._apply = tf.function(
            self._apply_graph,
            autograph=False,
            input_signature=[tf.TensorSpec((self.layout.step_size,), tf.float32)],
        )
        self._evaluate = tf.function(self._evaluate_graph, autograph=False, input_signature=batch)
        if noise:
            of_one = self._loss_of_one, self._penalty
            self._noisy = NoisySums(noise, model.trainable_variables, *of_one, batch, tf)

    def retrace(self) -> None:
        """Forget the graph of `local`: it is traced anew, with the types that layers compute in by then."""
        self._local = self._tf.function(
            self._local_graph, autograph=False, input_signature=self._local_signature
        )

    @property
    def state(self) -> list[Any]:
        """The variables that training changes, in a fixed order: weights, then those of the optimizer."""
        return [*self.model.weights, *self.optimizer.variables]

    def set_step(self, step: int, learning_rate: float) -> None:
        """Set the learning rate and the random states of the run's step `step`, counted from 0."""
        self.seeds.set_step(step)
        self.optimizer.learning_rate.assign(learning_rate)

    def local(
        self, images: Array, labels: Array, out: Array | None = None, *, private_copies: Array | None = None
    ) -> Array:
        """Return this rank's vector, shape (layout.step_size,), float32, sums rather than means.

        It is written to `out` when given. With noise, `private_copies`, shape (p,), says that the first p
        samples are private, and how often each of them occurs among these.
        """
        if private_copies is None or not len(private_copies) or not self.has_noise:
            return self._plain(images, labels, out)
        count = len(private_copies)
        vector = np.zeros(self.layout.step_size, np.float32) if out is None else out
        self._plain(images[count:], labels[count:], vector)
        # Once per step, whatever the micro-batch size: each further noisy sum would reveal more.
        private = self._tensor(images[:count]), self._tensor(labels[:count])
        self._noisy.add_to(vector[self.layout.gradients], *private, private_copies, self._weight)
        vector[self.layout.count] += count * self._weight
        return vector

    def _plain(self, images: Array, labels: Array, out: Array | None) -> Array:
        size = self.micro_batch_size or len(images)
        if out is None and 0 < len(images) <= size:
            return np.asarray(self._local(self._tensor(images), self._tensor(labels)))
        vector = np.zeros(self.layout.step_size, np.float32) if out is None else out
        if len(images) == 0:
            vector[:] = 0
        for start in range(0, len(images), max(1, size)):
            micro_batch = slice(start, start + size)
            part = np.asarray(
                self._local(self._tensor(images[micro_batch]), self._tensor(labels[micro_batch]))
            )
            if start:
                np.add(vector, part, out=vector)
            else:
                np.copyto(vector, part)
        return vector

    def apply(self, total: Array) -> Sums:
        """Divide the step's part of a summed vector by its sample count and take one optimizer step."""
        sums = self.read_sums(total)
        if total[self.layout.count]:
            self._apply(self._tf.convert_to_tensor(total))
        return sums

    def alone(self, images: Array, labels: Array, *, private_copies: Array | None = None) -> Sums:
        """Run `local` and `apply` of a rank without other ranks, in one graph."""
        if self.has_noise or (self.micro_batch_size and len(images) > self.micro_batch_size):
            return self.apply(self.local(images, labels, private_copies=private_copies))
        return self._sums(np.asarray(self._alone(self._tensor(images), self._tensor(labels))))

    def evaluate(self, images: Array, labels: Array) -> Sums:
        """Return loss sum, metric sums and count of one batch, without training."""
        return self._sums(np.asarray(self._evaluate(self._tensor(images), self._tensor(labels))))

    def read_sums(self, total: Array) -> Sums:
        """Return loss sum, metric sums and count of a summed vector."""
        return self._sums(total[self.layout.sums])

    def rehearse_apply(self) -> None:
        """Take an optimizer step and undo it: the first one costs a slow node seconds."""
        vector = np.zeros(self.layout.step_size, np.float32)
        vector[self.layout.count] = 1
        self._rehearse(lambda: self.apply(vector))

    def rehearse_alone(self, images: Array, labels: Array) -> None:
        """Take a step of a rank without other ranks and undo it."""
        self._rehearse(lambda: self.alone(images, labels))

    def _rehearse(self, do: Callable[[], object]) -> None:
        before = [np.array(variable) for variable in self.state]
        do()
        for variable, value in zip(self.state, before, strict=True):
            variable.assign(value)

    def _tensor(self, array: Array) -> Any:
        """Return `array` as a tensor; records become a dict of their fields."""
        if array.dtype.names is None:
            return self._tf.convert_to_tensor(array)
        return {name: self._tf.convert_to_tensor(array[name]) for name in array.dtype.names}

    def _spec_of(self, array: Array) -> Any:
        if array.dtype.names is None:
            return self._tf.TensorSpec((None, *array.shape[1:]), array.dtype)
        return {
            name: self._tf.TensorSpec((None, *array.dtype[name].shape), array.dtype[name].base)
            for name in array.dtype.names
        }

    def _inputs(self, images: Any) -> Any:
        """Return what the model is called with; several inputs are matched by name."""
        if not isinstance(images, dict):
            return scale(images, self._input_range, self._tf)
        return self._tf.nest.map_structure(
            lambda tensor: scale(images[tensor.name], self._input_range, self._tf), self.model.input
        )

    @staticmethod
    def _sums(tail: Array) -> Sums:
        loss, *metrics, samples = (float(value) for value in tail)
        return Sums(loss, tuple(metrics), samples)

    def _forward(
        self, images: Any, labels: Any, metrics: Sequence[Any], *, training: bool
    ) -> tuple[Any, list[Any]]:
        """Return the summed loss, and [loss, metrics…, count] as scalars."""
        tf = self._tf
        predictions = self.model(self._inputs(images), training=training)
        loss = tf.cast(self._loss(labels, predictions), tf.float32)
        sums = [
            tf.reduce_sum(tf.cast(per_sample(metric(labels, predictions), tf), tf.float32))
            for metric in metrics
        ]
        return loss, [loss, *sums, tf.cast(tf.shape(labels)[0], tf.float32)]

    def _gradients(self, images: Any, labels: Any) -> tuple[list[Any], list[Any]]:
        """Return the summed gradients of all trainable variables, and [loss, metrics…, count]."""
        tf = self._tf
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            objective, sums = self._forward(images, labels, self._metrics, training=True)
            if self.model.losses:
                # A regularization loss is one number per model; multiplied by n, it survives the mean.
                objective += sums[-1] * self._add(self.model.losses)
        gradients = tape.gradient(objective, [v.value for v in variables])
        return [
            tf.zeros(variable.shape) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
        ], [objective, *sums[1:]]

    def _loss_of_one(self, images: Any, labels: Any) -> Any:
        """Return the loss of a batch of one sample, with what layers add for it, without weight penalties."""
        tf = self._tf
        loss = tf.cast(self._loss(labels, self.model(self._inputs(images), training=True)), tf.float32)
        added = self.model.losses
        sample_losses = added[: len(added) - len(regularization_losses(self.model))]
        return loss + self._add(sample_losses) if sample_losses else loss

    def _penalty(self) -> Any:
        penalties = regularization_losses(self.model)
        return self._add(penalties) if penalties else None

    def _add(self, losses: Sequence[Any]) -> Any:
        """Return the sum of losses of layers, which have the types that these compute in."""
        return self._tf.add_n([self._tf.cast(loss, self._tf.float32) for loss in losses])

    def _local_graph(self, images: Any, labels: Any) -> Any:
        tf = self._tf
        before = self.statistics.read()
        gradients, sums = self._gradients(images, labels)
        changes = self.statistics.take_changes(before, sums[-1])
        flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
        if self.has_noise:
            sums = [*sums, sums[-1]]
        vector = tf.concat([*flat, *changes, sums], axis=0)
        return vector if self._weight == 1.0 else vector * self._weight

    def _apply_graph(self, total: Any) -> None:
        tf = self._tf
        variables = self.model.trainable_variables
        sizes = [int(np.prod(v.shape)) for v in variables]
        mean = total[self.layout.mean] / total[self.layout.count]
        flat = tf.split(mean[self.layout.gradients], sizes)
        gradients = [tf.reshape(gradient, v.shape) for gradient, v in zip(flat, variables, strict=True)]
        self.optimizer.apply(gradients, variables)
        self.statistics.apply_changes(mean[self.layout.statistics])

    def _alone_graph(self, images: Any, labels: Any) -> Any:
        gradients, sums = self._gradients(images, labels)
        self.optimizer.apply([gradient / sums[-1] for gradient in gradients], self.model.trainable_variables)
        return self._tf.stack(sums) * self._weight

    def _evaluate_graph(self, images: Any, labels: Any) -> Any:
        return self._tf.stack(self._forward(images, labels, self._evaluated, training=False)[1])


def scale(images: Any, input_range: tuple[float, float] | None, tf: Any) -> Any:
    """Return uint8 0…255 as float32 within `input_range`, and other types as float32, unchanged."""
    values = tf.cast(images, tf.float32)
    if input_range is None or images.dtype != tf.uint8:
        return values
    low, high = input_range
    return values * ((high - low) / 255.0) + low


def per_sample(values: Any, tf: Any) -> Any:
    """Return one value per sample, shape (n,): the mean over all further axes."""
    axes = list(range(1, values.shape.rank))
    return tf.reduce_mean(values, axis=axes) if axes else values


def mean_of(sums: Sequence[Sums]) -> Sums:
    """Return the means over all samples of several sums; `samples` is their number."""
    count = sum(part.samples for part in sums)
    columns = zip(*(part.metrics for part in sums), strict=True)
    return Sums(
        sum(part.loss for part in sums) / count, tuple(sum(column) / count for column in columns), count
    )
