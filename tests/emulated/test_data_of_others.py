"""Models as other people have them: samples without a weight, and a layer that only train_step uses."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.running import document, emulated, refuse, succeed
from tests.emulated.training import nothing_is_left

MODEL = """
import keras
import tensorflow as tf
from keras import layers


def masked():
    steps = layers.LSTM(2, return_sequences=True)
    last = layers.Dense(3, "softmax")
    model = keras.Sequential([keras.Input((6,)), layers.Embedding(9, 2, mask_zero=True), steps, last])
    model.compile("sgd", "sparse_categorical_crossentropy")
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
JOB = "model: model.py:{}\ndata: {{public: {{path: data.npz}}}}\nrecipe: {{epochs: 1}}\n"
OPTIONS = ("--batch-size", "8", "--skip-doctor")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("others"), 2, {"model.py": MODEL}) as directory:
        yield directory


def test_epoch_without_any_weight_ends_with_a_sentence_and_without_a_model(project: Path) -> None:
    np.savez(project / "data.npz", x=np.zeros((24, 6), np.int64), y=np.zeros((24, 6), np.int64))
    (project / "job.yaml").write_text(JOB.format("masked"))
    said = refuse(project, "train", *OPTIONS)
    assert "epoch 1 has no loss: the weights of all samples are 0 or add up to 0, or all of them are" in said
    run = max((project / ".csdctl" / "runs").iterdir())
    assert not (run / "model.keras").exists()
    assert nothing_is_left(project, run)


@pytest.mark.thorough
def test_layer_that_only_train_step_uses_is_trained_and_verified(project: Path) -> None:
    samples = np.random.default_rng(0).random((24, 8, 8, 1), np.float32)
    np.savez(project / "data.npz", x=samples, y=np.arange(24) % 2)
    (project / "job.yaml").write_text(JOB.format("autoencoder"))
    assert succeed(project, "verify").returncode == 0
    assert np.isfinite(document(project, "train", *OPTIONS)["loss"])
