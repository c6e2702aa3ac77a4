"""The Python interface in a user's script, on an emulated fleet: own layer, own data, the run's results."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from csdctl import load_run
from tests.emulated.running import emulated, result_of_script, succeed

pytestmark = pytest.mark.emulated
LAYERS = """\
import keras


class Scaled(keras.layers.Layer):
    def __init__(self, factor, **more):
        super().__init__(**more)
        self.factor = factor

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}
"""
PROGRAM = """\
import json

import keras
import numpy as np
from own_layers import Scaled

import csdctl


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    middle = Scaled(2.0)(keras.layers.Dense(16, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(middle))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    x = generator.random((600, 8), np.float32)
    y = x[:, :3].argmax(axis=1)
    job = csdctl.Job.from_model(
        build(),
        (x, y),
        validation=(x[:100], y[:100]),
        directory=".",
        code=["own_layers.py"],
        epochs=3,
        reference_batch=64,
    )
    fleet = csdctl.load_fleet("fleet.yaml")
    discovered = csdctl.discover(fleet)
    prepared = csdctl.prepare(job, fleet)
    events: list[dict[str, object]] = []
    options = csdctl.TrainOptions(is_balanced=False, max_steps=25)
    csdctl.train(job, fleet, batch_size=32, options=options)
    run = csdctl.train(job, resume="latest", callbacks=[events.append])
    model = run.model(custom_objects={"Scaled": Scaled})
    loss, accuracy = model.evaluate(x[:100], y[:100], verbose=0)
    report = run.report()
    print(
        "RESULT",
        json.dumps(
            {
                "history": run.history,
                "loss": loss,
                "accuracy": accuracy,
                "state": report.state,
                "machines": sorted(discovered.facts),
                "num_public": prepared.public.num_samples,
                "same_run": csdctl.load_run() == csdctl.load_run(run.id) == run,
                "epochs_seen": [e["epoch"] for e in events if e["event"] == "EpochEnd" and e["rank"] == 0],
                "nodes": [rank.node for rank in report.ranks],
            }
        ),
    )
"""
ENOUGH = """
import csdctl


def enough(event):
    print(event["event"], flush=True)
    if event["event"] == "EpochEnd":
        return csdctl.STOP


if __name__ == "__main__":
    csdctl.train("endless.yaml", batch_size=32, callbacks=[enough])
    print("RESULT {}")
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A job directory beside the fleet that the script uses."""
    files = {"own_layers.py": LAYERS, "program.py": PROGRAM}
    with emulated(tmp_path_factory.mktemp("api"), 1, files) as path:
        yield path


def test_script_trains_a_model_with_an_own_layer_and_reads_its_results(directory: Path) -> None:
    printed, result = result_of_script(directory, "program.py")
    assert "code for the nodes: own_layers.py" in printed
    assert (result["state"], result["nodes"]) == ("completed", ["host", "csd0"])
    assert (result["num_public"], result["same_run"], result["machines"]) == (600, True, ["csd0", "host"])
    assert result["epochs_seen"] == [3], "25 steps of 64 end in the third epoch, which the second run ends"
    history = result["history"]
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert [len(values) for values in history.values()] == [3] * 4
    assert history["loss"][-1] < history["loss"][0]
    # Keras' own evaluation of the saved model is what the run has reported.
    assert result["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-4)
    assert result["accuracy"] == pytest.approx(history["val_accuracy"][-1])


@pytest.mark.thorough
def test_callback_stops_a_run_that_can_be_resumed(directory: Path) -> None:
    job = yaml.safe_load((directory / "job.yaml").read_text())  # of the script above
    job["recipe"]["epochs"] = 100_000
    (directory / "endless.yaml").write_text(yaml.safe_dump(job))
    (directory / "enough.py").write_text(ENOUGH)
    printed, _ = result_of_script(directory, "enough.py")
    assert printed.count("callback enough stops the run at EpochEnd") == 1, printed
    assert {"Ready", "Joined", "EpochEnd", "CheckpointSaved", "Finished"} <= set(printed.split())
    run = load_run("latest", directory)
    assert (run.report().state, run.directory.model.exists()) == ("stopped", True)
    assert f"to resume: csdctl train --resume {run.id}" in printed
    succeed(directory, "train", "endless.yaml", "--resume", run.id, "--skip-doctor", "--max-steps", "1")
