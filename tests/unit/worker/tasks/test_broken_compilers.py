"""`verify` on compilers that are wrong on purpose, on host and ranks alike."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from csdctl.worker.compute.backend import tf
from csdctl.worker.compute.objective import Objective
from csdctl.worker.compute.step_compiler import Compiler, Statistics, StepCompiler
from csdctl.worker.compute.trace import Values
from csdctl.worker.engine.step import StepEngine
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import Recipe
from csdctl.workflows.train.verify import judge
from tests.unit.worker.compute.built_models import keras
from tests.unit.worker.tasks.test_verify import NODES, compute_vectors, load_task, verify
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

Fault = tuple[Any, str, Callable[..., Any]]
"""A class, the name of a method, and the function that takes its place."""
FAULTS: dict[str, Fault] = {}


def fault(description: str, kind: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that takes the place of a method, and gets the method as its first argument."""
    original = vars(kind)[name]

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Any, *args: Any, **options: Any) -> Any:
            return wrong(original, self, *args, **options)

        FAULTS[description] = kind, name, replacement
        return wrong

    return register


@fault("update of batch norm dropped from the vector", Statistics, "changes")
def drop_changes(original: Any, self: Any, before: Any, weight: Any) -> Any:
    return [0 * change for change in original(self, before, weight)]


@fault("update of batch norm not applied", Statistics, "apply")
def apply_no_changes(original: Any, self: Any, changes: Any) -> None:
    return None


@fault("seeds of another rank", StepEngine, "_key")
def make_key_without_rank(original: Any, self: Any, what: str = "", rank: int | None = None) -> int:
    return int.from_bytes(what.encode(), "big") % (1 << 32)


@fault("seeds not read", Compiler, "_given")
def ignore_seeds(original: Any, self: Any, state: Any, seeds: Any = None, rate: Any = None) -> Any:
    return original(self, state, None if seeds is None else 0 * seeds, rate)


@fault("rate taken twice", Compiler, "_given")
def double_rate(original: Any, self: Any, state: Any, seeds: Any = None, rate: Any = None) -> Any:
    return original(self, state, seeds, None if rate is None else 2 * rate)


@fault("inference in place of training", Objective, "forward")
def infer(original: Any, self: Any, *batch: Any, training: bool) -> Any:
    return original(self, *batch, training=False)


@fault("divisor of the loss", Objective, "forward")
def count_one_more(original: Any, self: Any, *args: Any, **options: Any) -> Any:
    batch = original(self, *args, **options)
    return replace(batch, loss_count=batch.loss_count + 1)


@fault("order of writes", Compiler, "_new_state")
def exchange_weights(original: Any, self: Any) -> Any:
    """Write each weight to the place of the next one of its shape."""
    values = original(self)
    first, second = [place for place, value in enumerate(self.variables) if tuple(value.shape) == (8, 8)][:2]
    values[first], values[second] = values[second], values[first]
    return values


@fault("count of steps before it is used", StepCompiler, "_optimize")
def count_early(original: Any, self: Any, gradients: Any) -> None:
    self.optimizer.iterations.assign_add(1)
    original(self, gradients)
    self.optimizer.iterations.assign_sub(1)


@fault("weights of the trace", Values, "given")
def take_weights_of_the_trace(original: Any, self: Any, variables: Any, values: Any) -> Any:
    with tf.init_scope():
        traced = [np.asarray(variable.value) for variable in variables]
    rows = zip(variables, traced, values, strict=True)
    chosen = [constant if "kernel" in variable.path else value for variable, constant, value in rows]
    return original(self, variables, chosen)


@fault("gradient of the penalty dropped", Objective, "_add_losses")
def drop_penalty(original: Any, self: Any, compiled: Any) -> Any:
    return compiled, None


def judge_step(fault: Fault | None, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the verdict, '' for equal, on ranks whose steps a compiler with this fault has made."""
    with mock.patch.object(*fault) if fault else contextlib.nullcontext():
        task = load_task(ROW)
        if fault and fault[0] is StepEngine:  # of the ranks alone: Keras' step is asked for the right one
            task.step.position = 0, 0
        vectors, _ = compute_vectors(task)
    try:
        verdict = judge(verify(task, vectors, sum(vectors), capsys), NODES)
    except WorkerError as error:
        return error.message
    return "" if verdict.is_equal else verdict.text


def test_right_compiler_passes(capsys: pytest.CaptureFixture[str]) -> None:
    keras()
    assert judge_step(None, capsys) == ""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_broken_compiler_is_found(fault: Fault, capsys: pytest.CaptureFixture[str]) -> None:
    keras()
    verdict = judge_step(fault, capsys)
    assert verdict
    assert not verdict.startswith("inconclusive")
