"""Layers that keep state in unusual places: a compiled step takes the steps of Keras' train_on_batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.engine.tensorflow_c import TensorFlowError
from csdctl.worker.protocol.recipe import Recipe
from tests.unit.worker.compute.built_models import make_step

tf, keras = load_backend()
layers = keras.layers
GENERATOR = np.random.default_rng(0)
SAMPLES = GENERATOR.normal(size=(64, 6)).astype(np.float32)
TOKENS = GENERATOR.integers(0, 5, (64, 1)).astype(np.int64)
CLASSES = GENERATOR.integers(0, 3, 64).astype(np.int32)
RECIPE = Recipe(learning_rate=0.05, from_logits=True)
SHARED_SEED = keras.random.SeedGenerator(5)


class OwnVariable(layers.Layer):  # type: ignore[misc]
    """Layers of Keras cannot see a tf.Variable."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = tf.Variable(tf.zeros(6), trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign_add(tf.reduce_mean(inputs, 0) + 1)
        return inputs + self.mean


class OwnVariableOfSlices(OwnVariable):
    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.mean.scatter_max(tf.IndexedSlices(tf.reduce_max(inputs, 0)[:3], tf.range(3)))
        return inputs + self.mean


class Factor(layers.Layer):  # type: ignore[misc]
    """A variable that only a branch reads, and never a value that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = tf.Variable(2.0, trainable=False)

    def call(self, inputs: Any) -> Any:
        positive = tf.reduce_sum(inputs) > 0
        return tf.cond(positive, lambda: inputs * self.factor, lambda: inputs / self.factor) + self.factor


class FirstBatch(layers.Layer):  # type: ignore[misc]
    """Centers by the mean of the first batch, which a boolean remembers."""

    def build(self, shape: Any) -> None:
        self.is_set = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False)
        self.center = self.add_weight(shape=(6,), initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            mean = tf.reduce_mean(inputs, 0)
            self.center.assign(tf.where(self.is_set.value, self.center.value, mean))
            self.is_set.assign(tf.ones((), bool))
        return inputs - self.center


class Scan(layers.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(6,), initializer="ones")

    def call(self, inputs: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return carry * self.scale + row, carry + row

        return keras.ops.scan(step, keras.ops.zeros_like(inputs[0]), inputs)[1]

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class CountingCell(layers.Layer):  # type: ignore[misc]
    """A recurrent cell that writes a variable in each time step."""

    state_size = output_size = 2

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1.0)
        new = inputs * 0.1 + states[0] + self.steps
        return new, [new]


class Checked(layers.Layer):  # type: ignore[misc]
    def call(self, inputs: Any) -> Any:
        tf.debugging.assert_less(inputs, -100.0)
        return inputs


def behind(*inner: Any) -> Any:
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3)])


def of_tokens(layer: Any) -> Any:
    inputs = keras.Input((1,), dtype="int64")
    return keras.Model(inputs, layers.Dense(3)(layer(inputs)))


def recurrent(cell: Any) -> Any:
    return behind(layers.Reshape((3, 2)), layers.RNN(cell, return_sequences=True), layers.Flatten())


MODELS: dict[str, Callable[[], Any]] = {
    "tf.Variable": lambda: behind(OwnVariable()),
    "slices of a tf.Variable": lambda: behind(OwnVariableOfSlices()),
    "tf.Variable read in a branch": lambda: behind(Factor()),
    "boolean": lambda: behind(FirstBatch()),
    "scan": lambda: behind(Scan()),
    "variable written in each time step": lambda: recurrent(CountingCell()),
    "lookup table": lambda: of_tokens(layers.IntegerLookup(vocabulary=[1, 2, 3, 4], output_mode="one_hot")),
    "hashing": lambda: of_tokens(layers.Hashing(7, output_mode="one_hot")),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_steps_and_evaluation_are_those_of_keras(build: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(1)
    theirs, ours = build(), build()
    ours.set_weights(theirs.get_weights())
    compile_model(theirs, RECIPE)
    samples = TOKENS if theirs.inputs[0].dtype == "int64" else SAMPLES
    step = make_step(ours, RECIPE, samples, CLASSES)
    for number in range(3):
        batch = samples[number * 16 :][:16], CLASSES[number * 16 :][:16]
        theirs.reset_metrics()
        expected = theirs.train_on_batch(*batch, return_dict=True)["loss"]
        step.set_step(number, RECIPE.learning_rate)
        assert step.alone(*batch).mean_loss == pytest.approx(float(expected), rel=1e-5)
    expected = theirs.evaluate(*batch, verbose=0, return_dict=True)["loss"]
    assert step.evaluate(*batch).mean_loss == pytest.approx(float(expected), rel=1e-5)


class Noise(layers.Layer):  # type: ignore[misc]
    """Draws from a generator that no layer has as an attribute."""

    def call(self, inputs: Any) -> Any:
        return keras.random.normal((6,), seed=SHARED_SEED) + 0 * inputs


class MappedNoise(Noise):
    def call(self, inputs: Any) -> Any:
        return tf.map_fn(lambda row: keras.random.normal((6,), seed=SHARED_SEED) + 0 * row, inputs)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class DropoutCell(layers.Layer):  # type: ignore[misc]
    """A recurrent cell with a layer that draws in each time step."""

    state_size = output_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        return self.dropout(tf.ones_like(states[0]), training=training), [states[0]]


def gradients(build: Callable[[], Any], number: int = 0, rank: int = 0, size: int = 8) -> Any:
    """Return the gradient of the last layer's weights, a row for each of its inputs."""
    keras.utils.set_random_seed(1)
    step = make_step(build(), RECIPE, SAMPLES, CLASSES, rank=rank)
    step.set_step(number, 0.0)
    vector = np.array(step.local(SAMPLES[:size], CLASSES[:size]))[step.layout.gradients]
    return vector[:-3].reshape(-1, 3)


def test_generator_of_no_layer_draws_new_numbers_in_each_step_and_rank() -> None:
    first, next_step, of_rank_1, again = (
        gradients(lambda: behind(Noise()), *at) for at in ((0, 0), (1, 0), (0, 1), (0, 0))
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first, next_step)
    assert not np.allclose(first, of_rank_1)


def test_function_that_is_mapped_draws_new_numbers_for_each_row() -> None:
    """The gradient of one row for all samples would have the rank 1."""
    assert np.linalg.matrix_rank(gradients(lambda: behind(MappedNoise())), tol=1e-4) > 1


def test_recurrent_cell_drops_other_units_in_each_time_step() -> None:
    kept = gradients(lambda: recurrent(DropoutCell()), size=1).reshape(3, 8, 3).any(axis=2)
    assert not np.array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[1], kept[2])


class AlwaysDropout(layers.Dropout):  # type: ignore[misc]
    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call(inputs, training=True)


def test_layer_that_draws_in_evaluation_draws_other_numbers_for_each_batch() -> None:
    step = make_step(behind(AlwaysDropout(0.5)), RECIPE, SAMPLES, CLASSES)
    found = [step.evaluate(SAMPLES, CLASSES, number).mean_loss for number in (0, 1, 0)]
    assert found[0] == found[2] != found[1]


def test_assertion_of_a_layer_holds() -> None:
    step = make_step(behind(Checked()), RECIPE, SAMPLES, CLASSES)
    with pytest.raises(TensorFlowError, match="assertion failed"):
        step.local(SAMPLES, CLASSES)
