"""Training scripts as functions: what `fit` would have got is what the functions return."""

import runpy
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from csdctl.errors import InputError
from csdctl.worker.compute.backend import load_backend
from csdctl.workflows.init.script import LiftedScript, lift_script, trains_on_import

HEAD = """\
import keras
import numpy as np
from keras import layers
"""
PLAIN = f"""{HEAD}from math import inf, prod
import matplotlib.pyplot as plt

keras.utils.set_random_seed(7)
num_classes = 3
units = prod([2, num_classes])
rows = []
for index in range(20):
    rows.append([index, index % 5])
x = np.array(rows, dtype="float32")
x /= x.max()
y = np.arange(20) % num_classes
x_val, y_val = x[15:], y[15:]
for row in x: part = row[:1]; plt.plot(part)
model = keras.Sequential([keras.Input((2,)), layers.Dense(units), layers.Dense(num_classes)])
model.summary()
model.compile("adam", "mse")
print(len(x))
history = model.fit(x[:15], y[:15], 5, epochs=4, validation_data=(x_val, y_val))
model.save("never.keras")
print(inf)
"""
FUNCTIONS = f"""{HEAD}
import argparse


class Scale(layers.Layer):
    def call(self, inputs):
        return inputs * factor


def make(width):
    return keras.Sequential([keras.Input((4,)), normalize, Scale(), layers.Dense(width)])


def train(model, epochs, rate=0.5):
    model.compile(keras.optimizers.SGD(rate), "mse")
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
    model.fit(data, targets, epochs=epochs, validation_split=0.25, callbacks=[stop])


def main():
    global data, targets, normalize, factor
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=3)
    arguments = parser.parse_args()
    factor = 2.0
    data = np.random.default_rng(0).random((16, 4), np.float32)
    targets = data.sum(1, keepdims=True)
    normalize = layers.Normalization()
    normalize.adapt(data)
    network = make(arguments.width)
    train(network, 6)
    network.evaluate(data, targets)


if __name__ == "__main__":
    main()
"""
DATASETS = f"""{HEAD}
import tensorflow as tf

BATCH = 4
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
values = np.ones((12, 2), np.float32)
data = tf.data.Dataset.from_tensor_slices((values, values[:, :1])).batch(BATCH)
model.fit(data, epochs=2, steps_per_epoch=3)
"""


class Caught(BaseException):
    """What a script passed to `fit`."""

    def __init__(self, model: keras.Model, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments


@pytest.fixture
def no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `fit` raise what it got."""
    load_backend()

    def fit(self: keras.Model, x: Any = None, y: Any = None, batch_size: Any = None, **more: Any) -> None:
        raise Caught(self, {"x": x, "y": y, "batch_size": batch_size, **more})

    monkeypatch.setattr(keras.Model, "fit", fit)
    monkeypatch.setattr(sys, "argv", ["script.py"])


def caught_by(path: Path) -> Caught:
    with pytest.raises(Caught) as found:
        runpy.run_path(str(path), run_name="__main__")
    return found.value


def lifted(tmp_path: Path, text: str, *options: str) -> tuple[LiftedScript, dict[str, Any]]:
    path = tmp_path / "script.py"
    path.write_text(text)
    found = lift_script(path, options)
    (tmp_path / "functions.py").write_text(found.text)
    return found, runpy.run_path(str(tmp_path / "functions.py"))


@pytest.mark.usefixtures("no_fit")
def test_functions_return_what_fit_would_have_got(tmp_path: Path) -> None:
    found, functions = lifted(tmp_path, PLAIN)
    given = caught_by(tmp_path / "script.py")
    (x, y), (x_val, y_val) = functions["load"]()
    for ours, theirs in zip(
        (x, y, x_val, y_val),
        (given.arguments["x"], given.arguments["y"], *given.arguments["validation_data"]),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    for _ in range(2):
        for ours, theirs in zip(functions["build"]().get_weights(), given.model.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert found.recipe == {"epochs": 4, "reference_batch": 5}
    assert found.has_validation
    assert not found.notes
    assert "plt" not in found.text
    assert "from math import prod\n" in found.text  # what only code after fit uses is not imported
    assert functions["load"]() is functions["load"]()  # so that random parts of it do not overlap
    assert "never.keras" not in found.text


@pytest.mark.usefixtures("no_fit")
def test_fit_in_a_function_of_main_with_options_and_a_split(tmp_path: Path) -> None:
    found, functions = lifted(tmp_path, FUNCTIONS)
    given = caught_by(tmp_path / "script.py")
    (x, y), (x_val, y_val) = functions["training_data"](""), functions["validation_data"]("")
    np.testing.assert_array_equal(np.concatenate([x, x_val]), given.arguments["x"])
    np.testing.assert_array_equal(y, given.arguments["y"][:12])
    assert len(y_val) == 4
    model = functions["build"]()
    assert model.count_params() == given.model.count_params()
    assert float(model.optimizer.learning_rate) == 0.5
    np.testing.assert_array_equal(model.layers[0].mean, given.model.layers[0].mean)
    model(x)
    assert found.recipe == {
        "epochs": 6,
        "reference_batch": 32,
        "early_stopping": {"patience": 2, "monitor": "val_loss"},
    }
    assert [text for _, text in found.notes] == [
        "restore_best_weights of EarlyStopping: best.keras is the model of the best epoch",
        "options take their defaults; others: csdctl init SCRIPT -- OPTIONS",
    ]


def test_data_sets_have_their_own_batch_size_and_a_strategy_is_left_out(tmp_path: Path) -> None:
    found, functions = lifted(tmp_path, DATASETS)
    assert len(list(functions["training_data"](""))) == 3
    assert functions["build"]().built
    assert "strategy" not in found.text
    assert (found.recipe["reference_batch"], found.has_validation) == (4, False)
    assert [line for line, _ in found.notes] == [9, 14]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print(1)", "line 1: no call of model.fit"),
        ("for _ in range(3):\n    model.fit(x, epochs=1)", "line 4: fit is called in a loop"),
        (
            "def go():\n    model.fit(x, epochs=1)",
            "line 5: fit is called in go.., which the script never calls",
        ),
        ("class A:\n    def go(self):\n        m.fit(x, epochs=1)", "line 6: fit is called in a method of A"),
        ("model.fit(epochs=1)", "line 4: fit gets no data"),
        ("def go(*a):\n    m.fit(x, epochs=1)\ngo(1)", "line 6: go.. takes . or .."),
        ("model.fit(", "line 4: not valid Python"),
        ("model.fit_generator(x, 3)", "line 4: fit_generator is a Keras 2 method"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('-d', '--data', required=True)\n"
            "model.fit(p.parse_args().data, epochs=1)",
            "line 6: --data is required",
        ),
    ],
)
def test_what_cannot_be_taken_over_names_the_line(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"{HEAD}{body}\n")
    with pytest.raises(InputError, match=message):
        lift_script(path)


OPTIONS = f"""from __future__ import annotations
{HEAD}
import argparse


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--num-samples", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--widths", nargs="*", type=int)
    return parser.parse_known_args()


args, _ = get_args()
epochs = args.epochs
base = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
for layer in base.layers[:1]:
    layer.trainable = False
model = keras.Sequential([base, layers.Dense(1)])
model.compile("sgd", "mse")
if args.num_samples == 0:
    model.load_weights("missing.keras")
else:
    x = np.ones((args.num_samples, 2), np.float32)
    model.fit(x, x[:, 0], args.batch_size, epochs)
"""


@pytest.mark.usefixtures("no_fit")
def test_options_of_the_script_take_the_values_that_are_given(tmp_path: Path) -> None:
    found, functions = lifted(tmp_path, OPTIONS, "-n", "5", "--epochs=7")
    assert found.recipe == {"epochs": 7, "reference_batch": 16}
    assert len(functions["training_data"]("")[0]) == 5
    assert [text for _, text in found.notes] == ["assumed false: args.num_samples == 0"]
    assert len(functions["build"]().trainable_weights) == 2  # not those that the loop freezes


def test_batches_that_another_file_makes_for_a_model_that_it_compiles(tmp_path: Path) -> None:
    text = "import network\nmodel = network.make()\nmodel.fit(network.load('x', batch=6))\n"
    (tmp_path / "script.py").write_text(text)
    assert lift_script(tmp_path / "script.py").recipe["reference_batch"] == 6


def test_callbacks_and_arguments_that_are_not_taken_over_are_notes(tmp_path: Path) -> None:
    found, _ = lifted(
        tmp_path,
        f"""{HEAD}
x = np.ones((4, 2), np.float32)
weights = dict(zip(range(2), [1.0, 2.0]))
model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(
    x, x[:, 0], epochs=len(x), class_weight=weights, initial_epoch=2,
    callbacks=[keras.callbacks.ModelCheckpoint("a.keras"), keras.callbacks.TensorBoard("logs"),
               keras.callbacks.ReduceLROnPlateau(factor=0.5, min_lr=1e-6)],
)
model.fit(x, epochs=1)
""",
    )
    assert found.recipe == {
        "epochs": 1,
        "reference_batch": 32,
        "# class_weight": "not converted, line 10",
        "reduce_on_plateau": {"patience": 10, "factor": 0.5, "min_lr": 1e-6},
    }
    notes = "\n".join(f"{line} {text}" for line, text in found.notes)
    for expected in (
        "10 epochs is computed",
        "10 class_weight is computed",
        "10 initial_epoch",
        "TensorBoard",
        "14 another call of fit",
    ):
        assert expected in notes


def test_file_that_trains_when_it_is_imported_is_known(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    for text, expected in ((PLAIN, True), (FUNCTIONS, False), ("def f():\n    m.fit(x, epochs=1)\n", False)):
        path.write_text(text)
        assert trains_on_import(path) is expected
