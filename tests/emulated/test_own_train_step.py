"""A GAN with its own train_step, also on ranks that are killed.

The model itself ends its rank between the sums of a step, of the discriminator and of the generator, when it
finds a file that asks for it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.running import document, emulated, succeed
from tests.emulated.training import (
    assert_all_read_once,
    events_of,
    hash_at_the_end,
    resumed_from,
    start_run,
    wait_until_all_train,
)
from tests.patience import communicate

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES, NUM_FEATURES, EPOCHS = 1200, 16, 40
JOB = f"""\
model: gan.py:build
data:
  public: {{path: samples.npz, function: gan.py:load}}
recipe: {{epochs: {EPOCHS}, reference_batch: 24}}
"""
GAN = """\
import os
import signal
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers


STOP = Path(__file__).parent / "stop"


def stop_if_asked():
    try:
        Path(f"{STOP}-{os.environ.get('CSDCTL_EMULATED_NODE', 'host')}").unlink()
    except OSError:
        return np.float32(0)
    os.kill(os.getpid(), signal.SIGKILL)


class GAN(keras.Model):
    def __init__(self, latent=8):
        super().__init__()
        self.latent = latent
        self.discriminator = keras.Sequential([keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(1)])
        hidden = [layers.Dense(32), layers.BatchNormalization(), layers.ReLU()]
        self.generator = keras.Sequential([keras.Input((latent,)), *hidden, layers.Dense(16)])
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        count = tf.shape(real)[0]
        made = self.generator(tf.random.normal((count, self.latent)), training=True)
        both = tf.concat([made, real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        tf.numpy_function(stop_if_asked, [], tf.float32)
        with tf.GradientTape() as tape:
            made = self.generator(tf.random.normal((count, self.latent)), training=True)
            g_loss = self.loss_fn(tf.zeros((count, 1)), self.discriminator(made))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def build():
    gan = GAN()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    gan.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3), loss)
    return gan


def load(path):
    return np.load(path)["x"]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("gan")
    gan = GAN.replace("Path(__file__).parent", f"Path({str(directory)!r})")
    files = {"job.yaml": JOB, "gan.py": gan}
    with emulated(directory, 2, files):
        generator = np.random.default_rng(0)
        np.savez(
            directory / "samples.npz", x=generator.normal(size=(NUM_SAMPLES, NUM_FEATURES)).astype(np.float32)
        )
        succeed(directory, "prepare")
        yield directory


def test_ranks_that_are_lost_between_two_sums_of_a_step_take_it_again(project: Path) -> None:
    """All ranks have the same bits then, and no sample is read twice or left out."""
    assert document(project, "verify")["is_equal"]
    process, run = start_run(project, "--batch-size", "8", "--skip-doctor")
    for number, node in enumerate(("csd1", "host"), 1):
        stop = project / f"stop-{node}"
        stop.touch()
        wait_until_all_train(process, run, number)
        assert not stop.exists(), "the rank has ended elsewhere"
        resumed_from(run, number)
    output, _ = communicate(process, project)
    assert process.returncode == 0, output
    assert hash_at_the_end(run)
    ends = [event for event in events_of(run, "EpochEnd") if event["node"] == "host"]
    assert {event["epoch"] for event in ends} == {*range(1, EPOCHS + 1)}
    assert {"d_loss", "g_loss"} <= set(ends[-1]["metrics"])
    assert_all_read_once(run, NUM_SAMPLES)
