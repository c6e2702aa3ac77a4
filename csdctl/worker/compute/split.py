"""The functions of a model that is cut in two, without state: see engine/split.py."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import tf
from csdctl.worker.compute.cuts import Cut, find_cuts, split_at
from csdctl.worker.compute.keras_internals import compile_arguments
from csdctl.worker.compute.objective import Objective, inputs_of
from csdctl.worker.compute.statistics import Statistics
from csdctl.worker.compute.step_compiler import LABELS, SAMPLES, StepCompiler, find_variables, zeros_for_none
from csdctl.worker.compute.trace import GraphBuilder
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.step import APPLY, BACKWARD, HEAD, PREFIX, Piece, SplitInfo, StepInfo
from csdctl.worker.process.errors import InputError, WorkerError


def find_cut(model: Any, layer: str) -> Cut:
    """Return the cut behind `layer`. Raises WorkerError, exit code 2, naming those that there are."""
    cuts = find_cuts(model)
    for cut in cuts:
        if cut.layer == layer:
            return cut
    names = ", ".join(cut.layer for cut in cuts) or "none: it is not a functional model"
    raise InputError(
        f"{model.name} cannot be cut after {layer!r}; its cuts: {names}", "name one of them as the cut"
    )


def split_error(problem: str, instead: str = "") -> WorkerError:
    """Return the error of a model that cannot be split, such as one whose optimizer needs all gradients."""
    return InputError(
        f"a model whose {problem} cannot be split", f"{instead}train with the strategy data-parallel"
    )


class PrefixCompiler(StepCompiler):
    """The functions of a rank that computes the prefix of a model."""

    def __init__(self, whole: StepCompiler, prefix: Any, optimizer: Any) -> None:
        """`whole`: that of the model, whose functions were traced. `prefix`: its first layers."""
        # What both need is found out in tracing the whole.
        vars(self).update(vars(whole))
        self.model, self.optimizer = prefix, optimizer
        self._rates = [(optimizer.learning_rate, 1.0)]
        self.statistics = Statistics(prefix)
        self.variables = find_variables(prefix, optimizer)

    def trace(self, builder: GraphBuilder) -> StepInfo:
        """As of Compiler."""
        self.add_prefix(builder)
        size = self.num_gradients + sum(self.statistics.sizes) + self.num_sums
        total = {"total": tf.TensorSpec((size,), tf.float32)}
        self._add(builder, (APPLY,), self._apply, {"rate": tf.TensorSpec((), tf.float32)}, total)
        return self._describe(
            builder,
            num_statistics=sum(self.statistics.sizes),
            num_states=self.metric_states.size,
            has_loss_scaling=False,
            normalizing=(),
        )

    @property
    def num_gradients(self) -> int:
        """Elements of the prefix's trainable variables."""
        return sum(math.prod(one.shape) for one in self.model.trainable_variables)

    @property
    def num_sums(self) -> int:
        """Elements of the vector behind gradients and statistics."""
        return 2 + self.metric_states.size + self._has_loss_count

    def add_prefix(self, builder: GraphBuilder) -> None:
        """Add the prefix's passes, with the state of `variables`."""
        seeds = {"seeds": tf.TensorSpec((len(self.seeds.states), 2), tf.int64)}
        self._builder = builder
        self._add(builder, (PREFIX, BACKWARD), self._prefix, seeds, SAMPLES)

    def _prefix(self, state: Any, seeds: Any, samples: Any) -> Any:
        trained = [one.value for one in self.model.trainable_variables]
        with self._given(state, seeds):
            before = self.statistics.read()
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(trained)
                output = self.model(inputs_of(self.model, samples, self.recipe.input_range), training=True)
                penalties = [tf.zeros(())]
                for loss in self.model.losses:
                    if len(loss.shape) > 0 and loss.shape[0] is None:
                        raise split_error("layers add a loss for each sample")
                    penalties.append(tf.reduce_sum(tf.cast(loss, tf.float32)))
                penalty = tf.add_n(penalties)
            count = tf.cast(tf.shape(output)[0], tf.float32)
            changes = self.statistics.changes(before, count)
            scalar = tf.float32, ()
            spec = output.dtype, output.shape
            gradient, loss_count, weight = self._builder.cut([output], [spec, scalar, scalar])
            gradients = tape.gradient([output, penalty], trained, output_gradients=[gradient, loss_count])
            flat = [tf.reshape(one, [-1]) for one in zeros_for_none(gradients, trained)]
            zeros = tf.zeros((self.num_sums - 2,))
            sums = [tf.reshape(penalty * loss_count, [1]), zeros, tf.reshape(count, [1])]
            return tf.concat([*flat, *changes, *sums], axis=0) * weight


class SplitCompiler:
    """The functions of rank 0, which has the whole model, and those of the other ranks."""

    def __init__(self, whole: Any, layer: str, example: tuple[Array, Array]) -> None:
        """`whole`: a StepCompiler that was traced. Its model is cut behind `layer`.

        Raises WorkerError, exit code 2, for a model that cannot be cut.
        """
        model = whole.model
        if hasattr(model.optimizer, "inner_optimizer"):
            raise split_error("optimizer scales the loss (mixed_float16)", "use mixed_bfloat16, or ")
        if getattr(model.optimizer, "global_clipnorm", None):
            problem = "optimizer clips by the norm of the whole gradient"
            raise split_error(problem, "clip each variable's gradient (clipnorm), or ")
        if len(whole.statistics.variables) > len(Statistics(model).variables):
            raise split_error("layers write a tf.Variable", "create it with add_weight, or ")
        self._whole, self._cut = whole, find_cut(model, layer)
        prefix, self._head = split_at(self._cut)
        optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        self.of_ranks = PrefixCompiler(whole, prefix, optimizer)
        """What the other ranks compute, with variables of their own."""
        self._on_host = PrefixCompiler(whole, prefix, optimizer)
        self._on_host.variables = whole.variables
        self._head.compile(**compile_arguments(model))
        outputs = np.zeros((0, *self._cut.tensor.shape[1:]), np.float32)
        self._objective = Objective(self._head, whole.recipe, (outputs, example[1][:0]))
        self._statistics = Statistics(self._head)

    def add_to(self, builder: GraphBuilder, info: StepInfo) -> StepInfo:
        """Add the parts' functions to those of the whole model. Return its info with them."""
        self._on_host.add_prefix(builder)
        whole, trained = self._whole, self._head.trainable_variables
        of_sums = sum(self._statistics.sizes) + self._on_host.num_sums
        shapes = [*(tuple(one.shape) for one in trained), (of_sums,)]
        sums = {f"sums_{place}": tf.TensorSpec(shape, tf.float32) for place, shape in enumerate(shapes)}
        seeds = {"seeds": tf.TensorSpec((len(whole.seeds.states), 2), tf.int64)}
        outputs = {"outputs": tf.TensorSpec((None, *self._cut.tensor.shape[1:]), self._cut.tensor.dtype)}
        weight = {"weight": tf.TensorSpec((), tf.float32)}
        self._on_host._add(builder, (HEAD,), self._add_head, seeds, weight, outputs, LABELS, sums)
        return self._complete(builder, info, shapes)

    def _add_head(
        self, state: Any, seeds: Any, weight: Any, outputs: Any, labels: Any, *sums: Any
    ) -> list[Any]:
        trained = [one.value for one in self._head.trainable_variables]
        with self._on_host._given(state, seeds):
            before = self._statistics.read()
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([outputs, *trained])
                batch = self._objective.forward(outputs, labels, training=True)
            if batch.summed is not None:
                raise split_error("layers add a loss for each sample")
            towards, *gradients = tape.gradient(batch.mean, [outputs, *trained])
            towards = tf.zeros_like(outputs) if towards is None else towards
            factor = batch.loss_count * weight
            changes = self._statistics.changes(before, batch.samples * weight)
            tail = tf.concat([*changes, *self._whole._tail(batch, weight, with_samples=True)], axis=0)
            new = [one * factor for one in zeros_for_none(gradients, trained)]
            added = [so_far + one for so_far, one in zip(sums, [*new, tail], strict=True)]
            return [towards * tf.cast(batch.loss_count, towards.dtype), batch.loss_count, *added]

    def _complete(self, builder: GraphBuilder, info: StepInfo, shapes: Sequence[Any]) -> StepInfo:
        prefix, whole = self._on_host, self._whole
        of_prefix = _places(prefix.model.trainable_variables, prefix.statistics, prefix.num_gradients)
        num_of_head = sum(math.prod(one.shape) for one in self._head.trainable_variables)
        of_head = _places(self._head.trainable_variables, self._statistics, num_of_head)
        pieces = [
            Piece(math.prod(one.shape), parts[0].get(id(one), -1), parts[1].get(id(one), -1))
            for one, parts in [
                *((one, (of_prefix[0], of_head[0])) for one in whole.model.trainable_variables),
                *((one, (of_prefix[1], of_head[1])) for one in whole.statistics.variables),
            ]
        ]
        split = SplitInfo(
            tuple(self._cut.tensor.shape[1:]),
            self._cut.tensor.dtype,
            prefix.num_gradients,
            sum(prefix.statistics.sizes),
            tuple(shapes),
            sum(self._statistics.sizes),
            tuple(pieces),
            tuple(self._state_of_ranks()),
        )
        return replace(info, functions=builder.functions, split=split)

    def describe_ranks(self, builder: GraphBuilder, info: StepInfo) -> StepInfo:
        """Trace the functions of the other ranks. Return their info. `info`: of rank 0."""
        assert info.split
        of_ranks = self.of_ranks.trace(builder)
        return replace(
            of_ranks,
            has_loss_count=info.has_loss_count,
            divides_gradients=info.divides_gradients,
            split=info.split,
        )

    def _state_of_ranks(self) -> list[int]:
        """Return the variables of the whole model's state that the other ranks have, in their order.

        Raises WorkerError, exit code 2, for an optimizer whose variables cannot be told apart.
        """
        places = {id(one): place for place, one in enumerate(self._whole.variables)}
        optimizer, own = self._whole.optimizer, self.of_ranks.optimizer
        by_path = {variable.path: variable for variable in optimizer.variables}
        paths = [one.path for one in own.variables if one is not own.learning_rate]
        missing = [path for path in paths if path not in by_path]
        if missing or len(by_path) != len(optimizer.variables):
            raise split_error(
                f"optimizer has no variable {missing[:3]} for each weight",
                "give all layers different names, or ",
            )
        return [
            *(places[id(one)] for one in self.of_ranks.model.weights),
            *(places[id(by_path[path])] for path in paths),
        ]


def _places(trained: Sequence[Any], statistics: Statistics, start: int) -> tuple[dict[int, int], ...]:
    """Return where each variable's gradient is, and where each one's change is, which begin at `start`."""
    ends = np.cumsum([0, *(math.prod(one.shape) for one in trained)])
    gradients = {id(one): int(end) for one, end in zip(trained, ends, strict=False)}
    ends = start + np.cumsum([0, *statistics.sizes])
    return gradients, {id(one): int(end) for one, end in zip(statistics.variables, ends, strict=False)}
