"""The functions of a step without state, of a model that Keras trains. engine/layout.py has the vector."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import STATE, tf
from csdctl.worker.compute.keras_internals import find_smallest_embedding, regularization_losses
from csdctl.worker.compute.objective import BatchLoss, MetricStates, Objective
from csdctl.worker.compute.precision import compute_type
from csdctl.worker.compute.recipe import make_schedule
from csdctl.worker.compute.statistics import Seeds, Statistics
from csdctl.worker.compute.trace import GraphBuilder, Values, unflatten
from csdctl.worker.data.arrays import Array
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
from csdctl.worker.process.errors import InputError
from csdctl.worker.protocol.recipe import Recipe


class Compiler(ABC):
    """What functions of a step have in common: the state, the batch, and random numbers as arguments."""

    variables: list[Any]
    """The state, as Keras' variables or as tf.Variables."""
    signature: list[Any]
    """The specs of samples and labels."""
    seeds: Seeds
    metric_states: MetricStates

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self._values: Values
        self._rates: list[tuple[Any, float]] = []
        """The learning rates that follow the recipe's, and how many times that they are."""
        self.drawing: dict[str, None] = {}
        """The layers that draw random numbers in a step."""

    @abstractmethod
    def trace(self, builder: GraphBuilder) -> StepInfo:
        """Trace all functions. Raises WorkerError, exit code 2, for a step that ranks cannot take."""

    def add_state(self, variables: Sequence[Any]) -> list[Any]:
        """Let variables that neither model nor optimizer knows be state. Return all but random states."""
        others = [one for one in variables if "seed_generator_state" not in one.path]
        self.seeds.add(one for one in variables if "seed_generator_state" in one.path)
        self.variables += others
        return others

    @property
    def rates(self) -> list[Any]:
        """The learning rates that every step sets, as Keras' variables."""
        return [one for one, _ in self._rates]

    @property
    def values(self) -> list[Array]:
        """The values of all variables now."""
        return [np.asarray(one.value) for one in self.variables]

    def _describe(self, builder: GraphBuilder, **fields: Any) -> StepInfo:
        """Add the functions that every step has. Return the description of the whole."""
        if self.recipe.schedule:
            schedule = make_schedule(self.recipe.schedule)
            builder.add((SCHEDULE,), lambda _, step: schedule(step), {"step": tf.TensorSpec((), tf.int64)})
        trainable = self.model.trainable_variables
        common: dict[str, Any] = {
            "num_gradients": sum(math.prod(one.shape) for one in trainable),
            "has_loss_count": False,
            "divides_gradients": False,
            "has_summed": False,
        }
        return StepInfo(
            functions=builder.functions,
            variables=tuple(
                VariableInfo(tuple(one.shape), np.dtype(one.dtype).name, not one.any()) for one in self.values
            ),
            num_weights=len(self.model.weights),
            seeds=tuple(name for name, _ in self.seeds.generators),
            drawing=tuple(self.drawing),
            metrics=self._add_metrics(builder),
            num_indices=find_smallest_embedding(self.model),
            output_sizes=tuple(int(one.shape[-1] or 0) for one in getattr(self.model, "outputs", None) or ()),
            compute_type=compute_type(self.model),
            rate_factors=tuple(factor for _, factor in self._rates),
            **common | fields,
        )

    def _averages(self, optimizers: Iterable[Any]) -> tuple[tuple[int, int], ...]:
        places = {id(one): place for place, one in enumerate(self.variables)}
        pairs = [
            pair
            for one in (getattr(one, "inner_optimizer", one) for one in optimizers)
            if getattr(one, "use_ema", False)
            for pair in zip(one._trainable_variables, one._model_variables_moving_average, strict=True)
        ]
        return tuple((places[id(trained)], places[id(average)]) for trained, average in pairs)

    def _add(
        self, builder: GraphBuilder, names: Sequence[str], code: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Trace `code`, which takes the state, then `arguments`: dicts of specs by name, SAMPLES, LABELS.

        The tensors of samples and of labels are passed as they are structured in the data.
        """
        specs = dict(zip(BATCH, self.signature, strict=True))
        state = {f"state_{place}": _spec(one) for place, one in enumerate(self.variables)}
        groups = [_fields(one, specs[one]) if isinstance(one, str) else one for one in arguments]

        def call(values: Values, *given: Any) -> Any:
            self._values, rest = values, iter(given[len(state) :])
            passed: list[Any] = []
            for one, group in zip(arguments, groups, strict=True):
                tensors = [next(rest) for _ in group]
                passed += [_pack(specs[one], tensors)] if isinstance(one, str) else tensors
            return code(given[: len(state)], *passed)

        return builder.add(names, call, {k: v for group in (state, *groups) for k, v in group.items()})

    def _given(self, state: Sequence[Any], seeds: Any = None, rate: Any = None) -> Any:
        """Return the scope in which variables have the values of the state, random states and rates too."""
        variables, values = [*self.variables], [*state]
        if seeds is not None and self.seeds.states:
            variables += self.seeds.states
            values += tf.unstack(seeds)
        if rate is not None:
            variables += [one for one, _ in self._rates]
            values += [rate * factor if factor != 1.0 else rate for _, factor in self._rates]
        return self._values.given(variables, values)

    def _note_draws(self, before: Sequence[Any]) -> None:
        for (name, generator), value in zip(self.seeds.generators, before, strict=True):
            if self._now(generator.state) is not value:
                self.drawing[name] = None

    def _now(self, variable: Any) -> Any:
        return self._values.get(variable.value)

    def _new_state(self) -> list[Any]:
        return [self._now(one) for one in self.variables]

    def _add_metrics(self, builder: GraphBuilder) -> tuple[Slice, ...]:
        """Add the function from a summed state of the metrics, shape (size,), to their results."""
        results: list[Slice] = []

        def compute(values: Values, states: Any) -> Any:
            self._values, found = values, self.metric_states.results(states)
            results[:] = (part for part, _ in found)
            return tf.stack([tf.cast(value, tf.float32) for _, value in found])

        if size := self.metric_states.size:
            builder.add((METRICS,), compute, {"states": tf.TensorSpec((size,), tf.float32)})
        return tuple(results)


BATCH = SAMPLES, LABELS = "samples", "labels"
"""The parts of a batch, as arguments of a function."""


class StepCompiler(Compiler):
    """The step of a compiled Keras model."""

    def __init__(
        self, model: Any, recipe: Recipe, example: tuple[Array, Array], *, has_noise: bool = False
    ) -> None:
        """`example`: samples and labels (n, …) as the data has them. N may be 0.

        Raises WorkerError, exit code 2, for a model that ranks cannot train together.
        """
        super().__init__(model, recipe)
        self.optimizer = model.optimizer
        self.objective = Objective(model, recipe, example, is_per_sample=has_noise)
        self.signature, self.metric_states = self.objective.signature, self.objective.metrics
        self.statistics = Statistics(model)
        self.seeds = Seeds(model, recipe.seed)
        self._rates = [(self.optimizer.learning_rate, 1.0)]
        self.variables = find_variables(model, self.optimizer)
        self._has_noise = has_noise
        self._has_summed = False
        self._is_scaling = hasattr(self.optimizer, "inner_optimizer")
        self._unused: set[int] = set()
        """Ids of the variables that the loss does not depend on: as in fit, no weight decay changes them."""

    def trace(self, builder: GraphBuilder) -> StepInfo:
        """As of Compiler."""
        scalar = tf.TensorSpec((), tf.float32)
        seeds = {"seeds": tf.TensorSpec((len(self.seeds.states), 2), tf.int64)}
        (vector,) = self._add(builder, (LOCAL,), self._local, seeds, {"weight": scalar}, *BATCH)
        self._check_writes()
        total = {"total": tf.TensorSpec(vector.shape, tf.float32)}
        self._add(builder, (APPLY,), self._apply, {"rate": scalar}, total)
        if self._has_noise:
            limits = {"limits": tf.TensorSpec((None,), tf.float32)}
            self._add(builder, (NOISY,), self._noisy, seeds, limits, *BATCH)
        self._add(builder, (EVALUATE,), self._evaluate, seeds, *BATCH)
        return self._describe(
            builder,
            num_statistics=sum(self.statistics.sizes),
            num_states=self.metric_states.size,
            has_loss_count=self._has_loss_count,
            divides_gradients=self.objective.counts_elements and not self._has_noise,
            has_summed=self._has_summed,
            has_loss_scaling=self._is_scaling,
            normalizing=self.statistics.normalizing,
            averages=self._averages([self.optimizer]),
        )

    def add_state(self, variables: Sequence[Any]) -> list[Any]:
        """As of Compiler. What a forward pass writes is a mean over all ranks' samples, as of layers."""
        others = super().add_state(variables)
        self.statistics.add(others)
        return others

    @property
    def _has_loss_count(self) -> bool:
        return self._has_noise or self.objective.counts_elements

    def _check_writes(self) -> None:
        """Raise WorkerError, exit code 2, if a layer writes what is trained: each rank its own."""
        restored = {id(one) for one in self.statistics.variables}
        for variable in self.model.trainable_variables:
            if id(variable) in self._written and id(variable) not in restored:
                raise InputError(
                    f"the model's forward pass writes {variable.path}, which the optimizer trains",
                    "use a constraint (kernel_constraint) instead, or create it with trainable=False",
                )

    # --- functions ---

    def _gradients(self, samples: Any, labels: Any) -> tuple[list[Any], list[Any], BatchLoss]:
        """Return the gradients of all trainable variables, in float32, and the loss.

        First those of the mean loss, not yet times its count: a mean stays within the range of float16, where
        a sum would overflow. Then those of what is summed. [] without.
        """
        variables = self.model.trainable_variables
        trained = [one.value for one in variables]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(trained)
            batch = self.objective.forward(samples, labels, training=True)
            parts = [batch.mean] if batch.summed is None else [batch.mean, batch.summed]
            objectives = [self.optimizer.scale_loss(one) if self._is_scaling else one for one in parts]
        self._has_summed = batch.summed is not None
        gradients = [tape.gradient(one, trained) for one in objectives]
        pairs = zip(map(id, variables), *gradients, strict=True)
        self._unused = {key for key, *each in pairs if all(one is None for one in each)}
        means, *summed = (zeros_for_none(part, variables) for part in gradients)
        return means, summed[0] if summed else [], batch

    def _local(self, state: Any, seeds: Any, weight: Any, samples: Any, labels: Any) -> Any:
        with self._given(state, seeds):
            drawn = [self._now(one) for one in self.seeds.states]
            before = self.statistics.read()
            trained = [self._now(one) for one in self.model.trainable_variables]
            means, summed, batch = self._gradients(samples, labels)
            pairs = zip(self.model.trainable_variables, trained, strict=True)
            self._written = {id(one) for one, value in pairs if self._now(one) is not value}
            self._note_draws(drawn)
            changes = self.statistics.changes(before, batch.samples * weight)
            factor = batch.loss_count * weight
            gradients = [*(mean * factor for mean in means), *(one * weight for one in summed)]
            flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
            return tf.concat([*flat, *changes, *self._tail(batch, weight, with_samples=True)], axis=0)

    def _evaluate(self, state: Any, seeds: Any, samples: Any, labels: Any) -> Any:
        with self._given(state, seeds):
            batch = self.objective.forward(samples, labels, training=False)
            return tf.concat(self._tail(batch, tf.ones(()), with_samples=False), axis=0)

    def _apply(self, state: Any, rate: Any, total: Any) -> list[Any]:
        num_gradients = sum(math.prod(one.shape) for one in self.model.trainable_variables)
        place = num_gradients * (1 + self._has_summed)
        divisor = total[-2] if self.objective.counts_elements and not self._has_noise else total[-1]
        with tf.device(STATE), self._given(state, rate=rate):
            # As in fit, the optimizer steps with a gradient of 0 if nothing has a weight.
            gradient = tf.math.divide_no_nan(total[:num_gradients], divisor)
            if self._has_summed:  # the part of the loss that is not divided
                gradient += total[num_gradients:place]
            # First what the forward pass did to the weights, as in fit.
            self.statistics.apply(total[place : place + sum(self.statistics.sizes)] / total[-1])
            self._optimize(unflatten(gradient, self.model.trainable_variables))
            return self._new_state()

    def _optimize(self, gradients: list[Any]) -> None:
        """Take the optimizer step of the model's mean `gradients`."""
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
        if not with_samples or self._has_loss_count:
            tail.append(batch.loss_count)
        return [tf.reshape(one * weight, [-1]) for one in ([*tail, batch.samples] if with_samples else tail)]

    def _noisy(self, state: Any, seeds: Any, limits: Any, samples: Any, labels: Any) -> Any:
        """Return the sum of the samples' clipped gradients, flat. One by one, in memory for one gradient.

        The gradient of each sample is clipped to an L2 norm over all trainable variables together, `limits`.
        """
        variables = self.model.trainable_variables
        trained, count = [one.value for one in variables], tf.shape(limits)[0]

        def add_one(number: Any, total: list[Any]) -> tuple[Any, list[Any]]:
            sample = slice(number, number + 1)
            # Each sample draws numbers of its own.
            key = tf.cast(number, tf.int64) * 2654435761
            drawn = (seeds + tf.stack([key, tf.zeros_like(key)])) % (1 << 32)
            with self._given(state, drawn), tf.GradientTape() as tape:
                tape.watch(trained)
                one = tf.nest.map_structure(lambda array: array[sample], (samples, labels))
                loss, penalty = self.objective.loss(*one), self._penalty()
                loss = loss if penalty is None else loss - penalty
            gradients = zeros_for_none(tape.gradient(loss, trained), variables)
            norm = tf.linalg.global_norm(gradients)
            # A gradient that is not finite must not be visible in the sum either: it counts as zero.
            factor = tf.where(tf.math.is_finite(norm), tf.minimum(1.0, limits[number] / norm), 0.0)
            clipped = [tf.math.multiply_no_nan(gradient, factor) for gradient in gradients]
            return number + 1, [so_far + new for so_far, new in zip(total, clipped, strict=True)]

        zeros = [tf.zeros(variable.shape) for variable in variables]
        _, total = tf.while_loop(
            lambda number, _: number < count, add_one, (tf.constant(0), zeros), parallel_iterations=1
        )
        with self._given(state, seeds), tf.GradientTape() as tape:
            tape.watch(trained)
            penalty = self._penalty()
        if penalty is not None:
            scale, of_penalty = tf.cast(count, tf.float32), tape.gradient(penalty, trained)
            pairs = zip(total, zeros_for_none(of_penalty, variables), strict=True)
            total = [gradient + scale * other for gradient, other in pairs]
        return tf.concat([tf.reshape(gradient, [-1]) for gradient in total], axis=0)

    def _penalty(self) -> Any:
        """Return the regularization of the weights, which does not depend on samples, or None."""
        penalties = regularization_losses(self.model)
        # They have the types that their layers compute in.
        return tf.add_n([tf.cast(one, tf.float32) for one in penalties]) if penalties else None


def find_variables(model: Any, optimizer: Any) -> list[Any]:
    """Return Keras' variables of the state of a model and its optimizer: all but the learning rate."""
    optimizer.build(model.trainable_variables)
    return [*model.weights, *(one for one in optimizer.variables if one is not optimizer.learning_rate)]


def _spec(variable: Any) -> Any:
    return tf.TensorSpec(variable.shape, variable.dtype)


def _fields(name: str, spec: Any) -> dict[str, Any]:
    """Return the specs of the arrays of a batch's part by name."""
    return (
        {f"{name}_{place}": one for place, one in enumerate(spec.values())}
        if isinstance(spec, dict)
        else {name: spec}
    )


def _pack(spec: Any, fields: Sequence[Any]) -> Any:
    return dict(zip(spec, fields, strict=True)) if isinstance(spec, dict) else fields[0]


def zeros_for_none(gradients: Iterable[Any], variables: Sequence[Any]) -> list[Any]:
    """Return dense gradients in float32, with the shapes of the variables."""
    return [
        tf.zeros(variable.shape) if one is None else tf.cast(tf.convert_to_tensor(one), tf.float32)
        for one, variable in zip(gradients, variables, strict=True)
    ]
