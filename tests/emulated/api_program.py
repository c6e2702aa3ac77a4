"""Program run by test_api.py, as a user's script: a model with an own layer, trained on an emulated fleet.

It runs in the directory of the fleet. Prints JSON with what the run returned.
"""

import json
from pathlib import Path

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
        code=[Path(__file__).parent / "own_layers.py"],
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
    own_loss, own_accuracy = model.evaluate(x[:100], y[:100], verbose=0)
    report = run.report()
    print(
        "RESULT",
        json.dumps(
            {
                "history": run.history,
                "loss": own_loss,
                "accuracy": own_accuracy,
                "state": report.state,
                "machines": sorted(discovered.facts),
                "num_public": prepared.public.num_samples,
                "same_run": csdctl.load_run() == csdctl.load_run(run.id) == run,
                "epochs_seen": [e["epoch"] for e in events if e["event"] == "EpochEnd" and e["rank"] == 0],
                "nodes": [rank.node for rank in report.ranks],
            }
        ),
    )
