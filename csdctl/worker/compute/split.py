"""A model cut in two: each rank computes the prefix of its samples, rank 0 the head of all ranks' samples.

Forward and backward pass go through the cut: a rank sends the prefix's output for a micro-batch and gets back
the gradient of the loss with respect to it (deep partitioned training). Gradients are summed as in step.py: a
rank's vector has the gradient of the prefix, and rank 0 keeps that of the head. The whole is the gradient
that ranks with whole models would sum, of the same micro-batches. `time_parts` times the parts, to choose
between strategies.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import STATE, load_backend, tf
from csdctl.worker.compute.cuts import Cut, find_cuts, split_at
from csdctl.worker.compute.forward import feature_pass
from csdctl.worker.compute.keras_internals import compile_arguments, find_smallest_embedding
from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import Objective, as_tensors, inputs_of
from csdctl.worker.compute.statistics import LayerStates, Snapshot
from csdctl.worker.compute.step import RankStep, Step, unflatten
from csdctl.worker.data.arrays import Array, random_batch
from csdctl.worker.process.errors import InputError, WorkerError
from csdctl.worker.protocol.probe import CutTimes, PartsSpec, PartTimes
from csdctl.worker.protocol.recipe import Recipe

MIN_MICRO_BATCH = 8
"""Samples of a micro-batch, if a batch has as many: in fewer, what weights alone cost dominates the head."""


def find_cut(model: Any, layer: str) -> Cut:
    """Return the cut behind `layer`; raises WorkerError, exit code 2, naming those that there are."""
    cuts = find_cuts(model)
    for cut in cuts:
        if cut.layer == layer:
            return cut
    names = ", ".join(cut.layer for cut in cuts) or "none: it is not a functional model"
    raise InputError(
        f"{model.name} cannot be cut after {layer!r}; its cuts: {names}", "name one of them (--cut)"
    )


def split_error(problem: str, instead: str = "") -> WorkerError:
    """Return the error of a model that cannot be split, such as one whose optimizer needs all gradients."""
    return InputError(
        f"a model whose {problem} cannot be split", f"{instead}train with --strategy data-parallel"
    )


def micro_batch_sizes(num_samples: int, num_parts: int, limit: int | None = None) -> list[int]:
    """Return the sizes of the micro-batches of a batch: at most `num_parts`, or more if `limit` asks for it.

    All but the last are of one size, so that `Step` with this micro-batch size computes the same.
    """
    if not num_samples:
        return []
    size = micro_batch_size(num_samples, num_parts, limit)
    return [min(size, num_samples - start) for start in range(0, num_samples, size)]


def micro_batch_size(num_samples: int, num_parts: int, limit: int | None = None) -> int:
    """Return the size of all micro-batches but the last."""
    return min(max(MIN_MICRO_BATCH, math.ceil(num_samples / num_parts)), limit or num_samples)


class PrefixStep(RankStep):
    """The prefix on one rank: its part of the vector, and the step of an optimizer for the prefix alone."""

    def __init__(
        self,
        model: Any,
        layer: str,
        recipe: Recipe,
        example: tuple[Array, Array],
        *,
        rank: int = 0,
        weight: float = 1.0,
        objective: Objective | None = None,
    ) -> None:
        """`model`: whole and compiled; it is cut behind `layer`. `example` and `weight` as for `Step`.

        `objective`: that of the whole model, if there is one.
        """
        if hasattr(model.optimizer, "inner_optimizer"):
            raise split_error("optimizer scales the loss (mixed_float16)", "use mixed_bfloat16, or ")
        if getattr(model.optimizer, "global_clipnorm", None):
            problem = "optimizer clips by the norm of the whole gradient"
            raise split_error(problem, "clip each variable's gradient (clipnorm), or ")
        super().__init__(model, recipe, rank)
        self.whole_model = model
        self.cut = find_cut(model, layer)
        self.model, head = split_at(self.cut)
        self.optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        self.optimizer.build(self.model.trainable_variables)
        self.objective = objective or Objective(model, recipe, example)
        self.states = LayerStates(self.model)
        self.weight = weight
        self._input_range = recipe.input_range
        self._head = head
        self._head_variables = head.trainable_variables
        self._has_loss_count = self.objective.counts_elements
        self.activation_type = np.dtype(tf.as_dtype(self.cut.tensor.dtype).as_numpy_dtype)
        self.layout = self._lay_out()
        samples, _ = self.objective.signature
        self._forward = tf.function(self._forward_graph, autograph=False, input_signature=[samples])
        self._flatten = tf.function(flatten, autograph=False)
        self._passes: list[tuple[Any, Any, Any, Any, int]] = []

    def forward(self, samples: Array) -> Array:
        """Return the prefix's output for a micro-batch, whose backward pass is to come."""
        with tf.GradientTape() as tape:
            output, penalty, changes = self._forward(as_tensors(samples))
        self._passes.append((tape, output, penalty, changes, len(samples)))
        return np.asarray(output)

    def backward(self, gradient: Array, loss_count: float, out: Array) -> None:
        """Add the vector of the earliest micro-batch to `out`, shape (layout.step_size,), float32.

        `gradient`: of its loss, times `loss_count`, the number that Keras divides it by, with respect to the
        prefix's output.
        """
        layout = self.layout
        tape, output, penalty, changes, count = self._passes.pop(0)
        variables = [variable.value for variable in self.model.trainable_variables]
        if variables:
            towards = [tf.cast(gradient, output.dtype), tf.constant(loss_count, tf.float32)]
            zero = tf.UnconnectedGradients.ZERO
            gradients = tape.gradient(
                [output, penalty], variables, output_gradients=towards, unconnected_gradients=zero
            )
            out[layout.gradients] += np.asarray(self._flatten(gradients)) * self.weight
        out[layout.statistics] += np.asarray(changes) * self.weight
        out[layout.sums.start] += float(penalty) * loss_count * self.weight
        out[layout.count] += count * self.weight

    def forget(self) -> None:
        """Drop forward passes whose backward pass does not come."""
        self._passes = []

    def _forward_graph(self, samples: Any) -> tuple[Any, Any, Any]:
        """Return output, penalties and changes of the layers' state times the number of samples."""
        before = self.states.read()
        output = self.model(inputs_of(self.model, samples, self._input_range), training=True)
        penalties = [tf.zeros(())]
        for loss in self.model.losses:
            if len(loss.shape) > 0 and loss.shape[0] is None:
                raise split_error("layers add a loss for each sample")
            penalties.append(tf.reduce_sum(tf.cast(loss, tf.float32)))
        count = tf.cast(tf.shape(output)[0], tf.float32)
        changes = self.states.take_changes(before, count)
        return output, tf.add_n(penalties), tf.concat([tf.zeros((0,)), *changes], axis=0)


def flatten(gradients: Sequence[Any]) -> Any:
    """Return gradients as one vector, float32; inside a graph."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(one), tf.float32), [-1]) for one in gradients]
    return tf.concat([tf.zeros((0,)), *flat], axis=0)


class SplitStep(PrefixStep):
    """Prefix and head on rank 0, which takes the step of the whole model."""

    def __init__(
        self, whole: Step, layer: str, recipe: Recipe, example: tuple[Array, Array], *, weight: float = 1.0
    ) -> None:
        """`whole`: the step of the whole model, for evaluation and for steps without other ranks."""
        super().__init__(*(whole.model, layer, recipe, example), weight=weight, objective=whole.objective)
        self.whole = whole
        self.seeds = whole.seeds  # the training loop sets the step of `whole`
        model = whole.model
        self._own_optimizer, self.optimizer = self.optimizer, whole.optimizer
        self._head.compile(**compile_arguments(model))
        outputs = np.zeros((0, *self.cut.tensor.shape[1:]), self.activation_type)
        self._head_objective = Objective(self._head, recipe, (outputs, example[1]))
        self._head_states = LayerStates(self._head)
        # Summed where they are: a vector of all gradients for each micro-batch costs as much as the head.
        self._gradients = [tf.Variable(tf.zeros(one.shape), trainable=False) for one in self._head_variables]
        self._sums_of_head = tf.Variable(
            tf.zeros(self._head_states.size + self.layout.num_sums), trainable=False
        )
        signature = [*self._head_objective.signature, tf.TensorSpec((), tf.float32)]
        self._head_graph = tf.function(self._head_pass, autograph=False, input_signature=signature)
        self._drawn: dict[int, Snapshot] = {}

    def begin(self) -> None:
        """Begin a step: nothing is summed yet, and no rank has drawn random numbers."""
        for variable in (*self._gradients, self._sums_of_head):
            variable.assign(tf.zeros_like(variable))
        self._drawn = {}

    def as_rank(self, rank: int, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns with the random states of `rank`, which go on where it left them."""
        step, _ = self.seeds.position
        if rank in self._drawn:
            self._drawn[rank].restore()
        else:
            self.seeds.set_step(step, rank)
        found = compute()
        self._drawn[rank] = Snapshot(self.seeds.states)
        return found

    def head(self, outputs: Array, labels: Array, weight: float) -> tuple[Array, float]:
        """Add the vector of a micro-batch to that of the head.

        Returns the gradient of its loss with respect to the prefix's `outputs`, times the number that Keras
        divides it by, and that number. `weight`: of each of its samples.
        """
        batch = map(as_tensors, (outputs, labels))
        gradient, loss_count = self._head_graph(*batch, tf.constant(weight, tf.float32))
        return np.asarray(gradient), float(loss_count)

    def add_sums_to(self, out: Array) -> None:
        """Add loss, metrics and the count of the loss of all ranks' samples to rank 0's vector."""
        layout = self.layout
        out[layout.sums.start : layout.count] += self._sums_of_head.numpy()[-layout.num_sums : -1]

    def vector(self, total: Array) -> Array:
        """Return the vector of the whole model, shape (whole.layout.step_size,), that a sum amounts to."""
        whole, layout = self.whole, self.layout
        sums = unflatten(total[layout.gradients], self.model.trainable_variables)
        flat = [np.reshape(one, -1) for one in self._join(sums, self._gradients)]
        of_head = self._head_states.split(self._sums_of_head.numpy()[: self._head_states.size])
        statistics = whole.states.join(self.states.split(total[layout.statistics]), of_head)
        return np.concatenate([*flat, statistics, total[layout.sums.start : layout.step_size]])

    @property
    def state(self) -> list[Any]:
        """Weights and optimizer state of the whole model."""
        return self.whole.state

    def prefix_state(self) -> list[Any]:
        """Return the variables of the whole model's state that the other ranks have, in their order.

        Raises WorkerError, exit code 2, for an optimizer whose variables cannot be told apart.
        """
        own = {variable.path: variable for variable in self.optimizer.variables}
        paths = [variable.path for variable in self._own_optimizer.variables]
        missing = [path for path in paths if path not in own]
        if missing or len(own) != len(self.optimizer.variables):
            raise split_error(
                f"optimizer has no variable {missing[:3]} for each weight",
                "give all layers different names, or ",
            )
        return [*self.model.weights, *(own[path] for path in paths)]

    def _join(self, of_prefix: Sequence[Any], of_head: Sequence[Any]) -> list[Any]:
        """Return the gradients of the whole model's variables, in its order, from those of its parts."""
        variables = (*self.model.trainable_variables, *self._head_variables)
        found = dict(zip(map(id, variables), (*of_prefix, *of_head), strict=True))
        return [found[id(variable)] for variable in self.whole.model.trainable_variables]

    def _head_pass(self, outputs: Any, labels: Any, weight: Any) -> tuple[Any, Any]:
        before = self._head_states.read()
        variables = self._head_variables
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            batch = self._head_objective.forward(outputs, labels, training=True)
        if batch.summed is not None:
            raise split_error("layers add a loss for each sample")
        towards, *gradients = tape.gradient(batch.mean, [outputs, *(v.value for v in variables)])
        if towards is None:
            towards = tf.zeros_like(outputs)
        changes = self._head_states.take_changes(before, batch.samples)
        tail = [*changes, *self._tail(batch, with_samples=True)]
        self._sums_of_head.assign_add(tf.concat(tail, axis=0) * weight)
        for summed, gradient in zip(self._gradients, gradients, strict=True):
            if gradient is not None:
                one = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                summed.assign_add(one * (batch.loss_count * weight))
        return towards * tf.cast(batch.loss_count, towards.dtype), batch.loss_count

    def _optimize(self, gradients: list[Any], total: Any) -> None:
        layout = self.layout
        statistics = self._sums_of_head[: self._head_states.size]
        self._head_states.apply_changes(statistics / total[layout.count])
        of_head = [tf.math.divide_no_nan(summed, total[layout.divisor]) for summed in self._gradients]
        self.optimizer.apply(self._join(gradients, of_head), self.whole.model.trainable_variables)


def time_parts(spec: PartsSpec, **_: Any) -> PartTimes:
    """Return the seconds of a batch of the whole model and of its parts; raises WorkerError."""
    load_backend(spec.runtime)
    with tf.device(STATE):
        model = load(Path(spec.architecture), Path(spec.weights), spec.code)
        generator, num_indices = np.random.default_rng(0), find_smallest_embedding(model)
        batch = random_batch(generator, spec.data, spec.batch_size, num_indices)
        example = (batch[0][:1], batch[1][:1])
        step = Step(model, spec.recipe, example)
    step.set_step(0, 0.0)
    features = feature_pass(spec.prefix, spec.runtime) if spec.prefix else None
    duration_s = spec.min_duration_s
    cuts, why_not = [], ""
    for layer in spec.cuts:
        try:
            cuts.append(_time_cut(step, layer, spec, batch))
        except WorkerError as error:  # an optimizer or a loss that needs the whole model in one place
            why_not = error.message
    return PartTimes(
        step_s=measure_time(lambda: step.apply(step.local(*batch)), duration_s)[0],
        evaluation_s=measure_time(lambda: step.evaluate(*batch), duration_s)[0],
        features_s=measure_time(lambda: features.run(batch[0]), duration_s)[0] if features else 0.0,
        cuts=tuple(cuts),
        why_not=why_not,
    )


def _time_cut(step: Step, layer: str, spec: PartsSpec, batch: tuple[Array, Array]) -> CutTimes:
    with tf.device(STATE):
        split = SplitStep(step, layer, spec.recipe, (batch[0][:1], batch[1][:1]))
    split.set_step(0, 0.0)
    split.begin()
    out = np.zeros(split.layout.step_size, np.float32)

    def forward() -> Array:
        split.forget()
        return split.forward(batch[0])

    outputs = forward()
    forward_s = measure_time(forward, spec.min_duration_s)[0]
    both_s = measure_time(lambda: split.backward(np.zeros_like(forward()), 1.0, out), spec.min_duration_s)[0]
    head_s = measure_time(lambda: split.head(outputs, batch[1], 1.0), spec.min_duration_s)[0]
    return CutTimes(layer, forward_s, max(0.0, both_s - forward_s), head_s)


def measure_time(
    compute: Callable[[], object], min_duration_s: float, *, num_warm_ups: int = 1, min_count: int = 2
) -> tuple[float, int]:
    """Return the mean seconds of `compute` over at least `min_duration_s`, and how often it ran.

    The mean rather than the median: a machine limited to a share of a core works in bursts, where most steps
    are fast and a few take all the time.
    """
    for _ in range(num_warm_ups):
        compute()
    started, count, elapsed_s = time.perf_counter(), 0, 0.0
    while count < min_count or elapsed_s < min_duration_s:
        compute()
        count += 1
        elapsed_s = time.perf_counter() - started
    return elapsed_s / count, count
