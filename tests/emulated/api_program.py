"""Program run by test_api.py, as a user's script: a model with an own layer, trained on an emulated fleet.

Its first argument is the directory of the fleet. Prints JSON with what the run returned.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
from own_layers import Scaled

import csdctl
from csdctl.workflows.train.options import TrainOptions


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    middle = Scaled(2.0)(keras.layers.Dense(16, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(middle))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    generator = np.random.default_rng(0)
    x = generator.random((600, 8), np.float32)
    y = x[:, :3].argmax(axis=1)
    job = csdctl.Job.from_model(
        build(),
        (x, y),
        validation=(x[:100], y[:100]),
        directory=directory,
        code=[Path(__file__).parent / "own_layers.py"],
        epochs=3,
        reference_batch=64,
    )
    run = csdctl.train(job, directory / "fleet.yaml", batch_size=32, options=TrainOptions(is_balanced=False))
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
                "nodes": [rank.node for rank in report.ranks],
            }
        ),
    )
