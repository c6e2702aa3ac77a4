"""Transfer on real pictures: a base that knows five classes of Fashion-MNIST learns the other five.

By features as with the frozen base in every step, and better than from scratch in as many epochs.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.sample_data import fetch_fashion_mnist
from tests.emulated.running import csdctl
from tests.emulated.training import events_of

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_PRETRAINING, NUM_PUBLIC, NUM_PRIVATE, NUM_VALIDATION = 4000, 240, 80, 1000
EPOCHS = 2
MODEL = """\
import keras
from keras import layers


def base():
    return keras.Sequential([
        keras.Input((28, 28, 1)),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.BatchNormalization(),
        layers.Flatten(),
    ], name="base")


def build(weights="base.weights.h5"):
    first = base()
    if weights:
        first.load_weights(weights)
        first.trainable = False
    inputs = keras.Input((28, 28, 1))
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(first(inputs)))


def build_from_scratch():
    return build(weights="")
"""
PRETRAIN = """\
import keras, model, numpy as np
keras.utils.set_random_seed(3)
first = model.base()
whole = keras.Sequential([first, keras.layers.Dense(5, activation="softmax")])
whole.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy")
with np.load("old.npz") as data:
    whole.fit(data["x"] / np.float32(255), data["y"], batch_size=32, epochs=3, verbose=0)
first.save_weights("base.weights.h5")
"""
JOB = f"""\
model: model.py:build
data:
  public: {{path: public.npz}}
  private: {{path: ~/private.npz}}
  validation: {{path: validation.npz}}
recipe:
  {{epochs: {EPOCHS}, optimizer: adam, learning_rate: 0.002, reference_batch: 24, metrics: [accuracy]}}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("transfer")
    fashion = fetch_fashion_mnist(directory / "fashion")
    is_new = fashion.train_labels >= 5
    old, new = np.flatnonzero(~is_new)[:NUM_PRETRAINING], np.flatnonzero(is_new)
    validation = np.flatnonzero(fashion.test_labels >= 5)[:NUM_VALIDATION]
    np.savez(directory / "old.npz", x=fashion.train_images[old], y=fashion.train_labels[old])
    np.savez(
        directory / "validation.npz",
        x=fashion.test_images[validation],
        y=fashion.test_labels[validation] - 5,
    )
    assert csdctl(directory, "emulate", "up", "--nodes", "2", "--cpu", "1").returncode == 0
    nodes = directory / ".csdctl" / "emulated" / "nodes"
    start = 0
    for place, size in (
        (directory / "public.npz", NUM_PUBLIC),
        *((nodes / f"csd{number}" / "home" / "private.npz", NUM_PRIVATE) for number in range(2)),
    ):
        part = new[start : start + size]
        start += size
        np.savez(place, x=fashion.train_images[part], y=fashion.train_labels[part] - 5)
    (directory / "model.py").write_text(MODEL)
    (directory / "job.yaml").write_text(JOB)
    (directory / "scratch.yaml").write_text(JOB.replace(":build", ":build_from_scratch"))
    subprocess.run([sys.executable, "-c", PRETRAIN], cwd=directory, check=True, capture_output=True)
    yield directory
    csdctl(directory, "emulate", "down")


def train(project: Path, *arguments: str) -> tuple[float, list[tuple[float, float]]]:
    """Return the validation accuracy, and the losses of training and validation after each epoch."""
    done = csdctl(
        project, "train", *arguments, "--batch-size", "8", "--no-rebalance", "--skip-doctor", "--json"
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ends = [event for event in events_of(project / report["path"], "EpochEnd") if event["rank"] == 0]
    return report["validation_accuracy"], [(event["loss"], event["validation_loss"]) for event in ends]


def test_features_learn_as_the_frozen_base_and_more_than_from_scratch(project: Path) -> None:
    frozen, losses = train(project, "job.yaml")
    by_features, same_losses = train(project, "job.yaml", "--strategy", "features")
    from_scratch, _ = train(project, "scratch.yaml")
    print(f"\nfrozen {frozen:.4f}, features {by_features:.4f}, from scratch {from_scratch:.4f}; {losses}")
    assert len(losses) == EPOCHS
    np.testing.assert_allclose(same_losses, losses, rtol=1e-5)
    assert by_features == pytest.approx(frozen, abs=1.5 / NUM_VALIDATION)  # one sample may be on the border
    assert by_features > from_scratch + 0.03
