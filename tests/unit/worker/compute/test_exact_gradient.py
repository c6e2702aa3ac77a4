"""N ranks with unequal batches compute the gradient of one process on the union.

See docs/explanation/exact-gradients.md for the mathematics.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.launch.mpirun import ALLOW_ROOT
from csdctl.worker.protocol.recipe import Recipe
from tests.patience import run_command
from tests.unit.worker.compute.built_models import carry, keras

PROGRAM = Path(__file__).parent / "ranks_program.py"
NUM_SAMPLES = 23
NUM_RANKS = 3
DIVISIONS = {"unequal": [12, 7, 4], "a rank with 0 samples": [20, 3, 0], "rank 0 with 0 samples": [0, 22, 1]}
TOLERANCE = 1e-6
NUM_SUMS = 4
"""Loss, the total and count of the accuracy, and n at the end of a vector."""
RECIPE = Recipe(optimizer="sgd", optimizer_args={"momentum": 0.9}, learning_rate=0.1)
STATISTICS = (4, 5)
"""Indices of moving mean and variance among the weights, after the convolution's and BN's γ and β."""
MODELS = ("without batch norm", "batch norm frozen", "batch norm trained")


def build(name: str) -> Any:
    """A small convolutional network; its regularizer counts in the gradient."""
    layers = keras().layers
    inner = [layers.Conv2D(8, 3, kernel_regularizer=keras().regularizers.L2(0.01))]
    if name != "without batch norm":
        inner.append(layers.BatchNormalization(trainable=name != "batch norm frozen"))
    inner += [layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(5, activation="softmax")]
    return keras().Sequential([keras().Input((9, 9, 3)), *inner])


@pytest.fixture(scope="module")
def results_of_all_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all DIVISIONS with all MODELS in one mpirun; return the parent of their directories."""
    directory = tmp_path_factory.mktemp("ranks")
    generator = np.random.default_rng(11)
    images = generator.integers(0, 256, (NUM_SAMPLES, 9, 9, 3), dtype=np.uint8)
    # Unbalanced classes: with balanced ones the gradients of an untrained model nearly cancel, and a relative
    # difference would measure rounding inside TensorFlow's kernels instead of the ranks.
    labels = generator.choice(5, NUM_SAMPLES, p=[0.6, 0.1, 0.1, 0.1, 0.1])
    for name in MODELS:
        (directory / name).mkdir()
        keras().utils.set_random_seed(3)
        carry(build(name), directory / name, RECIPE)
        np.save(directory / name / "images.npy", images)
        np.save(directory / name / "labels.npy", labels.astype(np.int32))
    mpirun = Path(sys.prefix) / "bin" / "mpirun"
    options = ["--map-by", ":OVERSUBSCRIBE", "--mca", "pml", "ob1", "--mca", "coll", "^han"]
    directories = [str(directory / name) for name in MODELS]
    program = [sys.executable, str(PROGRAM), json.dumps(list(DIVISIONS.values())), *directories]
    command = [str(mpirun), *options, "-np", str(NUM_RANKS), *program]
    done = run_command(command, env={**os.environ, **ALLOW_ROOT})
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


@pytest.fixture(params=["without batch norm", "batch norm frozen"])
def results(request: pytest.FixtureRequest, results_of_all_models: Path) -> Path:
    return results_of_all_models / str(request.param)


def mean_gradient(vector: np.ndarray) -> np.ndarray:
    return vector[:-NUM_SUMS] / vector[-1]


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("division", DIVISIONS)
def test_ranks_with_unequal_batches_compute_the_gradient_of_one_process(results: Path, division: str) -> None:
    alone = np.load(results / "alone.npy")
    total = np.load(results / f"division-{list(DIVISIONS).index(division)}-rank-0.npz")["total"]
    difference = relative_difference(mean_gradient(total), mean_gradient(alone))
    print(f"relative difference of the gradient: {difference:.1e}")
    assert difference <= TOLERANCE
    assert relative_difference(total[-NUM_SUMS:], alone[-NUM_SUMS:]) <= TOLERANCE
    assert total[-1] == NUM_SAMPLES
    assert weights_of_all(results, list(DIVISIONS).index(division))


def test_mean_of_means_differs_from_the_exact_gradient(results: Path) -> None:
    """The tolerance above is tight enough to detect a plain mean of gradients."""
    locals_ = [np.load(results / f"division-0-rank-{rank}.npz")["local"] for rank in range(NUM_RANKS)]
    mean_of_means = np.mean([mean_gradient(vector) for vector in locals_], axis=0)
    assert (
        relative_difference(mean_of_means, mean_gradient(np.load(results / "alone.npy"))) > 1000 * TOLERANCE
    )


def weights_of_all(results: Path, number: int) -> list[np.ndarray]:
    """Return the weights after a step, which are bit-identical on all ranks."""
    weights = [
        list(np.load(results / f"division-{number}-weights-{rank}.npz").values()) for rank in range(NUM_RANKS)
    ]
    for other in weights[1:]:
        assert all(np.array_equal(one, its) for one, its in zip(weights[0], other, strict=True))
    return weights[0]


def test_samples_read_twice_at_half_weight_count_once(results: Path) -> None:
    once, twice = np.load(results / "once.npy"), np.load(results / "twice.npy")
    assert relative_difference(twice, once) <= TOLERANCE
    assert twice[-1] == 10


def test_moving_statistics_on_all_ranks_are_those_of_the_pooled_batch(results_of_all_models: Path) -> None:
    """They are bit-identical on all ranks, and mean and variance are those of all samples together."""
    results = results_of_all_models / "batch norm trained"
    for number in range(len(DIVISIONS)):
        weights = weights_of_all(results, number)
        # One process with all samples in one batch sees the pooled mean and variance.
        alone = list(np.load(results / "alone-weights.npz").values())
        for index in STATISTICS:
            assert np.allclose(weights[index], alone[index], rtol=1e-4, atol=1e-6)
