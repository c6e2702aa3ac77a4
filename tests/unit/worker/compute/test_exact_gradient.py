"""N ranks with unequal batches compute the gradient of one process on the union.

See docs/explanation/exact-gradients.md for the mathematics.
"""

import functools
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.step import Step
from csdctl.worker.protocol.recipe import Recipe
from tests.unit.worker.compute.built_models import keras, make_step

NUM_SAMPLES = 23
DIVISIONS = {"unequal": [12, 7, 4], "a rank with 0 samples": [20, 3, 0], "rank 0 with 0 samples": [0, 22, 1]}
TOLERANCE = 1e-6
NUM_SUMS = 4
"""Loss, the total and count of the accuracy, and n at the end of a vector."""
GENERATOR = np.random.default_rng(11)
IMAGES = GENERATOR.integers(0, 256, (NUM_SAMPLES, 9, 9, 3), dtype=np.uint8)
# Unbalanced classes: with balanced ones the gradients of an untrained model nearly cancel, and a relative
# difference would measure rounding inside TensorFlow's kernels instead of the ranks.
LABELS = GENERATOR.choice(5, NUM_SAMPLES, p=[0.6, 0.1, 0.1, 0.1, 0.1]).astype(np.int32)
MODELS = ("without batch norm", "batch norm frozen")


@functools.cache
def step_of(name: str, weight: float = 1.0) -> Step:
    """Return the step of a small convolutional network; its regularizer counts in the gradient."""
    keras().utils.set_random_seed(3)
    layers = keras().layers
    inner = [layers.Conv2D(8, 3, kernel_regularizer=keras().regularizers.L2(0.01))]
    if name != "without batch norm":
        inner.append(layers.BatchNormalization(trainable=False))
    inner += [layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(5, activation="softmax")]
    model = keras().Sequential([keras().Input((9, 9, 3)), *inner])
    return make_step(model, Recipe(learning_rate=0.1), IMAGES, LABELS, weight=weight)


def vector_of(name: str, rows: Any, weight: float = 1.0) -> np.ndarray:
    return np.array(step_of(name, weight).local(IMAGES[rows], LABELS[rows]))


def vectors_of(name: str, division: str) -> list[np.ndarray]:
    """Return the vector of each rank."""
    rows = np.split(np.arange(NUM_SAMPLES), np.cumsum(DIVISIONS[division])[:2])
    return [vector_of(name, part) for part in rows]


def mean_gradient(vector: np.ndarray) -> np.ndarray:
    return vector[:-NUM_SUMS] / vector[-1]


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("division", DIVISIONS)
def test_ranks_with_unequal_batches_compute_the_gradient_of_one_process(model: str, division: str) -> None:
    of_host, *others = vectors_of(model, division)
    alone, total = vector_of(model, slice(None)), sum(others) + of_host
    difference = relative_difference(mean_gradient(total), mean_gradient(alone))
    print(f"relative difference of the gradient: {difference:.1e}")
    assert difference <= TOLERANCE
    assert relative_difference(total[-NUM_SUMS:], alone[-NUM_SUMS:]) <= TOLERANCE
    assert total[-1] == NUM_SAMPLES


def test_mean_of_means_differs_from_the_exact_gradient() -> None:
    """The tolerance above is tight enough to detect a plain mean of gradients."""
    for model in MODELS:
        mean_of_means = np.mean([mean_gradient(vector) for vector in vectors_of(model, "unequal")], axis=0)
        exact = mean_gradient(vector_of(model, slice(None)))
        assert relative_difference(mean_of_means, exact) > 1000 * TOLERANCE


def test_samples_read_twice_at_half_weight_count_once() -> None:
    once, twice = vector_of(MODELS[0], np.arange(10)), vector_of(MODELS[0], np.tile(np.arange(10), 2), 0.5)
    assert relative_difference(twice, once) <= TOLERANCE
    assert twice[-1] == 10
