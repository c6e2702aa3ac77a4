"""The functions of a step without state, of a model that Keras trains. engine/layout.py has the vector."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from csdctl.worker.compute import keras_internals as internals
from csdctl.worker.compute.backend import STATE, keras, tf
from csdctl.worker.compute.objective import BatchLoss, MetricStates, Objective
from csdctl.worker.compute.recipe import make_schedule
from csdctl.worker.compute.trace import GraphBuilder, Values, unflatten
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.layout import VectorLayout
from csdctl.worker.engine.step import (
    APPLY,
    EVALUATE,
    LOCAL,
    METRICS,
    NOISY,
    SCHEDULE,
    Slice,
    StepInfo,
    VariableInfo,
)
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.recipe import Recipe


def pooled_spread(mean_move: Any, variance_move: Any, rate: float) -> tuple[Any, Any]:
    """Return the changes of a batch norm's moving mean and variance, whose means over ranks can be pooled."""
    mean_move, variance_move = tf.cast(mean_move, tf.float32), tf.cast(variance_move, tf.float32)
    return mean_move, variance_move + mean_move * mean_move / rate


class Statistics:
    """The state of layers that a forward pass changes, flat: moving statistics, then any other state.

    State travels with the gradient, so that after every step each rank has the state of the pooled batch
    (docs/explanation/exact-gradients.md). For the moving statistics of batch norm:

        μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

    Ranks exchange Δ_k = (1 − m)(μ_k − moving mean), with m the layer's momentum: sums of small differences
    keep their precision, sums of squares would lose it. Of any other layer they exchange the change itself:
    the mean over all samples is exact for moving averages of batch means, and for state that does not depend
    on samples.
    """

    def __init__(self, model: Any) -> None:
        self.norms = [
            (layer.moving_mean, layer.moving_variance, 1.0 - float(layer.momentum))
            for layer in internals.flatten_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.momentum < 1
        ]
        self.variables = [variable for *pair, _ in self.norms for variable in pair]
        self.add(changing_state(model))

    def add(self, variables: Iterable[Any]) -> None:
        """Add other state that a forward pass changes, if it can be averaged: numbers or booleans."""
        kinds = ("float", "int", "bool")
        self.variables += [
            variable for variable in variables if any(kind in variable.dtype for kind in kinds)
        ]

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each variable."""
        return [math.prod(variable.shape) for variable in self.variables]

    def read(self) -> list[Any]:
        """Return the state now, for `changes`."""
        return [tf.convert_to_tensor(variable.value) for variable in self.variables]

    def changes(self, before: Sequence[Any], weight: Any) -> list[Any]:
        """Return the changes since `before`, times `weight`, flat."""
        changes, old = [], iter(before)
        for mean, variance, rate in self.norms:
            moves = pooled_spread(mean - next(old), variance - next(old), rate)
            changes += [weight * move for move in moves]
        for variable, value in zip(self.variables[len(changes) :], old, strict=True):
            pair = variable.value, value
            new, old_value = (tf.cast(part, tf.int32) for part in pair) if variable.dtype == "bool" else pair
            changes.append(tf.reshape(tf.cast(new - old_value, tf.float32) * weight, [-1]))
        return changes

    def apply(self, changes: Any) -> None:
        """Update the state by the mean `changes` of all ranks, shape (Σ sizes,)."""
        parts = iter(tf.split(changes, self.sizes) if self.variables else ())
        for mean, variance, rate in self.norms:
            moved, spread = next(parts), next(parts)
            mean.assign(mean + tf.cast(moved, mean.dtype))
            spread = tf.cast(spread - moved * moved / rate, variance.dtype)
            variance.assign(tf.maximum(variance + spread, 0.0))
        for variable, part in zip(self.variables[2 * len(self.norms) :], parts, strict=True):
            change = tf.reshape(part, variable.shape)
            if "float" in variable.dtype:
                variable.assign(variable.value + tf.cast(change, variable.dtype))
            elif variable.dtype == "bool":
                variable.assign(tf.cast(variable.value, tf.float32) + change > 0.5)
            else:  # a counter, which all ranks advance alike
                variable.assign(variable.value + tf.cast(tf.round(change), variable.dtype))


def changing_state(model: Any) -> list[Any]:
    """Return the state of layers other than batch norm, as Keras' variables.

    Layers do not declare what changes it: only the constants of Keras' own preprocessing are left out. A
    SpectralNormalization writes the kernel that it wraps.
    """
    layers = keras.layers
    state: dict[int, Any] = {}
    for layer in internals.flatten_layers(model):
        if not isinstance(layer, (layers.Normalization, layers.BatchNormalization)):
            state |= {id(variable): variable for variable in internals.non_trainable_state(layer)}
        if isinstance(layer, layers.SpectralNormalization):
            state[id(layer.kernel)] = layer.kernel
    return list(state.values())


def find_random_states(model: Any, values: Iterable[Any] = ()) -> list[Any]:
    """Return the variables of the seed generators of a model, and of layers and generators in `values`."""
    generators = internals.seed_generators(model)
    for value in values:
        if isinstance(value, keras.layers.Layer):
            generators += internals.seed_generators(value)
        elif isinstance(value, keras.random.SeedGenerator):
            generators.append(value)
    generators.append(internals.global_seed_generator())
    states = {id(generator): generator.state for generator in reversed(generators)}
    return list(states.values())[::-1]


class Compiler(ABC):
    """What functions of a step have in common: the state, the batch, and random numbers as arguments."""

    variables: list[Any]
    signature: list[Any]
    random_states: list[Any]
    metric_states: MetricStates
    optimizers: list[Any]

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self._values: Values
        self._rates: list[tuple[Any, float]] = []

    @abstractmethod
    def trace(self, builder: GraphBuilder) -> StepInfo:
        """Trace all functions. Raises WorkerError, exit code 2, for a step that ranks cannot take."""

    def add_state(self, variables: Sequence[Any]) -> list[Any]:
        """Let variables that neither model nor optimizer knows be state. Return all but random states."""
        added = []
        for variable in variables:
            if "seed_generator_state" in variable.path:
                self.random_states.append(variable)
            else:
                added.append(variable)
        self.variables += added
        return added

    @property
    def rates(self) -> list[Any]:
        """The learning rates that every step sets, as Keras' variables."""
        return [rate for rate, _ in self._rates]

    @property
    def values(self) -> list[Array]:
        """The values of all variables now."""
        return [np.asarray(variable.value) for variable in self.variables]

    def _describe(self, builder: GraphBuilder, layout: VectorLayout, **fields: Any) -> StepInfo:
        """Add the functions that every step has. Return the description of the whole."""
        if self.recipe.schedule:
            schedule = make_schedule(self.recipe.schedule)
            builder.add((SCHEDULE,), lambda _, step: schedule(step), {"step": tf.TensorSpec((), tf.int64)})
        embeddings = [
            layer
            for layer in internals.flatten_layers(self.model)
            if type(layer).__name__.endswith("Embedding")
        ]
        sizes = [getattr(layer, "input_dim", None) for layer in embeddings]
        return StepInfo(
            functions=builder.functions,
            variables=tuple(
                VariableInfo(tuple(value.shape), np.dtype(value.dtype).name, not value.any())
                for value in self.values
            ),
            num_weights=len(self.model.weights),
            layout=layout,
            has_loss_scaling=any(hasattr(optimizer, "inner_optimizer") for optimizer in self.optimizers),
            num_seeds=len(self.random_states),
            metrics=self._add_metrics(builder),
            num_indices=min((size for size in sizes if isinstance(size, int)), default=None),
            compute_type=internals.compute_type(self.model),
            rate_factors=tuple(factor for _, factor in self._rates),
            averages=self._find_averages(),
            **fields,
        )

    def _find_averages(self) -> tuple[tuple[int, int], ...]:
        places = {id(variable): place for place, variable in enumerate(self.variables)}
        averages: list[tuple[int, int]] = []
        for optimizer in (getattr(optimizer, "inner_optimizer", optimizer) for optimizer in self.optimizers):
            if getattr(optimizer, "use_ema", False):
                columns = internals.trained_variables(optimizer), internals.averages_of_variables(optimizer)
                averages += zip(
                    *([places[id(variable)] for variable in column] for column in columns), strict=True
                )
        return tuple(averages)

    def _add(
        self,
        builder: GraphBuilder,
        names: Sequence[str],
        code: Callable[..., Any],
        arguments: str,
        **specs: Any,
    ) -> Any:
        """Trace `code`, which takes the state, then `arguments`, names separated by spaces.

        `specs`: of further arguments. A spec may be a dict of specs, for a dict of tensors.
        """
        scalars = dict.fromkeys(("rate", "weight", "count"), tf.TensorSpec((), tf.float32))
        batch = dict(zip(("samples", "labels"), self.signature, strict=True))
        specs |= {**scalars, **batch, "seeds": tf.TensorSpec((len(self.random_states), 2), tf.int64)}
        taken = {name: specs[name] for name in arguments.split()}
        state = {
            f"state_{place}": tf.TensorSpec(variable.shape, variable.dtype)
            for place, variable in enumerate(self.variables)
        }
        fields = dict(state)
        for name, spec in taken.items():
            is_dict = isinstance(spec, dict)
            fields |= {f"{name}_{at}": s for at, s in enumerate(spec.values())} if is_dict else {name: spec}

        def call(values: Values, *tensors: Any) -> Any:
            self._values, waiting = values, iter(tensors[len(state) :])
            packed = [
                {name: next(waiting) for name in spec} if isinstance(spec, dict) else next(waiting)
                for spec in taken.values()
            ]
            return code(tensors[: len(state)], *packed)

        return builder.add(names, call, fields)

    def _given(self, state: Sequence[Any], seeds: Any = None, rate: Any = None) -> Any:
        """Return the scope in which variables have the values of the state, random states and rates too."""
        variables, values = [*self.variables], [*state]
        if seeds is not None and self.random_states:
            variables += self.random_states
            values += tf.unstack(seeds)
        if rate is not None:
            variables += self.rates
            values += [rate * factor if factor != 1.0 else rate for _, factor in self._rates]
        return self._values.given(variables, values)

    def _now(self, variable: Any) -> Any:
        return self._values.get(variable.value)

    def _new_state(self) -> list[Any]:
        return [self._now(variable) for variable in self.variables]

    def _add_metrics(self, builder: GraphBuilder) -> tuple[Slice, ...]:
        slices: list[Slice] = []

        def compute(values: Values, states: Any) -> Any:
            self._values, results = values, self.metric_states.results(states)
            slices[:] = (part for part, _ in results)
            return tf.stack([tf.cast(value, tf.float32) for _, value in results])

        if size := self.metric_states.size:
            builder.add((METRICS,), compute, {"states": tf.TensorSpec((size,), tf.float32)})
        return tuple(slices)


class StepCompiler(Compiler):
    """The step of a compiled Keras model."""

    def __init__(
        self, model: Any, recipe: Recipe, example: tuple[Array, Array], *, has_noise: bool = False
    ) -> None:
        """`example`: samples and labels (n, …) as the data has them. N may be 0.

        Raises WorkerError, exit code 2, for a model that ranks cannot train together.
        """
        super().__init__(model, recipe)
        self.optimizer, self.optimizers = model.optimizer, [model.optimizer]
        self.objective = Objective(model, recipe, example, is_per_sample=has_noise)
        self.signature, self.metric_states = self.objective.signature, self.objective.metrics
        self.statistics = Statistics(model)
        self.random_states = find_random_states(model)
        self._rates = [(self.optimizer.learning_rate, 1.0)]
        self.variables = find_variables(model, self.optimizer)
        self._has_noise = has_noise
        self._has_summed = False
        self._unused: set[int] = set()
        """Ids of the variables that the loss does not depend on: as in fit, no weight decay changes them."""

    def trace(self, builder: GraphBuilder) -> StepInfo:
        """See Compiler."""
        (vector,) = self._add(builder, (LOCAL,), self._local, "seeds weight samples labels")
        self._check_writes()
        total = tf.TensorSpec(vector.shape, tf.float32)
        self._add(builder, (APPLY,), self._apply, "rate total", total=total)
        if self._has_noise:
            limits = tf.TensorSpec((None,), tf.float32)
            self._add(builder, (NOISY,), self._noisy, "seeds limits samples labels", limits=limits)
        self._add(builder, (EVALUATE,), self._evaluate, "seeds samples labels")
        return self._describe(builder, self.layout)

    def add_state(self, variables: Sequence[Any]) -> list[Any]:
        """See Compiler. Variables that a forward pass writes are averaged like layers' state."""
        added = super().add_state(variables)
        self.statistics.add(added)
        return added

    @property
    def layout(self) -> VectorLayout:
        """The layout of a rank's vector. Known after `trace`."""
        counts_elements = self.objective.counts_elements
        return VectorLayout(
            num_elements(self.model.trainable_variables),
            sum(self.statistics.sizes),
            self.metric_states.size,
            has_loss_count=self._has_noise or counts_elements,
            divides_gradients=counts_elements and not self._has_noise,
            has_summed=self._has_summed,
        )

    def _check_writes(self) -> None:
        """Raise WorkerError, exit code 2, if a layer writes what is trained: each rank its own."""
        restored = {id(variable) for variable in self.statistics.variables}
        for variable in self.model.trainable_variables:
            if id(variable) in self._written and id(variable) not in restored:
                raise JobError(
                    f"the model's forward pass writes {variable.path}, which the optimizer trains",
                    "use a constraint (kernel_constraint) instead, or create it with trainable=False",
                )

    def _gradients(self, samples: Any, labels: Any) -> tuple[list[list[Any]], BatchLoss]:
        """Return the gradients of all trainable variables, in float32, and the loss.

        First the gradients of the mean loss, not yet times its count: a mean stays within the range of
        float16, where a sum would overflow. Then the gradients of what is summed, if anything is.
        """
        variables = self.model.trainable_variables
        trained = [variable.value for variable in variables]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(trained)
            batch = self.objective.forward(samples, labels, training=True)
            parts = [batch.mean] if batch.summed is None else [batch.mean, batch.summed]
            is_scaling = hasattr(self.optimizer, "inner_optimizer")
            objectives = [self.optimizer.scale_loss(part) for part in parts] if is_scaling else parts
        self._has_summed = batch.summed is not None
        gradients = [tape.gradient(part, trained) for part in objectives]
        columns = zip(variables, *gradients, strict=True)
        self._unused = {id(variable) for variable, *column in columns if all(part is None for part in column)}
        return [zeros_for_none(part, variables) for part in gradients], batch

    def _local(self, state: Any, seeds: Any, weight: Any, samples: Any, labels: Any) -> Any:
        variables = self.model.trainable_variables
        with self._given(state, seeds):
            before = self.statistics.read()
            trained = [self._now(variable) for variable in variables]
            gradients, batch = self._gradients(samples, labels)
            pairs = zip(variables, trained, strict=True)
            self._written = {id(variable) for variable, value in pairs if self._now(variable) is not value}
            changes = self.statistics.changes(before, batch.samples * weight)
            factors = batch.loss_count * weight, weight
            flat = [
                tf.reshape(gradient * factor, [-1])
                for part, factor in zip(gradients, factors, strict=False)
                for gradient in part
            ]
            return tf.concat([*flat, *changes, *self._tail(batch, weight, with_samples=True)], axis=0)

    def _evaluate(self, state: Any, seeds: Any, samples: Any, labels: Any) -> Any:
        with self._given(state, seeds):
            batch = self.objective.forward(samples, labels, training=False)
            return tf.concat(self._tail(batch, tf.ones(()), with_samples=False), axis=0)

    def _apply(self, state: Any, rate: Any, total: Any) -> list[Any]:
        layout = self.layout
        with tf.device(STATE), self._given(state, rate=rate):
            # As in fit, the optimizer steps with a gradient of 0 if nothing has a weight.
            gradient = tf.math.divide_no_nan(total[: layout.num_gradients], total[layout.divisor])
            if layout.has_summed:  # the part of the loss that is not divided
                gradient += total[layout.num_gradients : layout.gradients.stop]
            # First what the forward pass did to the weights, as in fit.
            self.statistics.apply(total[layout.statistics] / total[layout.count])
            self._optimize(unflatten(gradient, self.model.trainable_variables))
            return self._new_state()

    def _optimize(self, gradients: list[Any]) -> None:
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        used = [pair for pair in pairs if id(pair[1]) not in self._unused]
        if used:
            self.optimizer.apply_gradients(used)
        else:  # Keras does not count a step without variables, and rank 0's optimizer has others
            self.optimizer.iterations.assign_add(1)

    def _tail(self, batch: BatchLoss, weight: Any, *, with_samples: bool) -> list[Any]:
        """Return the end of a vector: Σ loss, what is summed, metrics' states, count of the loss (and n)."""
        tail = [batch.mean * batch.loss_count]
        if self._has_summed:  # in evaluation, layers may leave it out
            tail.append(tf.zeros(()) if batch.summed is None else batch.summed)
        tail += batch.states
        if not with_samples or self.layout.has_loss_count:
            tail.append(batch.loss_count)
        if with_samples:
            tail.append(batch.samples)
        return [tf.reshape(part * weight, [-1]) for part in tail]

    def _noisy(self, state: Any, seeds: Any, limits: Any, samples: Any, labels: Any) -> Any:
        """Return the sum of the samples' clipped gradients, flat. One by one, in memory for one gradient.

        The gradient of each sample is clipped to an L2 norm over all trainable variables together, `limits`.
        """
        variables = self.model.trainable_variables
        trained, count = [variable.value for variable in variables], tf.shape(limits)[0]

        def add_sample(number: Any, total: list[Any]) -> tuple[Any, list[Any]]:
            # Each sample draws numbers of its own.
            key = tf.cast(number, tf.int64) * 2654435761
            drawn = (seeds + tf.stack([key, tf.zeros_like(key)])) % (1 << 32)
            with self._given(state, drawn), tf.GradientTape() as tape:
                tape.watch(trained)
                sample = tf.nest.map_structure(lambda array: array[number : number + 1], (samples, labels))
                loss, penalty = self.objective.loss(*sample), self._penalty()
                loss = loss if penalty is None else loss - penalty
            gradients = zeros_for_none(tape.gradient(loss, trained), variables)
            norm = tf.linalg.global_norm(gradients)
            # A gradient that is not finite must not be visible in the sum either: it counts as zero.
            factor = tf.where(tf.math.is_finite(norm), tf.minimum(1.0, limits[number] / norm), 0.0)
            clipped = [tf.math.multiply_no_nan(gradient, factor) for gradient in gradients]
            return number + 1, [so_far + new for so_far, new in zip(total, clipped, strict=True)]

        zeros = [tf.zeros(variable.shape) for variable in variables]
        _, total = tf.while_loop(
            lambda number, _: number < count, add_sample, (tf.constant(0), zeros), parallel_iterations=1
        )
        with self._given(state, seeds), tf.GradientTape() as tape:
            tape.watch(trained)
            penalty = self._penalty()
        if penalty is not None:
            scale, gradients = tf.cast(count, tf.float32), tape.gradient(penalty, trained)
            pairs = zip(total, zeros_for_none(gradients, variables), strict=True)
            total = [gradient + scale * of_penalty for gradient, of_penalty in pairs]
        return tf.concat([tf.reshape(gradient, [-1]) for gradient in total], axis=0)

    def _penalty(self) -> Any:
        """Return the regularization of the weights, which does not depend on samples, or None."""
        # They have the types that their layers compute in.
        penalties = [tf.cast(penalty, tf.float32) for penalty in internals.regularization_losses(self.model)]
        return tf.add_n(penalties) if penalties else None


def num_elements(variables: Iterable[Any]) -> int:
    """Return the number of elements of all variables together."""
    return sum(math.prod(variable.shape) for variable in variables)


def find_variables(model: Any, optimizer: Any) -> list[Any]:
    """Return Keras' variables of the state of a model and its optimizer: all but the learning rate."""
    optimizer.build(model.trainable_variables)
    rate = optimizer.learning_rate
    return [*model.weights, *(variable for variable in optimizer.variables if variable is not rate)]


def zeros_for_none(gradients: Iterable[Any], variables: Sequence[Any]) -> list[Any]:
    """Return dense gradients in float32, with the shapes of the variables."""
    return [
        tf.zeros(variable.shape) if gradient is None else tf.cast(tf.convert_to_tensor(gradient), tf.float32)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
