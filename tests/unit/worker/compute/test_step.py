"""What a step leaves as it was, weights of samples, gradient noise, and where a step is computed."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import tf
from csdctl.worker.compute.compile import make_compiler, trace
from csdctl.worker.compute.keras_internals import noting_divisors
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.engine.layout import GradientNoise
from csdctl.worker.protocol.recipe import LossTerm, Recipe
from tests.unit.worker.compute.built_models import Step, keras, make_step

RECIPE = Recipe(optimizer="adam", learning_rate=0.1, metrics=("accuracy",))
SAMPLES = np.random.default_rng(4).random((7, 6), np.float32)
CLASSES = np.array([0, 2, 1, 0, 0, 1, 2], np.int32)


def own_step(**options: Any) -> Step:
    keras().utils.set_random_seed(2)
    layers = keras().layers
    inner = [layers.Dense(5), layers.BatchNormalization(), layers.Dense(3, activation="softmax")]
    return make_step(keras().Sequential([keras().Input((6,)), *inner]), RECIPE, SAMPLES, CLASSES, **options)


def state_of(step: Step) -> list[np.ndarray[Any, Any]]:
    return [value.copy() for value in step.values]


def is_same(one: list[Any], other: list[Any]) -> bool:
    return all(map(np.array_equal, one, other))


def test_sum_over_no_samples_changes_nothing() -> None:
    """A gradient of 0 / 0 would; and one of 0, by what the optimizer remembers of earlier steps."""
    step = own_step()
    step.apply(np.array(step.local(SAMPLES, CLASSES)))
    before = state_of(step)
    sums = step.apply(np.zeros(step.layout.step_size, np.float32))
    assert is_same(state_of(step), before)
    assert np.isnan(sums.mean_loss)


def test_rehearsal_leaves_weights_statistics_and_optimizer_as_they_were() -> None:
    step = own_step()
    step.set_step(0, 0.1)
    for _ in range(2):
        step.apply(np.array(step.local(SAMPLES, CLASSES)))
        before = state_of(step)
        step.rehearse(SAMPLES, CLASSES, None)
        step.evaluate(SAMPLES, CLASSES)
        assert is_same(state_of(step), before)
    assert int(step.model.optimizer.iterations) == 2


@pytest.mark.parametrize("count", [0, 2, 7])
@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_buffer_has_the_vector_of_this_step_alone(count: int, micro_batch_size: int | None) -> None:
    step = own_step(micro_batch_size=micro_batch_size)
    expected = np.array(step.local(SAMPLES[:count], CLASSES[:count]))
    out = np.full(step.layout.step_size, 7.0, np.float32)
    assert np.array_equal(step.local(SAMPLES[:count], CLASSES[:count], out), expected)
    assert np.array_equal(out, expected)
    assert out[step.layout.count] == count
    assert out.any() == (count > 0)


def test_rank_alone_counts_its_samples_with_their_weight() -> None:
    apart, alone = own_step(weight=0.25), own_step(weight=0.25)
    expected = apart.apply(np.array(apart.local(SAMPLES, CLASSES)))
    found = alone.alone(SAMPLES, CLASSES)
    assert (found.count, found.loss) == pytest.approx((expected.count, expected.loss))
    assert found.states == pytest.approx(expected.states)
    assert expected.count == pytest.approx(0.25 * len(SAMPLES))
    for one, other in zip(state_of(apart), state_of(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 13), (8, 8), (1, 1, 30)])
def test_noise_scale_of_a_quadratic_is_that_of_its_samples(sizes: tuple[int, ...]) -> None:
    """The mean squared distance to points around (2, …, 2), whose gradient at 0 and covariance are known."""
    elements, spread, num_steps = 10, 5.0, 400
    dense = keras().layers.Dense(elements, kernel_initializer="zeros")
    model = keras().Sequential([keras().Input((1,)), dense])
    points = np.random.default_rng(1).normal(2, spread, (num_steps, sum(sizes), elements)).astype(np.float32)
    nothing = np.zeros((sum(sizes), 1), np.float32)
    recipe = Recipe(losses={"": LossTerm("mean_squared_error")}, optimizer="sgd", learning_rate=0.1)
    step = make_step(model, recipe, nothing, points[0], micro_batch_size=13)
    noise, bounds = GradientNoise(), np.cumsum([0, *sizes])
    for batch in points:
        parts = [np.array(step.local(nothing[a:b], batch[a:b])) for a, b in pairwise(bounds)]
        norms, whole = sum(map(step.square_norm, parts)), step.square_norm(np.sum(parts, axis=0))
        noise += GradientNoise.estimate(norms, whole, len(sizes), sum(sizes))
    per_step = np.array([noise.variance, noise.square]) / num_steps
    np.testing.assert_allclose(per_step, [4 * spread**2 / elements, 4 * 2**2 / elements], rtol=0.12)
    assert noise.scale == pytest.approx(spread**2 / 2**2, rel=0.2)


def test_noise_of_a_single_batch_is_not_known() -> None:
    assert GradientNoise.estimate(3.0, 2.0, 1, 8.0).scale is None
    assert GradientNoise.estimate(float("nan"), 2.0, 2, 8.0).scale is None
    step = own_step()
    assert step.square_norm(np.zeros(step.layout.step_size, np.float32)) == 0


def test_samples_read_twice_at_half_weight_count_once() -> None:
    once = np.array(own_step().local(SAMPLES, CLASSES))
    twice = own_step(weight=0.5).local(np.tile(SAMPLES, (2, 1)), np.tile(CLASSES, 2))
    np.testing.assert_allclose(twice, once, rtol=1e-5, atol=1e-6)
    assert twice[-1] == len(SAMPLES)


def test_weights_that_are_freed_have_divisors_of_their_own() -> None:
    loss, divisors = keras().losses.MeanSquaredError(reduction="mean_with_sample_weight"), dict[Any, Any]()
    with noting_divisors(divisors):
        for weight in (1.0, 2.0, 3.0):
            loss(np.zeros((4, 1)), np.ones((4, 1)), sample_weight=np.full(4, weight))
    assert [float(divisor) for divisor, *_ in divisors.values()] == [4.0, 8.0, 12.0]


class Own(keras().Model):  # type: ignore[misc]
    """Moves statistics after its last gradients."""

    def train_step(self, batch: Any) -> Any:
        samples, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.compute_loss(samples, labels, self(samples, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self(samples, training=True)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [keras().Model, Own])
def test_gradients_may_be_computed_on_a_gpu_but_weights_are_changed_on_the_cpu(kind: Any) -> None:
    inputs = keras().Input((6,))
    hidden = keras().layers.BatchNormalization()(keras().layers.Dense(5)(inputs))
    model = kind(inputs, keras().layers.Dense(3, activation="softmax")(hidden))
    recipe = compile_model(model, Recipe(optimizer="adam", learning_rate=0.1))
    empty = np.zeros((0, 6), np.float32), np.zeros(0, np.int32)
    _, builder = trace(make_compiler(model, recipe, empty))
    places: dict[str, set[str]] = {}
    for operation in builder.graph.get_operations():
        places.setdefault(operation.type, set()).add(operation.device)
    assert places["MatMul"] == places["SparseSoftmaxCrossEntropyWithLogits"] == {""}
    # Adam has the square root, the update of statistics a maximum.
    assert places["Sqrt"] == places["Maximum"] == {"/device:CPU:0"}
