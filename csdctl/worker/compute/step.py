"""The exact weighted step (docs/explanation/exact-gradients.md), and the vector that the ranks sum.

Each rank turns its n samples of a step into one flat float32 vector and leaves the model as it was. The sum
of these vectors over the ranks, divided by its counts, is the mean over all samples, whatever n is on each
rank: partial batches and ranks without samples come out right. A rank whose samples have a weight multiplies
its vector, including n, by that weight. The layout of the vector:

    [ Σ gradient | changes of layers' state · n | Σ loss, metrics' states, (loss count), n |
      stop | seconds | norm ]

Where layers add a loss for each sample, which fit sums over the batch, its gradient and its sum stand behind
those of the rest, and are not divided.

The step owns everything up to n, the number of samples; divided by it, a sum over ranks is the mean over all
their samples. A loss that is no mean over samples has a count of its own: unmasked elements, a sum of
weights, or the public samples among private ones with noise. Behind n the training loop adds whether a stop
was requested, one element for each rank of the run with the seconds that this rank computed, and the rank's
`square_norm`.

With noise (`NoisySums`), private samples contribute to gradients and n alone; loss and metrics are those of
the public samples.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import STATE, tf
from csdctl.worker.compute.keras_internals import regularization_losses
from csdctl.worker.compute.objective import BatchLoss, Objective, as_tensors
from csdctl.worker.compute.statistics import LayerStates, Seeds, Snapshot
from csdctl.worker.compute.user_code import Augmentation
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.layout import Sums, VectorLayout
from csdctl.worker.process.errors import InputError
from csdctl.worker.protocol.recipe import Noise, Recipe

CHUNK = 1 << 18
"""Elements of the vector that receive noise at a time: a slow node has little memory."""


class NoisySums:
    """Sums of clipped gradients of private samples, with noise: DP-SGD (Abadi et al., 2016) on the rank.

    The gradient of each private sample is clipped to an L2 norm over all trainable variables together. The
    clipped gradients are summed, and Gaussian noise is added to the sum once per step, before any other code
    can read it. Only the node must be trusted, not the host or the other ranks.

    The noise comes from the kernel's random bytes. The recipe's seed is not suitable: the host knows it and
    could subtract the noise. The known weakness of Gaussian samples in floating point remains (Mironov 2012).
    """

    def __init__(self, noise: Noise, model: Any, objective: Objective) -> None:
        self._noise, self._model, self._objective = noise, model, objective
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
        penalties = regularization_losses(self._model)
        # They have the types that their layers compute in.
        return tf.add_n([tf.cast(one, tf.float32) for one in penalties]) if penalties else None

    def _gradients(self, tape: Any, objective: Any) -> list[Any]:
        values, zero = [variable.value for variable in self._variables], tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(objective, values, unconnected_gradients=zero)
        return list(map(tf.convert_to_tensor, gradients))


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


class RankStep:
    """A rank's step without the computation of its vector, for the whole model or a part of it."""

    model: Any
    """The model, or the part of it that the rank has."""
    objective: Objective
    states: LayerStates
    """State that the model's layers keep besides weights."""
    layout: VectorLayout
    """The layout of the rank's vector, without what a training loop appends."""
    has_noise = False
    """Whether private samples are clipped and get noise."""
    _has_summed = _has_loss_count = False
    """As in the layout, which is known once the graph of the vector is traced."""
    _unused: frozenset[int] = frozenset()
    """Ids of the variables that the loss does not depend on: as in fit, no weight decay changes them."""

    def __init__(self, model: Any, recipe: Recipe, rank: int) -> None:
        """`model`: whole and compiled; its optimizer is used, and its layers draw random numbers."""
        self.optimizer: Any = getattr(model, "optimizer", None)
        self._applying: Callable[[Any], Any] | None = None
        self.seeds = Seeds(model, recipe.seed, rank)
        """The random states of the model's layers."""
        self.augmentation = Augmentation(recipe.augment, recipe.seed) if recipe.augment else None
        """The user's function that every training batch passes through."""

    @property
    def state(self) -> list[Any]:
        """The variables that training changes, in a fixed order: weights, then those of the optimizer."""
        return [*self.model.weights, *self.optimizer.variables]

    @property
    def weights(self) -> list[Array]:
        """The model's weights."""
        weights: list[Array] = self.model.get_weights()
        return weights

    @property
    def rate(self) -> float:
        """The learning rate of the latest step."""
        return float(self.optimizers[0].learning_rate)

    @property
    def values(self) -> list[Array]:
        """The values of the state, without learning rates, which every step sets."""
        return [np.asarray(one.value) for one in self._kept]

    @values.setter
    def values(self, values: Sequence[Array]) -> None:
        for variable, value in zip(self._kept, values, strict=True):
            variable.assign(value)

    @property
    def _kept(self) -> list[Any]:
        rates = {id(rate) for rate in self.learning_rates}
        return [variable for variable in self.state if id(variable) not in rates]

    def set_step(self, step: int, learning_rate: float) -> None:
        """Set the learning rate and the random states of the run's step `step`, counted from 0."""
        self.seeds.set_step(step)
        # TensorFlow's variable: Keras' assign costs several times as much, in every step.
        self.optimizer.learning_rate.value.assign(learning_rate, read_value=False)

    def augment(self, images: Array, labels: Array, num_single: int = 0) -> tuple[Array, Array]:
        """Return the batch that is trained on; the first `num_single` samples do not depend on others."""
        if self.augmentation is None:
            return images, labels
        return self.augmentation(images, labels, *self.seeds.position, num_single)

    def apply(self, total: Array) -> Sums:
        """Divide the step's part of a summed vector by its counts and take one optimizer step."""
        sums = self.read_sums(total)
        if total[self.layout.count] > 0:
            # Without the lookup of a graph by its arguments: a third of the CPU time of a small step.
            if self._applying is None:
                signature = [tf.TensorSpec((self.layout.step_size,), tf.float32)]
                graph = tf.function(self._apply_graph, autograph=False, input_signature=signature)
                self._applying = graph.get_concrete_function()
            self._applying(tf.convert_to_tensor(total))
        return sums

    def read_sums(self, total: Array) -> Sums:
        """Return loss sum, metric sums and count of a summed vector."""
        return self._sums(total[self.layout.sums])

    def square_norm(self, vector: Array) -> float:
        """Return the count of the samples of a vector times the squared norm of their mean gradient."""
        gradient, count = vector[self.layout.gradients], float(vector[self.layout.count])
        return float(np.dot(gradient, gradient)) / count if count > 0 else 0.0

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the metrics of all samples of `sums` by name."""
        return self.objective.metrics.compute(sums.states) if sums.states else {}

    @property
    def applied(self) -> list[tuple[Any, list[Any]]]:
        """The optimizers, each with the variables that it trains."""
        return [(self.optimizer, self.model.trainable_variables)]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers, each once."""
        return list({id(one): one for one, _ in self.applied}.values())

    @property
    def learning_rates(self) -> list[Any]:
        """The learning rates, which every step sets."""
        return [self.optimizer.learning_rate]

    @property
    def metric_names(self) -> list[str]:
        """Names of the results of `metrics`."""
        return list(self.metrics(Sums(0.0, (0.0,) * self.objective.metrics.size, 0.0)))

    def find_normalizing(self, changes: Array) -> list[str]:
        """Return the names of the layers that normalized by their batch, by its changes of statistics."""
        return self.states.find_normalizing(changes)

    def rehearse_apply(self) -> None:
        """Take an optimizer step and undo it: the first one costs a slow node seconds."""
        vector = np.zeros(self.layout.step_size, np.float32)
        vector[[self.layout.divisor, self.layout.count]] = 1
        self._rehearse(lambda: self.apply(vector))

    @property
    def has_loss_scaling(self) -> bool:
        """Whether an optimizer skips gradients that are not finite, and scales the loss (mixed_float16)."""
        return any(hasattr(optimizer, "inner_optimizer") for optimizer in self.optimizers)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Hold the weights of the trained model: their moving average, where an optimizer keeps one."""
        averaging = [
            (one, variables)
            for one, variables in self.applied
            if getattr(getattr(one, "inner_optimizer", one), "use_ema", False)
        ]
        before = Snapshot(variable for _, variables in averaging for variable in variables)
        for optimizer, variables in averaging:
            optimizer.finalize_variable_values(variables)
        try:
            yield
        finally:
            before.restore()

    def _lay_out(self) -> VectorLayout:
        return VectorLayout(
            sum(math.prod(variable.shape) for variable in self.model.trainable_variables),
            self.states.size,
            self.objective.metrics.size,
            has_loss_count=self._has_loss_count,
            divides_gradients=self.objective.counts_elements and not self.has_noise,
            has_summed=self._has_summed,
        )

    def _rehearse(self, do: Callable[[], object]) -> None:
        before = Snapshot(self.state)
        do()
        before.restore()

    def _sums(self, tail: Array) -> Sums:
        loss, *states, count = (float(value) for value in tail)
        if self._has_summed:
            loss += states.pop(0) * count
        return Sums(loss, tuple(states), count)

    def _tail(self, batch: BatchLoss, *, with_samples: bool) -> list[Any]:
        """Return the end of a vector: Σ loss, what is summed, metrics' states, count of the loss (and n)."""
        tail = [tf.reshape(batch.mean * batch.loss_count, [1])]
        if self._has_summed:  # in evaluation, layers may leave it out
            tail.append(tf.zeros([1]) if batch.summed is None else tf.reshape(batch.summed, [1]))
        tail += batch.states
        if not with_samples or self._has_loss_count:
            tail.append(tf.reshape(batch.loss_count, [1]))
        return [*tail, tf.reshape(batch.samples, [1])] if with_samples else tail

    def _apply_graph(self, total: Any) -> None:
        layout = self.layout
        with tf.device(STATE):
            # As in fit, the optimizer steps with a gradient of 0 if nothing has a weight.
            gradient = tf.math.divide_no_nan(total[: layout.num_gradients], total[layout.divisor])
            if layout.has_summed:  # the part of the loss that is not divided
                gradient += total[layout.num_gradients : layout.gradients.stop]
            # First what the forward pass did to the weights, as in fit.
            self.states.apply_changes(total[layout.statistics] / total[layout.count])
            self._optimize(unflatten(gradient, self.model.trainable_variables), total)

    def _optimize(self, gradients: list[Any], total: Any) -> None:
        """Take the optimizer step of the model's mean `gradients`; inside a graph."""
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        used = [pair for pair in pairs if id(pair[1]) not in self._unused]
        if used:
            self.optimizer.apply_gradients(used)
        else:  # Keras does not count a step without variables, and rank 0's optimizer has others
            self.optimizer.iterations.assign_add(1)


class Step(RankStep):
    """Computes a rank's vector and applies the summed one; owns the optimizer."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        example: tuple[Array, Array],
        *,
        rank: int = 0,
        micro_batch_size: int | None = None,
        weight: float = 1.0,
        noise: Noise | None = None,
    ) -> None:
        """`model`: compiled; `example`: samples and labels (n, …) as the data has them; n may be 0.

        A batch larger than `micro_batch_size` is computed in micro-batches whose vectors are added: the
        same gradient in less memory. `weight` is the weight of each of the rank's samples in the mean of
        all ranks.
        """
        super().__init__(model, recipe, rank)
        self.model = model
        self.has_noise = noise is not None
        self.objective = Objective(model, recipe, example, is_per_sample=self.has_noise)
        self.optimizer.build(model.trainable_variables)  # of which compute_loss may have created some
        self.states = LayerStates(model)
        self.micro_batch_size = micro_batch_size
        self._weight = weight
        # No graph depends on a tensor's value. AutoGraph would only leave a source file in the temporary
        # directory for each graph of a rank that is killed.
        batch = self.objective.signature
        self._has_loss_count = self.has_noise or self.objective.counts_elements
        local = tf.function(self._local_graph, autograph=False, input_signature=batch)
        # What layers add to the loss, and what they write, is known by tracing them.
        self._local = local.get_concrete_function()
        self._check_writes(self._local.graph)
        self.layout = self._lay_out()
        self._alone = tf.function(self._alone_graph, autograph=False, input_signature=batch)
        self._evaluate = tf.function(self._evaluate_graph, autograph=False, input_signature=batch)
        if noise:
            self._noisy = NoisySums(noise, model, self.objective)

    def _check_writes(self, graph: Any) -> None:
        """Raise WorkerError, exit code 2, if a layer writes what is trained: each rank its own."""
        writes = [op.inputs[0] for op in graph.get_operations() if op.type.startswith("Assign")]
        written = {id(handle) for handle, inner in graph.captures if any(inner is found for found in writes)}
        restored = {id(variable) for variable in self.states.variables}
        for variable in self.model.trainable_variables:
            value = variable.value
            if id(value.handle) in written and id(value) not in restored:
                raise InputError(
                    f"the model's forward pass writes {variable.path}, which the optimizer trains",
                    "use a constraint (kernel_constraint) instead, or create it with trainable=False",
                )

    def local(
        self, images: Array, labels: Array, out: Array | None = None, *, private_copies: Array | None = None
    ) -> Array:
        """Return this rank's vector, shape (layout.step_size,), float32, sums rather than means.

        It is written to `out` when given. With noise, `private_copies`, shape (p,), says that the first p
        samples are private, and how often each of them occurs among these.
        """
        count = len(private_copies) if private_copies is not None and self.has_noise else 0
        images, labels = self.augment(images, labels, count)
        if private_copies is None or not count:
            return self._plain(images, labels, out)
        vector = np.zeros(self.layout.step_size, np.float32) if out is None else out
        self._plain(images[count:], labels[count:], vector)
        # Once per step, whatever the micro-batch size: each further noisy sum would reveal more.
        private, classes = as_tensors(images[:count]), as_tensors(labels[:count])
        gradients = vector[self.layout.gradients]
        self._noisy.add_to(gradients, private, classes, private_copies, self._weight)
        vector[self.layout.count] += count * self._weight
        return vector

    def _plain(self, images: Array, labels: Array, out: Array | None) -> Array:
        size = max(1, self.micro_batch_size or len(images))
        vector = np.zeros(self.layout.step_size, np.float32) if out is None else out
        if len(images) == 0:
            vector[:] = 0
        for start in range(0, len(images), size):
            batch = slice(start, start + size)
            part = np.asarray(self._local(as_tensors(images[batch]), as_tensors(labels[batch])))
            if start:
                np.add(vector, part, out=vector)
            else:
                np.copyto(vector, part)
        return vector

    def alone(self, images: Array, labels: Array, *, private_copies: Array | None = None) -> Sums:
        """Run `local` and `apply` of a rank without other ranks, in one graph."""
        if self.has_noise or (self.micro_batch_size and len(images) > self.micro_batch_size):
            return self.apply(self.local(images, labels, private_copies=private_copies))
        batch = map(as_tensors, self.augment(images, labels))
        return self._sums(np.asarray(self._alone(*batch)))

    def evaluate(self, images: Array, labels: Array) -> Sums:
        """Return loss sum, metric sums and count of one batch, without training."""
        return self._sums(np.asarray(self._evaluate(as_tensors(images), as_tensors(labels))))

    def take(self, images: Array, labels: Array, private_copies: Array | None = None) -> None:
        """Take a step without other ranks, as a rank among others takes it."""
        self.apply(self.local(images, labels, private_copies=private_copies))

    def rehearse(self, images: Array, labels: Array, private_copies: Array | None, *, is_alone: bool) -> None:
        """Reach full speed; the model stays as it was. `is_alone`: of a rank without other ranks."""
        for _ in range(2):
            self.local(images, labels)
            if private_copies is not None:
                self.local(images, labels, private_copies=private_copies)
        if is_alone:
            self.rehearse_alone(images, labels)
        self.rehearse_apply()

    def rehearse_alone(self, images: Array, labels: Array) -> None:
        """Take a step of a rank without other ranks and undo it."""
        self._rehearse(lambda: self.alone(images, labels))

    def _gradients(self, samples: Any, labels: Any) -> tuple[list[Any], list[Any], BatchLoss]:
        """Return the gradients of all trainable variables, in float32, and the loss.

        First those of the mean loss, not yet times its count: a mean stays within the range of float16, where
        a sum would overflow. Then those of what is summed; [] without.
        """
        variables = self.model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            batch = self.objective.forward(samples, labels, training=True)
            parts = [batch.mean] if batch.summed is None else [batch.mean, batch.summed]
            objectives = [self.optimizer.scale_loss(one) if self.has_loss_scaling else one for one in parts]
        self._has_summed = batch.summed is not None
        values, zeros = [one.value for one in variables], [tf.zeros(one.shape) for one in variables]
        gradients = [tape.gradient(one, values) for one in objectives]
        found = zip(map(id, variables), *gradients, strict=True)
        self._unused = frozenset(key for key, *parts in found if all(part is None for part in parts))
        means, *summed = (
            [tf.cast(zero if one is None else one, tf.float32) for one, zero in zip(part, zeros, strict=True)]
            for part in gradients
        )
        return means, summed[0] if summed else [], batch

    def _local_graph(self, samples: Any, labels: Any) -> Any:
        before = self.states.read()
        means, summed, batch = self._gradients(samples, labels)
        changes = self.states.take_changes(before, batch.samples)
        gradients = [*(mean * batch.loss_count for mean in means), *summed]
        flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
        vector = tf.concat([*flat, *changes, *self._tail(batch, with_samples=True)], axis=0)
        return vector if self._weight == 1.0 else vector * self._weight

    def _alone_graph(self, samples: Any, labels: Any) -> Any:
        gradients, summed, batch = self._gradients(samples, labels)
        if summed:
            gradients = [mean + other for mean, other in zip(gradients, summed, strict=True)]
        with tf.device(STATE):
            self._optimize(gradients, None)
        return tf.concat(self._tail(batch, with_samples=False), axis=0) * self._weight

    def _evaluate_graph(self, samples: Any, labels: Any) -> Any:
        batch = self.objective.forward(samples, labels, training=False)
        return tf.concat(self._tail(batch, with_samples=False), axis=0)


def unflatten(vector: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the parts of a vector in the shapes of the variables; inside a graph or outside."""
    parts = tf.split(vector, [math.prod(variable.shape) for variable in variables]) if variables else []
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]
