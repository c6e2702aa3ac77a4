"""Rank 0's part of a model that is cut in two: the head of all ranks' samples, and the whole step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import compile_arguments
from csdctl.worker.compute.objective import Objective
from csdctl.worker.compute.split import PrefixStep, per_sample_loss_error, same_optimizer, unflatten
from csdctl.worker.compute.statistics import LayerStates
from csdctl.worker.compute.step import Step
from csdctl.worker.data.arrays import Array
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import Recipe


class SplitStep(PrefixStep):
    """Prefix and head on rank 0, which takes the step of the whole model."""

    def __init__(
        self,
        whole: Step,
        layer: str,
        recipe: Recipe,
        example: tuple[Array, Array],
        tf: Any,
        keras: Any,
        *,
        weight: float = 1.0,
    ) -> None:
        """`whole`: the step of the whole model, for evaluation and for steps without other ranks."""
        super().__init__(
            *(whole.model, layer, recipe, example, tf, keras), weight=weight, objective=whole.objective
        )
        self.whole = whole
        model = whole.model
        self._head.compile(**compile_arguments(model))
        outputs = np.zeros((0, *self.cut.tensor.shape[1:]), self.activation_type)
        self._head_objective = Objective(self._head, recipe, (outputs, example[1]), tf, keras)
        self._head_states = LayerStates(self._head, tf, keras)
        # Summed where they are: a vector of all gradients for each micro-batch costs as much as the head.
        self._gradients = [tf.Variable(tf.zeros(one.shape), trainable=False) for one in self._head_variables]
        self._tail = tf.Variable(tf.zeros(self._head_states.size + self.layout.num_sums), trainable=False)
        signature = [*self._head_objective.signature, tf.TensorSpec((), tf.float32)]
        self._head_graph = tf.function(self._head_pass, autograph=False, input_signature=signature)
        total = [tf.TensorSpec((self.layout.step_size,), tf.float32)]
        self._apply = tf.function(self._apply_both_graph, autograph=False, input_signature=total)
        self._drawn: dict[int, list[Array]] = {}

    def begin(self) -> None:
        """Begin a step: nothing is summed yet, and no rank has drawn random numbers."""
        for variable in (*self._gradients, self._tail):
            variable.assign(self._tf.zeros_like(variable))
        self._drawn = {}

    def as_rank(self, rank: int, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns with the random states of `rank`, which go on where it left them."""
        step, _ = self.seeds.position
        if rank in self._drawn:
            self.seeds.restore(self._drawn[rank])
        else:
            self.seeds.set_step(step, rank)
        found = compute()
        self._drawn[rank] = self.seeds.save()
        return found

    def head(self, outputs: Array, labels: Array, weight: float) -> tuple[Array, float]:
        """Add the vector of a micro-batch to that of the head.

        Returns the gradient of its loss with respect to the prefix's `outputs`, times the number that Keras
        divides it by, and that number. `weight`: of each of its samples.
        """
        batch = self._head_objective.tensors(outputs, labels)
        gradient, loss_count = self._head_graph(*batch, self._tf.constant(weight, self._tf.float32))
        return np.asarray(gradient), float(loss_count)

    def add_sums_to(self, out: Array) -> None:
        """Add loss, metrics and the count of the loss of all ranks' samples to rank 0's vector."""
        layout = self.layout
        out[layout.sums.start : layout.count] += self._tail.numpy()[-layout.num_sums : -1]

    def vector(self, total: Array) -> Array:
        """Return the vector of the whole model, shape (whole.layout.step_size,), that a sum amounts to."""
        whole, layout, tf = self.whole, self.layout, self._tf
        sums = unflatten(total[layout.gradients], self.model.trainable_variables, tf)
        sums |= self._sums_of_head()
        flat = [np.reshape(sums[id(variable)], -1) for variable in whole.model.trainable_variables]
        of_head = self._head_states.split(self._tail.numpy()[: self._head_states.size])
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
        optimizer = same_optimizer(self.optimizer, self.model.trainable_variables)
        own = {variable.path: variable for variable in self.optimizer.variables}
        missing = [variable.path for variable in optimizer.variables if variable.path not in own]
        if missing or len(own) != len(self.optimizer.variables):
            raise WorkerError(
                f"a model cannot be split whose optimizer has no variable {missing[:3]} for each weight",
                remedy="give all layers different names, or train with --strategy data-parallel",
                exit_code=2,
            )
        return [*self.model.weights, *(own[variable.path] for variable in optimizer.variables)]

    def _sums_of_head(self) -> dict[int, Any]:
        """Return the summed gradient of each variable of the head by its id."""
        return {
            id(variable): summed
            for variable, summed in zip(self._head_variables, self._gradients, strict=True)
        }

    def _head_pass(self, outputs: Any, labels: Any, weight: Any) -> tuple[Any, Any]:
        tf = self._tf
        before = self._head_states.read()
        variables = self._head_variables
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            batch = self._head_objective.forward(outputs, labels, training=True)
        if batch.summed is not None:
            raise per_sample_loss_error()
        towards, *gradients = tape.gradient(batch.mean, [outputs, *(v.value for v in variables)])
        if towards is None:
            towards = tf.zeros_like(outputs)
        changes = self._head_states.take_changes(before, batch.samples)
        tail = [tf.reshape(batch.mean * batch.loss_count, [1]), *batch.states]
        if self.layout.has_loss_count:
            tail.append(tf.reshape(batch.loss_count, [1]))
        tail.append(tf.reshape(batch.samples, [1]))
        self._tail.assign_add(tf.concat([*changes, *tail], axis=0) * weight)
        for summed, gradient in zip(self._gradients, gradients, strict=True):
            if gradient is not None:
                one = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                summed.assign_add(one * (batch.loss_count * weight))
        return towards * tf.cast(batch.loss_count, towards.dtype), batch.loss_count

    def _apply_both_graph(self, total: Any) -> None:
        layout, variables = self.layout, self.whole.model.trainable_variables
        means = self._means(total)
        statistics = self._tail[: self._head_states.size]
        self._head_states.apply_changes(statistics / total[layout.count])
        means |= {key: summed / total[layout.divisor] for key, summed in self._sums_of_head().items()}
        self.optimizer.apply([means[id(variable)] for variable in variables], variables)
