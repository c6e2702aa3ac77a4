"""Training scripts that run up to their call of `fit`: model, data and recipe are what it is called with."""

import sys
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.script import FitCall, describe_fit, record, run_to_fit
from csdctl.worker.compute.user_code import import_file
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.model_info import ScriptFit, ScriptRequest
from csdctl.workflows.init.init import _render_functions

HEAD = """\
import keras
import numpy as np
from keras import layers
"""
PLAIN = f"""{HEAD}
x = np.arange(40, dtype="float32").reshape(20, 2)
y = np.arange(20) % 3
model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
model.compile("adam", "mse")
keras.utils.plot_model(model, "never.png")
history = model.fit(x[:15], y[:15], 5, epochs=4, validation_data=(x[15:], y[15:]))
model.save("never.keras")
model.fit(x, y)
"""
METHOD = f"""from __future__ import annotations
{HEAD}
import argparse


class Scale(layers.Layer):
    def call(self, inputs):
        return inputs * factor


class Trainer:
    def train(self, model, epochs):
        stop = keras.callbacks.EarlyStopping(monitor="loss", patience=2, restore_best_weights=True)
        for _ in range(3):
            try:
                model.fit(data, targets, epochs=epochs, validation_split=0.25, callbacks=[stop])
            except Exception:
                pass


def main():
    global data, targets, factor
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--num-samples", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    factor = 2.0
    data = np.arange(4 * arguments.num_samples, dtype="float32").reshape(-1, 4)
    targets = data.sum(1, keepdims=True)
    normalize = layers.Normalization()
    normalize.adapt(data)
    network = keras.Sequential([keras.Input((4,)), normalize, Scale(), layers.Dense(3)])
    network.compile(keras.optimizers.SGD(0.5), "mse")
    Trainer().train(network, arguments.epochs)


if __name__ == "__main__":
    main()
"""
DATASETS = f"""{HEAD}
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4, 4, 3)), layers.RandomFlip(), layers.Flatten(), layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
crop = layers.RandomCrop(4, 4)
values = np.ones((12, 5, 5, 3), np.float32)
data = tf.data.Dataset.from_tensor_slices((values, values[:, 0, 0, :1])).batch(4)
data = data.map(lambda x, y: (tf.image.random_brightness(crop(x), 0.1), y))
model.fit(data, epochs=2, steps_per_epoch=3, shuffle=False)
"""
CALLBACKS = f"""{HEAD}
x = np.ones((4, 2), np.float32)
model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
model.fit(
    x, x[:, 0], epochs=len(x), class_weight=dict(zip(range(2), [1, 2.5])), initial_epoch=2,
    callbacks=[keras.callbacks.ModelCheckpoint("a.keras", monitor="loss"), keras.callbacks.TensorBoard(),
               keras.callbacks.ReduceLROnPlateau(factor=np.float32(0.5), min_lr=1e-6)],
)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_backend()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def run(text: str, *options: str) -> FitCall:
    Path("script.py").write_text(text)
    return run_to_fit("script.py", options, vars(ModuleType("functions")))


def recorded(text: str, *options: str) -> ScriptFit:
    Path("script.py").write_text(text)
    return record(ScriptRequest("script.py", options))


def test_functions_return_what_fit_is_called_with(directory: Path) -> None:
    call = run(PLAIN)
    x, y = call.training_data("")
    assert np.array_equal(x, np.arange(30).reshape(15, 2))
    assert np.array_equal(y, np.arange(15) % 3)
    assert np.array_equal(call.validation_data("")[1], np.arange(15, 20) % 3)
    assert call.build().count_params() == 9
    assert keras.Model.fit.__name__ == "fit", "training works again"
    assert sorted(path.name for path in directory.iterdir()) == ["script.py"]
    later = ((12, "another call of fit; only the first one is used"),)
    assert recorded(PLAIN) == ScriptFit({"epochs": 4, "reference_batch": 5}, True, later)


def test_fit_in_a_loop_of_a_method_with_options_and_a_split() -> None:
    call = run(METHOD, "-n", "16")
    (x, y), (x_val, y_val) = call.training_data(), call.validation_data()
    data = np.arange(64, dtype="float32").reshape(16, 4)
    assert np.array_equal(np.concatenate([x, x_val]), data)
    assert np.array_equal(np.concatenate([y, y_val])[:, 0], data.sum(1))
    assert (len(x), len(x_val)) == (12, 4)
    fit = recorded(METHOD, "-n", "16", "--epochs=7")
    stopping = {"patience": 2, "monitor": "loss"}
    assert fit.recipe == {"epochs": 7, "reference_batch": 32, "early_stopping": stopping}
    assert [text.partition(":")[0].partition(";")[0] for _, text in fit.notes] == [
        "fit is called in a loop",
        "restore_best_weights of EarlyStopping",
    ]


def test_data_sets_have_their_own_batch_size_and_random_changes_outside_the_model_are_notes() -> None:
    fit = recorded(DATASETS)
    assert (fit.recipe["reference_batch"], fit.has_validation) == (4, False)
    assert [(line, text.partition(":")[0]) for line, text in fit.notes] == [
        (7, "without its distribution strategy"),
        (14, "its random changes happen once"),
        (15, "RandomCrop is not in the model"),
        (15, "shuffle=False"),
        (15, "steps_per_epoch"),
    ]
    call = run(DATASETS)
    assert len(list(call.training_data())) == 3
    assert not hasattr(call.model.weights[0].value, "values"), "not mirrored"


def test_callbacks_become_keys_of_the_recipe_or_notes() -> None:
    recipe, notes = describe_fit(run(CALLBACKS))
    assert recipe == {
        "epochs": 4,
        "reference_batch": 32,
        "class_weight": {"0": 1.0, "1": 2.5},
        "reduce_on_plateau": {"patience": 10, "factor": 0.5, "min_factor": 1e-4},
    }
    assert [text.partition(":")[0] for _, text in notes] == [
        "initial_epoch",
        "monitor of ModelCheckpoint",
        "callback TensorBoard",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)", "script.py: no call of model.fit"),
        ("model.fit(", "script.py fails: SyntaxError: "),
        ("keras.Sequential().fit(epochs=1)", "script.py, line 4: fit gets no data"),
        ("keras.Sequential().fit_generator(1)", r"object has no attribute 'fit_generator' .line 4."),
        ("import sys\nsys.exit('bye')", "script.py fails: SystemExit: bye .line 5."),
        (
            METHOD.removeprefix("from __future__ import annotations\n"),
            "arguments are required: -n/--num-samples",
        ),
    ],
)
def test_script_that_does_not_reach_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        run(f"{HEAD}{text}\n")
    assert caught.value.remedy


def test_file_of_functions_runs_the_script_unless_it_has_changed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    Path("script.py").write_text(METHOD)
    functions = directory / "script_functions.py"
    functions.write_text(_render_functions(Path("script.py"), ["-n", "8"]))
    module = import_file(functions)
    assert module.build().layers[1].__module__ == "script_functions"
    assert (len(module.training_data("")[0]), len(module.validation_data("")[0])) == (6, 2)
    Path("script.py").write_text(METHOD + "\n")
    del sys.modules["script_functions"]
    with pytest.raises(JobError, match=r"^script.py has changed since `csdctl init`"):
        import_file(functions)


def test_script_that_is_missing_is_refused() -> None:
    with pytest.raises(JobError, match="nope.py cannot be read: No such file"):
        run_to_fit("nope.py", [], {"__name__": "functions"})
