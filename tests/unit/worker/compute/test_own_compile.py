"""What a model brings to a job: a compile() of its own, layers that scale."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csdctl
from csdctl.shipping.store import pack_code
from csdctl.worker.compute.keras_internals import flatten_layers
from csdctl.worker.compute.model import build, describe_compile, is_scaling, load, save_weights
from csdctl.worker.compute.user_code import import_file, load_function
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.model_info import BUILDER, BuildRequest, BuildSpec, OwnCompile
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import UserCode
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
    loaded = load(tmp_path / "architecture.json", tmp_path / "weights.npz")
    assert type(loaded.optimizer).__name__ == "RMSprop"
    assert loaded.loss.name == "sparse_categorical_crossentropy"
    assert loaded._compile_config.config["metrics"] == ["accuracy"]


GAN = """
import keras


class SmallGan(keras.Model):
    def __init__(self, generator, latent=3):
        super().__init__()
        self.generator, self.latent = generator, latent
        self.discriminator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def compile(self, d_optimizer, g_optimizer, loss_fn, penalty=1.0):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.penalty = penalty

    def train_step(self, real):
        return {}
"""


def small_gan(directory: Path) -> tuple[Path, Any]:
    file = directory / "small_gan_of_python.py"
    file.write_text(GAN)
    generator = keras().Sequential([keras().Input((2,)), keras().layers.Dense(4)])
    model = import_file(file).SmallGan(generator, latent=2)
    loss = keras().losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras().optimizers.SGD(0.1), keras().optimizers.Adam(0.2), loss, penalty=7.0)
    return file, model


def test_model_from_python_with_its_own_train_step_and_compile_reaches_the_ranks(tmp_path: Path) -> None:
    file, model = small_gan(tmp_path)
    samples = np.ones((6, 4), np.float32)
    job = csdctl.Job.from_model(model, samples, directory=tmp_path / "job", code=[file]).load()
    roots = tuple(map(str, job.code_roots))
    spec = BuildSpec(job.model, {}, Recipe(), str(tmp_path), roots, {"": ("float32", (4,))})
    info = build(BuildRequest(spec, str(tmp_path)))
    assert (info.has_own_step, info.needs_code) == (True, True)
    (tmp_path / "code.zip").write_bytes(pack_code([file]))
    del sys.modules[file.stem]  # as on a node, which has the packed code alone
    code = UserCode(str(tmp_path / "code.zip"), (file.stem,))
    loaded = load(tmp_path / "architecture.json", tmp_path / "weights.npz", code)
    found = [float(one.learning_rate) for one in (loaded.d_optimizer, loaded.g_optimizer)]
    assert found == pytest.approx([0.1, 0.2])
    assert (loaded.loss_fn.from_logits, loaded.penalty) == (True, 7.0)
    assert (loaded.generator.input_shape, loaded.latent) == ((None, 2), 2)
    pairs = zip(loaded.weights, model.weights, strict=True)
    assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)
    assert np.array_equal(load_function(job.data.public.function)(job.data.public.path), samples)


def test_argument_of_an_own_compile_that_the_model_does_not_keep_is_named(tmp_path: Path) -> None:
    file, model = small_gan(tmp_path)
    del model.g_optimizer
    with pytest.raises(csdctl.CsdctlError, match=r"compile\(\) of SmallGan takes g_optimizer"):
        csdctl.Job.from_model(model, np.ones((6, 4)), directory=tmp_path / "job", code=[file])


@pytest.mark.parametrize(
    ("x", "last", "message"),
    [
        (np.ones((4, 3)), 0, "expected axis -1 of input shape to have value 2"),
        (np.ones((4, 2)), 3, "outside the valid range"),
    ],
)
def test_data_whose_loss_cannot_be_computed_is_refused(
    tmp_path: Path, x: np.ndarray[Any, Any], last: int, message: str
) -> None:
    model = keras().Sequential([keras().Input((2,)), keras().layers.Dense(3)])
    model.compile("sgd", keras().losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.array([0, 1, last, 2])
    with pytest.raises(csdctl.CsdctlError, match=message):
        csdctl.Job.from_model(model, x, labels, directory=tmp_path)
    assert not list(tmp_path.iterdir())
    csdctl.Job.from_model(model, np.ones((4, 2)), labels % 3, directory=tmp_path)
    model.evaluate(np.ones((4, 2)), labels % 3, verbose=0)


def test_library_that_a_machine_lacks_is_named(tmp_path: Path) -> None:
    model = keras().Sequential([keras().Input((4,)), keras().layers.Dense(2, name="last")])
    text = model.to_json().replace(
        '"keras.layers", "class_name": "Dense"', '"some_hub.layers", "class_name": "D"'
    )
    (tmp_path / "architecture.json").write_text(text)
    save_weights(tmp_path / "weights.npz", model.get_weights())
    with pytest.raises(WorkerError, match="^has no some_hub, which the model needs$") as caught:
        load(tmp_path / "architecture.json", tmp_path / "weights.npz")
    assert "install it on all machines" in caught.value.remedy


def sgd(rate: Any) -> Any:
    return keras().optimizers.SGD(rate)


def rescaling(**compiled: Any) -> Any:
    made = keras().Sequential(
        [keras().Input((4,)), keras().layers.Rescaling(0.5, name="half"), keras().layers.Dense(2)]
    )
    if compiled:
        made.compile(**compiled)
    return made


@pytest.mark.parametrize(
    ("compiled", "expected"),
    [
        ({}, None),
        ({"optimizer": "adam", "loss": "mse"}, OwnCompile("Adam", 0.001)),
        (
            {"optimizer": sgd(0.3), "loss": "mse", "metrics": ["mae", keras().metrics.AUC(name="a")]},
            OwnCompile("SGD", 0.3, metrics=("mae", "a")),
        ),
        (
            {"optimizer": sgd(keras().optimizers.schedules.CosineDecay(0.1, 9)), "loss": "mse"},
            OwnCompile("SGD", 0.1, "CosineDecay"),
        ),
        (
            {"optimizer": None, "loss": None, "weighted_metrics": {"dense": ["mae"]}},
            OwnCompile("", 0.0, "", ("mae",)),
        ),
    ],
)
def test_compile_is_described(compiled: dict[str, Any], expected: OwnCompile | None) -> None:
    assert describe_compile(rescaling(**compiled)) == expected


def test_layers_that_scale_are_named_also_in_models_inside() -> None:
    outer = keras().Sequential([keras().Input((4,)), rescaling(), keras().layers.Normalization(name="norm")])
    assert [layer.name for layer in flatten_layers(outer) if is_scaling(layer)] == ["half", "norm"]
