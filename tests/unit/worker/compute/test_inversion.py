"""What a linear map gets back of pictures: nearly all behind a first linear layer, little behind a mean."""

import numpy as np
import pytest

from csdctl.worker.compute.inversion import (
    MAX_COLUMNS,
    MAX_SAMPLES,
    Inversion,
    invert,
    invert_prefix,
    reduce_columns,
    reduce_samples,
)
from tests.unit.worker.compute.built_models import keras

NUM_SAMPLES = 1200


def pictures(count: int, size: int = 16) -> np.ndarray:
    """Return pictures (count, size, size, 1) with two bright rectangles each."""
    generator = np.random.default_rng(3)
    found = generator.integers(0, 40, (count, size, size, 1)).astype(np.uint8)
    for picture in found:
        for _ in range(2):
            row, column = generator.integers(0, size - 4, 2)
            height, width = generator.integers(3, size // 2, 2)
            picture[row : row + height, column : column + width] += np.uint8(generator.integers(50, 100))
    return found


def inverted(layer: str) -> Inversion:
    layers = keras().layers
    keras().utils.set_random_seed(2)
    inputs = keras().Input((16, 16, 1))
    x = layers.Conv2D(8, 3, name="linear")(inputs)
    x = layers.ReLU()(x)
    x = layers.GlobalAveragePooling2D(name="pooled")(x)
    model = keras().Model(inputs, layers.Dense(2)(x))
    prefix = keras().Model(model.inputs, model.get_layer(layer).output)
    samples = pictures(NUM_SAMPLES)
    found = invert_prefix(
        lambda rows: samples[rows], NUM_SAMPLES, lambda some: np.asarray(prefix(some / 255.0))
    )
    assert found
    return found


def test_first_linear_layer_is_inverted() -> None:
    found = inverted("linear")
    assert found.r2 > 0.98
    assert found.correlation > 0.99
    assert found.correlation > found.mean_correlation + 0.3


def test_global_mean_reveals_little() -> None:
    found = inverted("pooled")
    assert found.r2 < 0.3
    assert found.correlation < 0.7


@pytest.mark.parametrize(("count", "is_constant"), [(0, False), (10, False), (60, True)])
def test_nothing_is_claimed_without_pictures_to_judge_by(count: int, *, is_constant: bool) -> None:
    samples = np.ones((count, 4)) if is_constant else np.random.default_rng(0).random((count, 4))
    assert invert(samples, samples) is None


def test_activations_that_say_nothing_recover_nothing() -> None:
    samples = np.random.default_rng(0).random((300, 30))
    found = invert(samples, np.zeros((300, 5)))
    assert found
    assert abs(found.r2) < 0.05


def test_large_pictures_and_activations_are_reduced() -> None:
    assert reduce_samples(np.zeros((2, 96, 96, 3), np.uint8)).shape == (2, 32 * 32 * 3)
    assert reduce_samples(np.zeros((2, 500, 7, 40), np.uint8)).shape[1] <= MAX_COLUMNS
    assert reduce_samples(np.zeros((2, 100_000), np.float32)).shape[1] <= MAX_COLUMNS
    wide = np.random.default_rng(0).random((50, 30_000)).astype(np.float32)
    narrow = reduce_columns(wide)
    assert narrow.shape == (50, MAX_COLUMNS)
    distances = [np.linalg.norm(rows[0] - rows[1]) for rows in (wide, narrow)]
    assert distances[1] == pytest.approx(distances[0], rel=0.1)


def test_no_more_samples_are_read_than_fit_into_memory() -> None:
    read: list[int] = []

    def compute(some: np.ndarray) -> np.ndarray:
        read.append(len(some))
        return some[:, :2]

    invert_prefix(lambda rows: np.random.default_rng(1).random((len(rows), 3)), 10_000, compute)
    assert sum(read) == MAX_SAMPLES
