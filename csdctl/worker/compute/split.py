"""The functions of a model that is cut in two, without state: see engine/split.py."""

from dataclasses import replace
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import tf
from csdctl.worker.compute.cuts import Cut, find_cuts, split_at
from csdctl.worker.compute.keras_internals import compile_arguments
from csdctl.worker.compute.objective import Objective, has_samples, inputs_of
from csdctl.worker.compute.step_compiler import Statistics, StepCompiler, find_variables, zeros_for_none
from csdctl.worker.compute.trace import GraphBuilder, unflatten
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.step import APPLY, BACKWARD, HEAD, JOIN, PREFIX, SplitInfo, StepInfo
from csdctl.worker.process.errors import JobError, WorkerError

LOSS_OF_SAMPLES = "layers add a loss for each sample"


def find_cut(model: Any, layer: str) -> Cut:
    """Return the cut after `layer`. Raises WorkerError, exit code 2, naming the model's cuts."""
    cuts = {cut.layer: cut for cut in reversed(find_cuts(model))}
    if layer in cuts:
        return cuts[layer]
    names = ", ".join(reversed(cuts)) or "none: it is not a functional model"
    raise JobError(
        f"{model.name} cannot be cut after {layer!r}; its cuts: {names}", "name one of them as the cut"
    )


def split_error(problem: str, instead: str = "") -> WorkerError:
    """Return the error of a model that cannot be split, such as one whose optimizer needs all gradients."""
    return JobError(
        f"a model whose {problem} cannot be split", f"{instead}train with the strategy data-parallel"
    )


class PrefixCompiler(StepCompiler):
    """The functions of a rank that computes the prefix of a model."""

    def __init__(self, whole_model: StepCompiler, prefix: Any, optimizer: Any) -> None:
        """`whole_model`: of which the functions were traced. `prefix`: its first layers."""
        # Tracing the whole model finds out what both need.
        vars(self).update(vars(whole_model))
        self.model, self.optimizer, self.optimizers = prefix, optimizer, [optimizer]
        self._rates = [(optimizer.learning_rate, 1.0)]
        self.statistics = Statistics(prefix)
        self.variables = find_variables(prefix, optimizer)

    def trace(self, builder: GraphBuilder) -> StepInfo:
        """See Compiler."""
        self.add_prefix(builder)
        total = tf.TensorSpec((self.layout.step_size,), tf.float32)
        self._add(builder, (APPLY,), self._apply, "rate total", total=total)
        return self._describe(builder, self.layout)

    def add_prefix(self, builder: GraphBuilder) -> None:
        """Add the prefix's passes, with the state of `variables`."""
        self._builder = builder
        self._add(builder, (PREFIX, BACKWARD), self._prefix, "seeds samples")

    def _prefix(self, state: Any, seeds: Any, samples: Any) -> Any:
        trained = [variable.value for variable in self.model.trainable_variables]
        with self._given(state, seeds):
            before = self.statistics.read()
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(trained)
                output = self.model(inputs_of(self.model, samples, self.recipe.input_range), training=True)
                losses = self.model.losses
                if any(map(has_samples, losses)):
                    raise split_error(LOSS_OF_SAMPLES)
                penalties = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]
                penalty = tf.add_n([tf.zeros(()), *penalties])
            count = tf.cast(tf.shape(output)[0], tf.float32)
            changes = self.statistics.changes(before, count)
            scalar = tf.float32, ()
            spec = output.dtype, output.shape
            gradient, loss_count, weight = self._builder.cut([output], [spec, scalar, scalar])
            gradients = tape.gradient([output, penalty], trained, output_gradients=[gradient, loss_count])
            flat = [tf.reshape(gradient, [-1]) for gradient in zeros_for_none(gradients, trained)]
            zeros = tf.zeros((self.layout.step_size - self.layout.statistics.stop - 2,))
            sums = [tf.reshape(penalty * loss_count, [1]), zeros, tf.reshape(count, [1])]
            return tf.concat([*flat, *changes, *sums], axis=0) * weight


class SplitCompiler:
    """The functions of rank 0, which has the whole model, and of the other ranks."""

    def __init__(self, whole_model: Any, layer: str, example: tuple[Array, Array]) -> None:
        """`whole_model`: a StepCompiler that was traced. Its model is cut after `layer`.

        Raises WorkerError, exit code 2, for a model that cannot be cut.
        """
        model = whole_model.model
        if hasattr(model.optimizer, "inner_optimizer"):
            raise split_error("optimizer scales the loss (mixed_float16)", "use mixed_bfloat16, or ")
        if getattr(model.optimizer, "global_clipnorm", None):
            problem = "optimizer clips by the norm of the whole gradient"
            raise split_error(problem, "clip each variable's gradient (clipnorm), or ")
        if len(whole_model.statistics.variables) > len(Statistics(model).variables):
            raise split_error("layers write a tf.Variable", "create it with add_weight, or ")
        self._whole_model, self._cut = whole_model, find_cut(model, layer)
        prefix, self._head = split_at(self._cut)
        optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        self.of_ranks = PrefixCompiler(whole_model, prefix, optimizer)
        """What the other ranks compute, with variables of their own."""
        self._on_host = PrefixCompiler(whole_model, prefix, optimizer)
        self._on_host.variables = whole_model.variables
        self._head.compile(**compile_arguments(model))
        outputs = np.zeros((0, *self._cut.tensor.shape[1:]), np.float32)
        self._objective = Objective(self._head, whole_model.recipe, (outputs, example[1][:0]))
        self._statistics = Statistics(self._head)

    def add_to(self, builder: GraphBuilder, info: StepInfo) -> StepInfo:
        """Add the parts' functions to the whole model's. Return its info with them."""
        host, tensor = self._on_host, self._cut.tensor
        host.add_prefix(builder)
        num_sums = sum(self._statistics.sizes) + host.layout.step_size - host.layout.statistics.stop
        shapes = [*(tuple(variable.shape) for variable in self._head.trainable_variables), (num_sums,)]
        specs = {
            "outputs": tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype),
            "total": tf.TensorSpec((host.layout.step_size,), tf.float32),
            "sums": {place: tf.TensorSpec(shape, tf.float32) for place, shape in enumerate(shapes)},
        }
        host._add(builder, (HEAD,), self._add_head, "seeds weight outputs labels sums", **specs)
        host._add(builder, (JOIN,), self._join, "total sums", **specs)
        split = SplitInfo(
            shape=tuple(tensor.shape[1:]),
            dtype=tensor.dtype,
            layout=host.layout,
            head_shapes=tuple(shapes),
            num_head_statistics=sum(self._statistics.sizes),
            state=tuple(self._state_of_ranks()),
        )
        return replace(info, functions=builder.functions, split=split)

    def _add_head(
        self, state: Any, seeds: Any, weight: Any, outputs: Any, labels: Any, sums: dict[int, Any]
    ) -> list[Any]:
        trained = [variable.value for variable in self._head.trainable_variables]
        with self._on_host._given(state, seeds):
            before = self._statistics.read()
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([outputs, *trained])
                batch = self._objective.forward(outputs, labels, training=True)
            if batch.summed is not None:
                raise split_error(LOSS_OF_SAMPLES)
            towards, *gradients = tape.gradient(batch.mean, [outputs, *trained])
            towards = tf.zeros_like(outputs) if towards is None else towards
            factor = batch.loss_count * weight
            changes = self._statistics.changes(before, batch.samples * weight)
            tail = tf.concat([*changes, *self._whole_model._tail(batch, weight, with_samples=True)], axis=0)
            new = [gradient * factor for gradient in zeros_for_none(gradients, trained)]
            added = [so_far + part for so_far, part in zip(sums.values(), [*new, tail], strict=True)]
            return [towards * tf.cast(batch.loss_count, towards.dtype), batch.loss_count, *added]

    def _join(self, state: Any, total: Any, sums: dict[int, Any]) -> Any:
        """Return the vector of the whole model, from the sums of the prefix's vectors and of the head's."""
        whole_model, prefix, head, layout = self._whole_model, self._on_host, self._head, self._on_host.layout
        *of_head, tail = sums.values()
        of_prefix = unflatten(total[layout.gradients], prefix.model.trainable_variables)
        pairs = [*zip(prefix.model.trainable_variables, of_prefix, strict=True)]
        gradients = [*pairs, *zip(head.trainable_variables, of_head, strict=True)]
        changes = [
            pair
            for statistics, part in ((prefix.statistics, total[layout.statistics]), (self._statistics, tail))
            for pair in zip(
                statistics.variables,
                unflatten(part[: sum(statistics.sizes)], statistics.variables),
                strict=True,
            )
        ]
        joined = []
        for variables, parts in (
            (whole_model.model.trainable_variables, gradients),
            (whole_model.statistics.variables, changes),
        ):
            by_variable: dict[int, Any] = {}
            for variable, part in parts:
                by_variable[id(variable)] = by_variable.get(id(variable), 0.0) + part
            joined += [by_variable.get(id(variable), tf.zeros(variable.shape)) for variable in variables]
        return tf.concat([*(tf.reshape(part, [-1]) for part in joined), total[layout.statistics.stop :]], 0)

    def _state_of_ranks(self) -> list[int]:
        """Return the variables of the whole model's state that the other ranks have. Raises WorkerError."""
        places = {id(variable): place for place, variable in enumerate(self._whole_model.variables)}
        optimizer, of_ranks = self._whole_model.optimizer, self.of_ranks.optimizer
        by_path = {variable.path: variable for variable in optimizer.variables}
        rate = of_ranks.learning_rate
        paths = [variable.path for variable in of_ranks.variables if variable is not rate]
        missing = [path for path in paths if path not in by_path]
        if missing or len(by_path) != len(optimizer.variables):
            raise split_error(
                f"optimizer has no variable {missing[:3]} for each weight",
                "give all layers different names, or ",
            )
        variables = [*self.of_ranks.model.weights, *(by_path[path] for path in paths)]
        return [places[id(variable)] for variable in variables]
