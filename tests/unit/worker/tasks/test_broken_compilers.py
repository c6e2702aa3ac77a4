"""`verify` on compilers that are wrong on purpose, on host and ranks alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from csdctl.worker.compute.backend import tf
from csdctl.worker.compute.objective import Objective
from csdctl.worker.compute.statistics import Statistics
from csdctl.worker.compute.step_compiler import Compiler, StepCompiler
from csdctl.worker.compute.trace import Values
from csdctl.worker.engine.step import StepEngine
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import Recipe
from csdctl.workflows.train.verify import judge
from tests.unit.worker.compute.built_models import Step, keras
from tests.unit.worker.tasks.test_verify import NODES, Engine, compute_vectors, load_task, verify
from tests.unit.worker.tasks.verified_models import CLASSES, Row

TABLE = np.zeros((0, 8), np.float32)


def build(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((8,))
    x = layers.Dense(8, activation="relu", kernel_regularizer="l2")(inputs)
    x = layers.Dropout(0.25)(layers.BatchNormalization()(x))
    x = layers.Dense(8, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(x))


ROW = Row(
    build,
    TABLE,
    CLASSES,
    Recipe(optimizer="adamw", optimizer_args={"weight_decay": 0.1, "clipnorm": 0.5}, learning_rate=0.01),
)

Fault = Callable[[Any], Any]
"""Given what it takes the place of, returns a method."""


def first_count(original: Any) -> Any:
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        batch = original(self, *args, **options)
        return replace(batch, loss_count=batch.loss_count + 1)

    return forward


def other_order(original: Any) -> Any:
    """Write each weight to the place of the next one of its shape."""

    def new_state(self: Any) -> Any:
        values = original(self)
        shapes = [tuple(variable.shape) for variable in self.variables]
        same = [place for place, shape in enumerate(shapes) if shape == (8, 8)][:2]
        values[same[0]], values[same[1]] = values[same[1]], values[same[0]]
        return values

    return new_state


def early_count(original: Any) -> Any:
    """Count the step before the optimizer uses the count."""

    def optimize(self: Any, gradients: Any) -> Any:
        self.optimizer.iterations.assign_add(1)
        original(self, gradients)
        self.optimizer.iterations.assign_sub(1)

    return optimize


def at_the_trace(original: Any) -> Any:
    """Take the weights that the model has while it is traced."""

    def given(self: Any, variables: Any, values: Any) -> Any:
        with tf.init_scope():
            first = [np.asarray(variable.value) for variable in variables]
        pairs = zip(variables, first, values, strict=True)
        chosen = [mine if "kernel" in variable.path else value for variable, mine, value in pairs]
        return original(self, variables, chosen)

    return given


FAULTS: dict[str, tuple[Any, str, Fault]] = {
    "update of batch norm dropped from the vector": (
        Statistics,
        "changes",
        lambda original: lambda self, before, weight: [0 * value for value in original(self, before, weight)],
    ),
    "update of batch norm not applied": (Statistics, "apply", lambda _: lambda self, changes: None),
    "seeds of another rank": (
        StepEngine,
        "_key",
        lambda _: lambda self, what="": int.from_bytes(what.encode(), "big") % (1 << 32),
    ),
    "seeds not read": (
        Compiler,
        "_given",
        lambda original: (
            lambda self, state, seeds=None, rate=None: original(
                self, state, None if seeds is None else 0 * seeds, rate
            )
        ),
    ),
    "inference in place of training": (
        Objective,
        "forward",
        lambda original: lambda self, *batch, training: original(self, *batch, training=False),
    ),
    "training in place of inference": (
        StepCompiler,
        "_evaluate",
        lambda _: (
            lambda self, state, seeds, *batch: self._local(state, seeds, 1.0, *batch)[
                -len(self.metric_states.variables) - 2 :
            ]
        ),
    ),
    "divisor of the loss": (Objective, "forward", first_count),
    "order of writes": (Compiler, "_new_state", other_order),
    "count of steps before it is used": (StepCompiler, "_optimize", early_count),
    "weights of the trace": (Values, "given", at_the_trace),
    "rate taken twice": (
        Compiler,
        "_given",
        lambda original: (
            lambda self, state, seeds=None, rate=None: original(
                self, state, seeds, None if rate is None else 2 * rate
            )
        ),
    ),
    "gradient of the penalty dropped": (
        Objective,
        "_add_losses",
        lambda _: lambda self, compiled: (compiled, None),
    ),
}


def judge_step(fault: tuple[Any, str, Fault] | None, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the verdict, '' for equal, on ranks whose steps a compiler with this fault has made."""
    kind, name, wrong = fault or (Step, "model", lambda original: original)
    with mock.patch.object(kind, name, wrong(vars(kind)[name])):
        task = load_task(ROW)
        if kind is StepEngine:  # of the ranks alone: Keras' step is asked for the right one
            task.step.position = 0, 0
        start = task.step.values
        saved = compute_vectors(task)
        task.step.values = start
    try:
        verdict = judge(verify(task, Engine(), saved, capsys), NODES)
    except WorkerError as error:
        return error.message
    return "" if verdict.is_equal else verdict.text


def test_right_compiler_passes(capsys: pytest.CaptureFixture[str]) -> None:
    keras()
    assert judge_step(None, capsys) == ""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_broken_compiler_is_found(fault: tuple[Any, str, Fault], capsys: pytest.CaptureFixture[str]) -> None:
    keras()
    assert " differs " in judge_step(fault, capsys)
