"""The Python interface in a user's script, on an emulated fleet: own layer, own data, the run's results."""

from pathlib import Path

import pytest

from tests.emulated.running import emulated, result_of_script

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


def test_script_trains_a_model_with_an_own_layer_and_reads_its_results(tmp_path: Path) -> None:
    with emulated(tmp_path, 1, {"own_layers.py": LAYERS, "program.py": PROGRAM}):
        printed, result = result_of_script(tmp_path, "program.py")
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
