"""Clipping and noise of private samples, against a naive computation sample by sample."""

import functools
from typing import Any

import numpy as np
import pytest

from csdctl.worker.engine.step import secret_normal
from csdctl.worker.protocol.recipe import Noise, Recipe
from tests.unit.worker.compute.built_models import Step, keras, make_step

NUM_SUMS = 5
"""Loss, accuracy, number of public samples, number of samples, at the end of a vector with noise."""
TOLERANCE = 1e-5
MULTIPLIER, CLIP, PENALTY = 3.0, 3.2, 0.01
NO_NOISE = 1e-12
"""A multiplier so small that the clipped sum is unchanged."""
Array = np.ndarray[Any, Any]
GENERATOR = np.random.default_rng(5)
IMAGES = GENERATOR.random((12, 6, 6, 1), np.float32)
LABELS = GENERATOR.integers(0, 4, 12).astype(np.int32)
EVERY = np.ones(12, np.int64)


def build_step(
    multiplier: float | None,
    *,
    clip: float = CLIP,
    penalty: float = 0.0,
    activity: float = 0.0,
    **options: Any,
) -> Step:
    """Return the step of a small model. `multiplier` None is without noise."""
    layers, l2 = keras().layers, keras().regularizers.L2
    keras().utils.set_random_seed(3)
    inner = [layers.Conv2D(5, 3, kernel_regularizer=l2(penalty) if penalty else None), layers.Flatten()]
    last = layers.Dense(4, activation="softmax", activity_regularizer=l2(activity) if activity else None)
    model = keras().Sequential([keras().Input((6, 6, 1)), *inner, last])
    noise = None if multiplier is None else Noise(clip, multiplier, 1e-5)
    return make_step(model, Recipe(learning_rate=0.1), IMAGES, LABELS, noise=noise, **options)


def private(step: Step, copies: Array = EVERY) -> Array:
    """Return the vector of all samples, of which the first ones, as many as `copies`, are private."""
    return np.array(step.local(IMAGES, LABELS, private_copies=copies))


@functools.cache
def clipped(**model: float) -> Array:
    return private(build_step(NO_NOISE, **model))


@functools.cache
def naive(count: int, **model: float) -> tuple[Array, list[float]]:
    """Return the float64 sum of clipped gradients of single samples, and their norms."""
    plain, total, norms = build_step(None, **model), np.zeros(()), []
    for number in range(count):
        row = slice(number, number + 1)
        gradient = np.array(plain.local(IMAGES[row], LABELS[row]), np.float64)[plain.layout.gradients]
        norms.append(float(np.linalg.norm(gradient)))
        total = total + gradient * min(1.0, CLIP / norms[-1])
    return total, norms


def is_near(vector: Array, expected: Array) -> bool:
    return bool(np.linalg.norm(vector - expected) <= TOLERANCE * np.linalg.norm(expected))


@pytest.mark.parametrize("model", [{}, {"activity": 0.5}], ids=["plain", "with an activity loss"])
def test_every_private_sample_is_clipped_separately_over_all_variables(model: dict[str, float]) -> None:
    expected, norms = naive(12, **model)
    assert min(norms) < CLIP < max(norms), "the test needs samples above and below the limit"
    assert is_near(clipped(**model)[:-NUM_SUMS], expected)


def test_weight_penalty_is_not_clipped_and_counts_for_every_sample() -> None:
    step = build_step(NO_NOISE, penalty=PENALTY)
    kernel = step.model.layers[0].kernel.numpy().ravel()
    added = (private(step) - clipped())[: len(kernel)]
    assert np.allclose(added, 12 * 2 * PENALTY * kernel, atol=1e-4)


def test_loss_and_metrics_exclude_private_samples_and_micro_batches_and_weights_change_nothing() -> None:
    copies = np.ones(7, np.int64)
    mixed, of_5 = private(build_step(NO_NOISE), copies), build_step(None).local(IMAGES[7:], LABELS[7:])
    assert tuple(mixed[-NUM_SUMS:-1]) == pytest.approx(tuple(of_5[-4:]))
    assert mixed[-1] == 12
    assert tuple(clipped()[-NUM_SUMS:]) == (0, 0, 0, 0, 12)
    assert is_near(mixed[:-NUM_SUMS], naive(7)[0] + of_5[:-4])
    assert is_near(private(build_step(NO_NOISE, micro_batch_size=2), copies), mixed)
    assert is_near(private(build_step(NO_NOISE, weight=0.25), copies), 0.25 * mixed)


def test_rank_without_private_samples_computes_the_same_as_without_noise() -> None:
    noisy, plain = (np.array(build_step(noise).local(IMAGES, LABELS)) for noise in (1.0, None))
    assert np.array_equal(noisy[:-NUM_SUMS], plain[:-4])
    assert noisy[-1] == noisy[-2] == plain[-1] == 12


def test_sample_that_occurs_twice_in_a_batch_counts_once_and_one_that_is_not_finite_not_at_all() -> None:
    step, rows = build_step(NO_NOISE, clip=1e-3), np.tile(np.arange(4), 2)
    twice = np.array(step.local(IMAGES[rows], LABELS[rows], private_copies=np.full(8, 2)))
    once = step.local(IMAGES[:4], LABELS[:4], private_copies=np.ones(4, np.int64))
    assert is_near(twice[:-NUM_SUMS], once[:-NUM_SUMS])
    assert twice[-1] == 8
    spoilt = IMAGES.copy()
    spoilt[3] = np.inf
    vector = build_step(NO_NOISE).local(spoilt, LABELS, private_copies=EVERY)
    assert np.isfinite(vector).all()
    assert 0 < np.linalg.norm((vector - clipped())[:-NUM_SUMS]) <= CLIP * (1 + TOLERANCE)


def test_step_of_only_private_samples_is_applied_by_a_single_rank_too_and_has_no_loss() -> None:
    moved = []
    for is_alone in (False, True):
        step = build_step(NO_NOISE)
        before = np.concatenate([weights.ravel() for weights in step.model.get_weights()])
        sums = step.alone(IMAGES, LABELS, private_copies=EVERY) if is_alone else step.apply(private(step))
        assert (sums.loss, sums.count) == (0, 0)
        moved.append(np.concatenate([weights.ravel() for weights in step.model.get_weights()]) - before)
    assert np.allclose(moved[0], -0.1 * naive(12)[0] / 12, atol=1e-6)
    assert np.allclose(*moved, atol=1e-6)


def test_noise_has_the_stated_standard_deviation_and_differs_in_every_step() -> None:
    # 400 steps × more than 300 elements: the estimate is within 0.2%, 2% is ten times that.
    step = build_step(MULTIPLIER)
    noise = np.stack([(private(step) - clipped())[step.layout.gradients] for _ in range(400)])
    assert noise.size > 100_000
    assert noise.std() == pytest.approx(MULTIPLIER * CLIP, rel=0.02)
    assert abs(noise.mean()) < 0.03 * MULTIPLIER * CLIP
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.5
    assert len(np.unique(noise[:, 0])) > 390


def test_noise_has_the_weight_of_the_samples_and_is_drawn_once_for_each_element_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("csdctl.worker.engine.step.CHUNK", 100)  # the vector is longer
    step = build_step(MULTIPLIER, weight=0.25, micro_batch_size=2)
    vectors = [(private(step) - 0.25 * clipped())[step.layout.gradients] for _ in range(100)]
    assert np.std(vectors) == pytest.approx(0.25 * MULTIPLIER * CLIP, rel=0.03)
    assert np.std(vectors, axis=0).min() > 0.1 * MULTIPLIER * CLIP


def test_secret_numbers_are_normal() -> None:
    normal = secret_normal(1_000_001)
    assert len(normal) == 1_000_001
    assert np.isfinite(normal).all()
    assert (normal.mean(), normal.std()) == (pytest.approx(0, abs=0.01), pytest.approx(1, rel=0.01))
    for limit, share in ((1.0, 0.31731), (2.0, 0.04550), (3.0, 0.00270)):
        assert (np.abs(normal) > limit).mean() == pytest.approx(share, abs=0.002)
    assert (normal > 0).mean() == pytest.approx(0.5, abs=0.01)
