"""A custom loop as the step of a job, and a model with its own train_step from Python, on a fleet."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from csdctl.api.interface import load_run
from tests.emulated.running import document, emulated, result_of_script, succeed
from tests.emulated.test_own_train_step import GAN
from tests.emulated.training import events_of, hash_at_the_end

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

JOB = """\
model: loop.py:build
step: loop.py:step
data:
  public: {path: samples.npz, function: loop.py:load}
recipe: {epochs: 1, reference_batch: 16}
"""
LOOP = """\
import keras
import numpy as np
import tensorflow as tf

optimizer = keras.optimizers.Adam(0.01)
accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build():
    hidden = [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    return keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(3)])


def step(model, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_of(y, logits)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    accuracy.update_state(y, logits)
    return {"loss": loss}


def load(path):
    x = np.load(path)["x"]
    return x, x[:, :3].argmax(axis=1)
"""
PROGRAM = """\
import json

import keras
import numpy as np
from python_gan import GAN

import csdctl

if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    gan = GAN(latent=4)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    gan.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(2e-3), loss)
    x = np.load("samples.npz")["x"]
    job = csdctl.Job.from_model(gan, x, directory="gan", code=["python_gan.py"], reference_batch=16)
    csdctl.prepare(job)
    verified = csdctl.verify(job)
    run = csdctl.train(job, batch_size=8, options=csdctl.TrainOptions(max_steps=5))
    print("RESULT", json.dumps({"run": run.id, "verified": list(verified.nodes)}))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    files = {"loop.yaml": JOB, "loop.py": LOOP, "python_gan.py": GAN, "program.py": PROGRAM}
    with emulated(tmp_path_factory.mktemp("loop"), 1, files) as directory:
        x = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
        np.savez(directory / "samples.npz", x=x)
        succeed(directory, "discover")
        yield directory


def test_step_of_a_custom_loop_goes_from_prepare_to_report(project: Path) -> None:
    succeed(project, "prepare", "loop.yaml")
    verified = document(project, "verify", "loop.yaml")
    assert verified["is_equal"], verified
    succeed(project, "tune", "loop.yaml", "--probe-seconds", "0.3", "--max-global-batch", "48")
    succeed(project, "train", "loop.yaml", "--batch-size", "8", "--max-steps", "20", "--skip-doctor")
    run = load_run("latest", project).directory.path
    assert hash_at_the_end(run)
    (end,) = (event for event in events_of(run, "EpochEnd") if event["node"] == "host")
    assert set(end["metrics"]) == {"accuracy"}
    assert end["learning_rate"] == pytest.approx(0.01)
    assert document(project, "report")["state"] == "completed"


def test_model_with_its_own_train_step_and_compile_is_trained_from_python(project: Path) -> None:
    _, result = result_of_script(project, "program.py")
    assert result["verified"] == ["host", "csd0"]
    run = load_run(result["run"], project).directory.path
    assert hash_at_the_end(run)
    (end,) = (event for event in events_of(run, "EpochEnd") if event["node"] == "host")
    assert set(end["metrics"]) == {"d_loss", "g_loss"}
