"""A step of a rank with augmentation: which batches pass through the function, and which do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.split import measure_time
from csdctl.worker.compute.step import Step
from csdctl.worker.compute.user_code import Augmentation
from csdctl.worker.protocol.recipe import Noise, Recipe
from tests.unit.worker.compute.built_models import keras, make_step

FUNCTION = """\
def shift(samples, labels, rng):
    with open(__file__ + ".sizes", "a") as sizes:
        sizes.write(f"{len(samples)} ")
    return samples + rng.normal(size=samples.shape), labels
"""
GENERATOR = np.random.default_rng(5)
SAMPLES = GENERATOR.random((7, 4), np.float32)
LABELS = (np.arange(7) % 3).astype(np.int32)


def own_step(augment: str, **options: Any) -> Step:
    keras().utils.set_random_seed(2)
    model = keras().Sequential([keras().Input((4,)), keras().layers.Dense(3, activation="softmax")])
    recipe = Recipe(learning_rate=0.5, augment=augment, seed=9)
    return make_step(model, recipe, SAMPLES, LABELS, rank=2, **options)


@pytest.fixture
def reference(tmp_path: Path) -> str:
    (tmp_path / "shifting.py").write_text(FUNCTION)
    return f"{tmp_path / 'shifting.py'}:shift"


def augmented(reference: str, step: int, num_single: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return Augmentation(reference, 9)(SAMPLES, LABELS, step, 2, num_single)


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_gradient_is_that_of_the_augmented_batch_of_this_step(
    micro_batch_size: int | None, reference: str
) -> None:
    plain, own = own_step(""), own_step(reference, micro_batch_size=micro_batch_size)
    vectors = []
    for number in (4, 5):
        own.set_step(number, 0.5)
        vectors.append(own.local(SAMPLES, LABELS))
        expected = plain.local(*augmented(reference, number))
        assert np.allclose(vectors[-1], expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(*vectors)
    assert not np.allclose(vectors[0], plain.local(SAMPLES, LABELS))


def test_rank_without_others_trains_on_the_same_batch(reference: str) -> None:
    plain, own = own_step(""), own_step(reference)
    for number in range(3):
        own.set_step(number, 0.5)
        plain.set_step(number, 0.5)
        loss = own.alone(SAMPLES, LABELS).mean_loss
        assert loss == pytest.approx(plain.alone(*augmented(reference, number)).mean_loss, rel=1e-5)


def test_measured_step_includes_the_function(reference: str) -> None:
    step = own_step(reference)
    measure_time(lambda: step.take(SAMPLES, LABELS), 0.0, num_warm_ups=2, min_count=5)
    assert Path(reference.rpartition(":")[0] + ".sizes").read_text().split() == ["7"] * 7


def test_evaluation_is_not_augmented_and_rank_0_can_take_the_random_states_of_others(reference: str) -> None:
    plain, own = own_step(""), own_step(reference)
    assert own.evaluate(SAMPLES, LABELS) == plain.evaluate(SAMPLES, LABELS)
    own.seeds.set_step(6, 0)
    expected = plain.local(*Augmentation(reference, 9)(SAMPLES, LABELS, 6, 0))
    assert np.allclose(own.local(SAMPLES, LABELS), expected, rtol=1e-5, atol=1e-6)


def test_private_samples_with_noise_are_augmented_one_by_one(reference: str) -> None:
    noise = Noise(1e6, 1e-12, 1e-5)  # no clipping, and no visible noise
    own, plain = own_step(reference, noise=noise), own_step("", noise=noise)
    own.set_step(1, 0.5)
    found = own.local(SAMPLES, LABELS, private_copies=np.ones(4, np.int64))
    sizes = Path(reference.rpartition(":")[0] + ".sizes")
    assert sizes.read_text().split() == ["1", "1", "1", "1", "3"]
    expected = plain.local(*augmented(reference, 1, 4), private_copies=np.ones(4, np.int64))
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)
