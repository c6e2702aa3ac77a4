"""A class with a compile() of its own, as libraries of models have it, whose constructor calls it already."""

from pathlib import Path

import pytest

from csdctl.worker.compute.model import build, load, save_weights
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.model_info import BUILDER, BuildRequest, BuildSpec
from csdctl.worker.protocol.recipe import Recipe
from tests.unit.worker.compute.built_models import keras

TEXT = """
import keras


@keras.saving.register_keras_serializable("own_compile")
class Classifier(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.units = units
        self.dense = keras.layers.Dense(units)
        self.compile()

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return {"units": self.units}

    def compile(self, optimizer="adam", loss="mean_absolute_error", *, metrics="auto", **arguments):
        metrics = ["mean_squared_error"] if metrics == "auto" else metrics
        super().compile(optimizer=optimizer, loss=loss, metrics=metrics, **arguments)


def build():
    model = Classifier(3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.RMSprop(0.003), loss, metrics=["accuracy"])
    return model
"""


def test_what_the_user_compiled_reaches_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "classifier_with_its_compile.py"
    file.write_text(TEXT)
    shapes = {"": ("float32", (4,))}
    spec = BuildSpec(f"{file}:build", {}, Recipe(), str(tmp_path), (str(file),), shapes)
    assert build(BuildRequest(spec, str(tmp_path))).recipe.optimizer == "RMSprop"
    assert BUILDER not in (tmp_path / "architecture.json").read_text()
    loaded = load(tmp_path / "architecture.json", tmp_path / "weights.npz", keras())
    assert type(loaded.optimizer).__name__ == "RMSprop"
    assert loaded.loss.name == "sparse_categorical_crossentropy"
    assert loaded._compile_config.config["metrics"] == ["accuracy"]


def test_library_that_a_machine_lacks_is_named(tmp_path: Path) -> None:
    model = keras().Sequential([keras().Input((4,)), keras().layers.Dense(2, name="last")])
    text = model.to_json().replace(
        '"keras.layers", "class_name": "Dense"', '"some_hub.layers", "class_name": "D"'
    )
    (tmp_path / "architecture.json").write_text(text)
    save_weights(tmp_path / "weights.npz", model.get_weights())
    with pytest.raises(WorkerError, match="^has no some_hub, which the model is made of$") as caught:
        load(tmp_path / "architecture.json", tmp_path / "weights.npz", keras())
    assert "install it on all machines" in caught.value.remedy
