"""Data and models as other people have them: numbers that are kept or refused, and what fit trains."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from tests.emulated.running import document, emulated, home_of, refuse, succeed
from tests.emulated.training import nothing_is_left

MODEL = """
import keras
import tensorflow as tf
from keras import layers


def dense(outputs=1, activation=None, loss="mean_squared_error"):
    keras.utils.set_random_seed(4)
    last = layers.Dense(outputs, activation)
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(4, "relu"), last])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def masked():
    steps = layers.LSTM(2, return_sequences=True)
    last = layers.Dense(3, "softmax")
    model = keras.Sequential([keras.Input((6,)), layers.Embedding(9, 2, mask_zero=True), steps, last])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.flat, self.last = layers.Flatten(), layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.last(self.flat(x))


def unbuilt():
    model = Unbuilt()
    model.compile("sgd", "mean_squared_error")
    return model


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.flat, self.mean, self.spread = layers.Flatten(), layers.Dense(2), layers.Dense(2)
        self.decoder = layers.Dense(64)

    def build(self, shape):
        self.mean.build((None, 64))
        self.decoder.build((None, 2))
        self.built = True

    def call(self, x):
        return self.decoder(self.mean(self.flat(x)))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            x = self.flat(data[0])
            mean, spread = self.mean(x), self.spread(x)
            spread = tf.reduce_mean(tf.exp(spread) - spread)
            loss = tf.reduce_mean((self.decoder(mean) - x) ** 2) + spread
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


def autoencoder():
    keras.utils.set_random_seed(4)
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(0.01))
    return model
"""
CRASH = "import os\n\n\ndef load(path):\n    os._exit(3)\n"
X = np.random.default_rng(0).random((24, 8, 8, 1), np.float32)
Y = np.arange(24) % 2
OPTIONS = ("--batch-size", "8", "--skip-doctor")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    files = {"model.py": MODEL, "crash.py": CRASH}
    with emulated(tmp_path_factory.mktemp("others"), 2, files) as directory:
        np.savez(directory / "data.npz", x=X, y=Y)
        yield directory


def write_job(
    project: Path, model: str = "dense", public: str = "data.npz", recipe: str = "", more: str = ""
) -> None:
    text = (
        f"model: model.py:{model}\ndata:\n  public: {{path: {public}}}\n{more}recipe: {{epochs: 1{recipe}}}\n"
    )
    (project / "job.yaml").write_text(text)


def test_nan_in_a_private_file_is_named_by_node_and_row(project: Path) -> None:
    for node, row in (("csd0", None), ("csd1", 17)):
        samples = X.copy()
        samples[row if row else 0, 3, 3] = np.nan if row else 0
        np.savez(home_of(project, node) / "private.npz", x=samples, y=Y)
    write_job(project, more="  private: {path: ~/private.npz}\n")
    said = refuse(project, "prepare")
    assert "csd1: data at ~/private.npz has NaN or infinity in samples, row 17 (counted from 0)" in said
    assert "csd0" not in said


def test_epoch_without_any_weight_ends_with_a_sentence_and_without_a_model(project: Path) -> None:
    np.savez(project / "masked.npz", x=np.zeros((24, 6), np.int64), y=np.zeros((24, 6), np.int64))
    write_job(project, "masked", "masked.npz")
    said = refuse(project, "train", *OPTIONS)
    assert "epoch 1 has no loss: the weights of all samples are 0 or add up to 0, or all of them are" in said
    run = max((project / ".csdctl" / "runs").iterdir())
    assert not (run / "model.keras").exists()
    assert nothing_is_left(project, run)


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["dense", "unbuilt"])
def test_targets_beyond_int32_have_the_loss_of_fit(project: Path, model: str) -> None:
    targets = Y + 3_000_000_000
    np.savez(project / "large.npz", x=X, y=targets)
    write_job(project, model, "large.npz")
    found = document(project, "train", *OPTIONS, "--max-steps", "1")
    load_backend()
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    expected = scope[model]().test_on_batch(X, targets, return_dict=True)["loss"]
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.thorough
def test_layer_that_only_train_step_uses_is_trained_and_verified(project: Path) -> None:
    write_job(project, "autoencoder")
    assert succeed(project, "verify").returncode == 0
    assert np.isfinite(document(project, "train", *OPTIONS)["loss"])


@pytest.mark.thorough
def test_function_that_ends_the_process_of_a_node_is_named(project: Path) -> None:
    write_job(project, more="  private: {path: ~/, function: crash.py:load}\n")
    said = refuse(project, "prepare", code=1)
    assert "csd0: preparing data failed with exit code 3" in said
    assert "most likely your function load, or a library of it, ended the process" in said
