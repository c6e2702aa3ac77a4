"""Compiles the step of a model: functions without state, and what a rank must know to run them."""

import math
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import STATE, keras, load_backend, tf
from csdctl.worker.compute.custom_step import CustomStep, has_own_step
from csdctl.worker.compute.keras_internals import (
    find_smallest_embedding,
    flatten_layers,
    own_state,
    regularization_losses,
)
from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import BatchLoss, Objective
from csdctl.worker.compute.recipe import make_schedule
from csdctl.worker.compute.statistics import Seeds, pooled_spread
from csdctl.worker.compute.trace import (
    CannotCompileError,
    GraphBuilder,
    PythonSession,
    assigning_in_scope,
    in_scope,
    unflatten,
)
from csdctl.worker.compute.user_code import load_augmentation
from csdctl.worker.data.arrays import Array, random_batch, save_arrays
from csdctl.worker.engine.keras_file import WEIGHTS, find_places
from csdctl.worker.engine.step import (
    APPLY,
    EVALUATE,
    LOCAL,
    METRICS,
    NOISY,
    SCHEDULE,
    FunctionInfo,
    Slice,
    StepEngine,
    StepInfo,
    VariableInfo,
)
from csdctl.worker.process.errors import InputError
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import Compiled, CompileRequest
from csdctl.worker.protocol.recipe import Noise, Recipe


class Statistics:
    """The state of layers that a forward pass changes, flat: moving statistics, then that of other layers.

    State travels with the gradient, so that after every step each rank has that of the pooled batch
    (docs/explanation/exact-gradients.md). For the moving statistics of batch norm:

        μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

    Ranks exchange Δ_k = (1 − m)(μ_k − moving mean), with m the layer's momentum: sums of small differences
    keep their precision, sums of squares would lose it. Of any other layer they exchange the change itself:
    the mean over all samples is exact for moving averages of batch means, and for state that does not depend
    on samples.
    """

    def __init__(self, model: Any) -> None:
        self.norms = [
            (layer.name, layer.moving_mean, layer.moving_variance, 1.0 - float(layer.momentum))
            for layer in flatten_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.momentum < 1
        ]
        self._others = changing_state(model)
        self.variables = [one for _, *pair, _ in self.norms for one in pair] + self._others
        """Keras' variables."""
        self.sizes = [math.prod(one.shape) for one in self.variables]

    @property
    def normalizing(self) -> tuple[Slice, ...]:
        """The layers that normalize by their batch, and where their changes are."""
        ends = np.cumsum([0, *self.sizes])[: 2 * len(self.norms) + 1]
        pairs = zip(ends[:-1:2], ends[2::2], strict=True)
        return tuple(
            Slice(name, int(start), int(stop))
            for (name, *_), (start, stop) in zip(self.norms, pairs, strict=True)
        )

    def changes(self, before: Sequence[Any], weight: Any) -> list[Any]:
        """Return the changes since `before`, times `weight`, flat; inside a scope."""
        changes, old = [], iter(before)
        for _, mean, variance, rate in self.norms:
            moved = pooled_spread(mean.value - next(old), variance.value - next(old), rate)
            changes += [weight * one for one in moved]
        for variable, value in zip(self._others, old, strict=True):
            change = tf.cast(variable.value - value, tf.float32)
            changes.append(tf.reshape(change * weight, [-1]))
        return changes

    def apply(self, changes: Any) -> None:
        """Update the state by the mean `changes` of all ranks, shape (Σ sizes,); inside a scope."""
        parts = iter(tf.split(changes, self.sizes) if self.variables else ())
        for _, mean, variance, rate in self.norms:
            moved, spread = next(parts), next(parts)
            mean.assign(mean.value + tf.cast(moved, mean.dtype))
            spread = tf.cast(spread - moved * moved / rate, variance.dtype)
            variance.assign(tf.maximum(variance.value + spread, 0.0))
        for variable, change in zip(self._others, parts, strict=True):
            is_counter = "float" not in variable.dtype  # which all ranks advance alike
            shaped = tf.reshape(tf.round(change) if is_counter else change, variable.shape)
            variable.assign(variable.value + tf.cast(shaped, variable.dtype))


def changing_state(model: Any) -> list[Any]:
    """Return the state of layers other than batch norm, as Keras' variables.

    Layers do not declare what changes it: only the constants of Keras' own preprocessing are left out. A
    SpectralNormalization writes the kernel that it wraps.
    """
    layers = keras.layers
    constant = (layers.Normalization, layers.BatchNormalization)
    found: dict[int, Any] = {}
    for layer in flatten_layers(model):
        state = [] if isinstance(layer, constant) else own_state(layer)
        if isinstance(layer, layers.SpectralNormalization):
            state.append(layer.kernel)
        found |= {id(one): one for one in state if "float" in one.dtype or "int" in one.dtype}
    return list(found.values())


def find_variables(model: Any) -> list[Any]:
    """Return Keras' variables of the state of a compiled model: all but the learning rate."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    return [*model.weights, *(one for one in optimizer.variables if one is not optimizer.learning_rate)]


class StepCompiler:
    """The functions of the step of a compiled Keras model; engine/layout.py has the vector."""

    def __init__(
        self, model: Any, recipe: Recipe, example: tuple[Array, Array], *, has_noise: bool = False
    ) -> None:
        """`example`: samples and labels (n, …) as the data has them; n may be 0.

        Raises WorkerError, exit code 2, for a model that ranks cannot train together.
        """
        self.model, self.optimizer = model, model.optimizer
        self.objective = Objective(model, recipe, example, is_per_sample=has_noise)
        self.optimizer.build(model.trainable_variables)  # of which compute_loss may have created some
        self.statistics = Statistics(model)
        self._seeds = Seeds(model, recipe.seed, 0)
        self._rate = self.optimizer.learning_rate
        self.variables = find_variables(model)
        """The state, as Keras' variables."""
        self._has_noise, self._schedule = has_noise, recipe.schedule
        self._has_summed = False
        self._is_scaling = hasattr(self.optimizer, "inner_optimizer")
        self._unused: set[int] = set()
        """Ids of the variables that the loss does not depend on: as in fit, no weight decay changes them."""

    def trace(self, builder: GraphBuilder) -> StepInfo:
        """Trace all functions; raises WorkerError, exit code 2, for a step that ranks cannot take."""
        count = len(self.variables)
        state = {f"state_{place}": _spec(one) for place, one in enumerate(self.variables)}
        number, scalar = len(self._seeds.states), tf.TensorSpec((), tf.float32)
        seeds, rate = {"seeds": tf.TensorSpec((number, 2), tf.int64)}, {"rate": scalar}
        samples, labels = self.objective.signature
        batch = _fields("samples", samples) | _fields("labels", labels)
        num_fields = len(_fields("samples", samples))

        def add(name: str, code: Callable[..., Any], *arguments: Mapping[str, Any]) -> Any:
            """Trace `code`, which takes the state, then `arguments`; the batch comes last."""
            named = {key: value for one in (state, *arguments) for key, value in one.items()}
            num_batch = len(batch) if batch.keys() <= named.keys() else 0

            def call(*given: Any) -> Any:
                if not num_batch:
                    return code(given[:count], *given[count:])
                fields = given[-num_batch:]
                parts = _pack(samples, fields[:num_fields]), _pack(labels, fields[num_fields:])
                return code(given[:count], *given[count:-num_batch], *parts)

            return builder.add(name, call, named)

        local = add(LOCAL, self._local, seeds, {"weight": scalar}, batch)
        self._check_writes()
        total = {"total": tf.TensorSpec(local.outputs[0].shape, tf.float32)}
        add(APPLY, self._apply, rate, total)
        if self._has_noise:
            add(NOISY, self._noisy, seeds, {"limits": tf.TensorSpec((None,), tf.float32)}, batch)
        add(EVALUATE, self._evaluate, batch)
        names: list[str] = []
        if size := self.objective.metrics.size:
            found = builder.add(METRICS, self._metrics(names), {"states": tf.TensorSpec((size,), tf.float32)})
            assert len(names) == found.outputs[0].shape[0]
        if self._schedule:
            schedule = make_schedule(self._schedule)
            builder.add(SCHEDULE, schedule, {"step": tf.TensorSpec((), tf.int64)})
        trainable = self.model.trainable_variables
        return StepInfo(
            {name: FunctionInfo(*map(tuple, parts)) for name, parts in builder.functions.items()},
            tuple(
                VariableInfo(tuple(one.shape), np.dtype(one.dtype).name, not one.any()) for one in self.values
            ),
            num_weights=len(self.model.weights),
            num_trainable=len(trainable),
            num_gradients=sum(math.prod(one.shape) for one in trainable),
            num_statistics=sum(self.statistics.sizes),
            num_states=size,
            has_loss_count=self._has_loss_count,
            divides_gradients=self.objective.counts_elements and not self._has_noise,
            has_summed=self._has_summed,
            has_loss_scaling=self._is_scaling,
            seeds=tuple(name for name, _ in self._seeds.generators),
            normalizing=self.statistics.normalizing,
            metrics=tuple(names),
            averages=self._averages(),
            num_indices=find_smallest_embedding(self.model),
        )

    @property
    def values(self) -> list[Array]:
        """The values of all variables now."""
        return [np.asarray(one.value) for one in self.variables]

    @property
    def _has_loss_count(self) -> bool:
        return self._has_noise or self.objective.counts_elements

    def _averages(self) -> tuple[tuple[int, int], ...]:
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if not getattr(optimizer, "use_ema", False):
            return ()
        places = {id(one): place for place, one in enumerate(self.variables)}
        pairs = zip(self.model.trainable_variables, optimizer._model_variables_moving_average, strict=True)
        return tuple((places[id(one)], places[id(average)]) for one, average in pairs)

    def _scope(self, state: Sequence[Any], seeds: Any = None, rate: Any = None) -> Any:
        """Return the scope of the state, the random states and the learning rate."""
        variables, values = [*self.variables], [*state]
        if seeds is not None and self._seeds.states:
            drawn = zip(self._seeds.states, tf.unstack(seeds), strict=True)
            values += [tf.cast(value, one.dtype) for one, value in drawn]
            variables += self._seeds.states
        if rate is not None:
            variables.append(self._rate)
            values.append(tf.cast(rate, self._rate.dtype))
        return in_scope(variables, values)

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
        a sum would overflow. Then those of what is summed; [] without.
        """
        variables = self.model.trainable_variables
        values = [one.value for one in variables]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(values)
            batch = self.objective.forward(samples, labels, training=True)
            parts = [batch.mean] if batch.summed is None else [batch.mean, batch.summed]
            objectives = [self.optimizer.scale_loss(one) if self._is_scaling else one for one in parts]
        self._has_summed = batch.summed is not None
        gradients = [tape.gradient(one, values) for one in objectives]
        found = zip(map(id, variables), *gradients, strict=True)
        self._unused = {key for key, *each in found if all(one is None for one in each)}
        means, *summed = (
            [
                tf.zeros(one.shape) if gradient is None else tf.cast(gradient, tf.float32)
                for gradient, one in zip(map(_dense, part), variables, strict=True)
            ]
            for part in gradients
        )
        return means, summed[0] if summed else [], batch

    def _local(self, state: Any, seeds: Any, weight: Any, samples: Any, labels: Any) -> Any:
        with self._scope(state, seeds) as scope:
            before = [one.value for one in self.statistics.variables]
            trained = [one.value for one in self.model.trainable_variables]
            means, summed, batch = self._gradients(samples, labels)
            pairs = zip(self.model.trainable_variables, trained, strict=True)
            self._written = {id(one) for one, value in pairs if scope.get_current_value(one) is not value}
            changes = self.statistics.changes(before, batch.samples * weight)
            factor = batch.loss_count * weight
            gradients = [*(mean * factor for mean in means), *(one * weight for one in summed)]
            flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
            return tf.concat([*flat, *changes, *self._tail(batch, weight, with_samples=True)], axis=0)

    def _evaluate(self, state: Any, samples: Any, labels: Any) -> Any:
        with self._scope(state):
            batch = self.objective.forward(samples, labels, training=False)
            return tf.concat(self._tail(batch, tf.ones(()), with_samples=False), axis=0)

    def _apply(self, state: Any, rate: Any, total: Any) -> list[Any]:
        num_gradients = sum(math.prod(one.shape) for one in self.model.trainable_variables)
        place = num_gradients * (1 + self._has_summed)
        divisor = total[-2] if self.objective.counts_elements and not self._has_noise else total[-1]
        with tf.device(STATE), self._scope(state, rate=rate) as scope:
            # As in fit, the optimizer steps with a gradient of 0 if nothing has a weight.
            gradient = tf.math.divide_no_nan(total[:num_gradients], divisor)
            if self._has_summed:  # the part of the loss that is not divided
                gradient += total[num_gradients:place]
            # First what the forward pass did to the weights, as in fit.
            self.statistics.apply(total[place : place + sum(self.statistics.sizes)] / total[-1])
            self._optimize(unflatten(gradient, self.model.trainable_variables))
            return [scope.get_current_value(one) for one in self.variables]

    def _optimize(self, gradients: list[Any]) -> None:
        """Take the optimizer step of the model's mean `gradients`; inside a scope."""
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        used = [pair for pair in pairs if id(pair[1]) not in self._unused]
        if used:
            with assigning_in_scope():
                self.optimizer.apply_gradients(used)
        else:  # Keras does not count a step without variables, and rank 0's optimizer has others
            self.optimizer.iterations.assign(self.optimizer.iterations + 1)

    def _tail(self, batch: BatchLoss, weight: Any, *, with_samples: bool) -> list[Any]:
        """Return the end of a vector: Σ loss, what is summed, metrics' states, count of the loss (and n)."""
        tail = [batch.mean * batch.loss_count]
        if self._has_summed:  # in evaluation, layers may leave it out
            tail.append(tf.zeros(()) if batch.summed is None else batch.summed)
        tail += batch.states
        if not with_samples or self._has_loss_count:
            tail.append(batch.loss_count)
        return [tf.reshape(one * weight, [-1]) for one in ([*tail, batch.samples] if with_samples else tail)]

    def _metrics(self, names: list[str]) -> Callable[[Any], Any]:
        """Return the function from a summed state to the results; it adds their names to `names`."""

        def compute(states: Any) -> Any:
            found = self.objective.metrics.results(states)
            names[:] = found
            return tf.stack([tf.cast(value, tf.float32) for value in found.values()])

        return compute

    def _noisy(self, state: Any, seeds: Any, limits: Any, samples: Any, labels: Any) -> Any:
        """Return the sum of the samples' clipped gradients, flat; one by one, in memory for one gradient.

        The gradient of each sample is clipped to an L2 norm over all trainable variables together, `limits`.
        """
        with self._scope(state, seeds):
            variables = self.model.trainable_variables
            values, count = [one.value for one in variables], tf.shape(limits)[0]

            def add_one(number: Any, total: list[Any]) -> tuple[Any, list[Any]]:
                sample = slice(number, number + 1)
                # Each sample draws numbers of its own.
                key = tf.cast(number, tf.int64) * 2654435761
                drawn = (seeds + tf.stack([key, tf.zeros_like(key)])) % (1 << 32)
                with self._scope(state, drawn), tf.GradientTape() as tape:
                    tape.watch(values)
                    one = tf.nest.map_structure(lambda array: array[sample], (samples, labels))
                    loss, penalty = self.objective.loss(*one), self._penalty()
                    loss = loss if penalty is None else loss - penalty
                gradients = _zeros_for_none(tape.gradient(loss, values), values)
                norm = tf.linalg.global_norm(gradients)
                # A gradient that is not finite must not be visible in the sum either: it counts as zero.
                factor = tf.where(tf.math.is_finite(norm), tf.minimum(1.0, limits[number] / norm), 0.0)
                clipped = [tf.math.multiply_no_nan(gradient, factor) for gradient in gradients]
                return number + 1, [so_far + new for so_far, new in zip(total, clipped, strict=True)]

            zeros = [tf.zeros(variable.shape) for variable in variables]
            _, total = tf.while_loop(
                lambda number, _: number < count, add_one, (tf.constant(0), zeros), parallel_iterations=1
            )
            with tf.GradientTape() as tape:
                tape.watch(values)
                penalty = self._penalty()
            if penalty is not None:
                scale, of_penalty = tf.cast(count, tf.float32), tape.gradient(penalty, values)
                pairs = zip(total, _zeros_for_none(of_penalty, values), strict=True)
                total = [gradient + scale * other for gradient, other in pairs]
            return tf.concat([tf.reshape(gradient, [-1]) for gradient in total], axis=0)

    def _penalty(self) -> Any:
        """Return the regularization of the weights, which does not depend on samples, or None."""
        penalties = regularization_losses(self.model)
        # They have the types that their layers compute in.
        return tf.add_n([tf.cast(one, tf.float32) for one in penalties]) if penalties else None


GRAPH, INFO, STATE_FILE = "graph.pb", "info.json", "state.npz"
"""The files of a compiled step."""


def compile_step(request: CompileRequest) -> Compiled:
    """Compile a step, and write it to the request's `output`; raises WorkerError if ranks cannot take it."""
    load_backend()
    model = load(Path(request.architecture), Path(request.weights), request.code)
    if has_own_step(model):
        return Compiled(f"{type(model).__name__} has its own train_step")
    example = random_batch(np.random.default_rng(0), request.data, 0)
    output, builder = Path(request.output), GraphBuilder()
    compiler = StepCompiler(model, request.recipe, example, has_noise=request.has_noise)
    try:
        info = compiler.trace(builder)
        (output / GRAPH).write_bytes(builder.optimize())
    except CannotCompileError as error:
        return Compiled(error.message)
    kept = (value for value, one in zip(compiler.values, info.variables, strict=True) if not one.is_zero)
    save_arrays(output / STATE_FILE, {f"v{place:05d}": value for place, value in enumerate(kept)})
    info = replace(info, places=write_template(model, output))
    (output / INFO).write_text(to_json(info))
    return Compiled()


class Step(StepEngine):
    """A step that Python's TensorFlow computes, of a model in this process."""

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

        The others as of StepEngine.
        """
        builder = GraphBuilder()
        self.compiler = StepCompiler(model, recipe, example, has_noise=noise is not None)
        info = self.compiler.trace(builder)
        super().__init__(
            info,
            PythonSession(builder),
            self.compiler.values,
            recipe.seed,
            rank=rank,
            micro_batch_size=micro_batch_size,
            weight=weight,
            noise=noise,
            augmentation=load_augmentation(recipe.augment, recipe.seed, None),
        )
        self.rate = np.array(float(model.optimizer.learning_rate), np.float32)

    @property
    def model(self) -> Any:
        """The model, with the weights of this step and the state of its optimizer."""
        for variable, value in zip(self.compiler.variables, self.values, strict=True):
            variable.assign(value)
        return self.compiler.model


AnyStep = StepEngine | CustomStep


def make_step(
    model: Any,
    recipe: Recipe,
    example: tuple[Array, Array],
    *,
    rank: int = 0,
    weight: float = 1.0,
    noise: Noise | None = None,
) -> AnyStep:
    """Return the step of a model in this process, which may have a train_step of its own; see `Step`."""
    if not has_own_step(model):
        return Step(model, recipe, example, rank=rank, weight=weight, noise=noise)
    if noise:
        raise InputError(
            f"{type(model).__name__} has its own train_step: csdctl cannot clip the gradient of each sample",
            "train without data.private.noise",
        )
    return CustomStep(model, recipe, example, rank=rank, weight=weight)


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


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _zeros_for_none(gradients: Iterable[Any], values: Sequence[Any]) -> list[Any]:
    return [
        tf.zeros(value.shape) if one is None else tf.cast(tf.convert_to_tensor(one), tf.float32)
        for one, value in zip(gradients, values, strict=True)
    ]


def write_template(model: Any, output: Path, seed: int = 0) -> dict[str, tuple[str, ...]]:
    """Write a file of Keras for `model`, whose weights then change; return where it has the variables.

    They are numbered as by `find_variables`; the learning rate comes last. {} if the file does not have all
    of them as they are. The file is .keras, or .weights.h5 for a model that Keras cannot save.
    """
    variables = [*find_variables(model), model.optimizer.learning_rate]
    path = output / "template.keras"
    try:
        model.save(path)
    except Exception:  # of the user's classes
        path.unlink(missing_ok=True)
        path = output / "template.weights.h5"
        model.built = True
        model.save_weights(path)
    generator = np.random.default_rng(seed)
    for variable in variables:
        kind = np.dtype(variable.dtype).kind
        if kind in "iub":
            highest = 1 if kind == "b" else np.iinfo(variable.dtype).max
            mark = generator.integers(0, highest, variable.shape, endpoint=True, dtype=np.uint64)
        else:
            mark = generator.standard_normal(variable.shape)
        variable.assign(tf.cast(mark, variable.dtype))
    marked = output / f"marked{''.join(path.suffixes)}"
    (model.save if path.suffix == ".keras" else model.save_weights)(marked)
    if path.suffix == ".keras":
        with zipfile.ZipFile(marked) as archive:
            content = archive.read(WEIGHTS)
    else:
        content = marked.read_bytes()
    marked.unlink()
    return find_places(content, [np.asarray(variable.value) for variable in variables])
