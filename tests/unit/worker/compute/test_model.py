"""User models: the files transferred to the nodes, a compile() of their own, and models that are refused."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csdctl
from csdctl.shipping.store import pack_code
from csdctl.worker.compute.model import (
    build,
    describe_compile,
    find_stateful_layers,
    load,
    load_weights,
    save_weights,
)
from csdctl.worker.compute.user_code import import_file, load_function
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import BUILDER, BuildRequest, BuildSpec, ModelInfo, OwnCompile
from csdctl.worker.protocol.recipe import LossTerm, Recipe
from csdctl.worker.protocol.run_spec import UserCode
from tests.unit.worker.compute.built_models import keras

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras

FUNCTION = """
import keras
from keras import layers


def with_lambda():
    return keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2), layers.Dense(3)])


def fine():
    return keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3, activation="softmax")])


class Unregistered(layers.Layer):
    def __init__(self, factor=3, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return x * self.factor


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, activation="softmax")

    def call(self, x, training=False):
        return self.dense(x)


class OwnStep(Subclassed):
    def train_step(self, data):
        return {}


def unregistered():
    return keras.Sequential([keras.Input((4,)), Unregistered(4), layers.Dense(3)])


def subclassed():
    model = Subclassed()
    model(keras.ops.zeros((1, 4)))
    return model


def own_train_step():
    model = OwnStep()
    model(keras.ops.zeros((1, 4)))
    return model


def compiled():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.003), "mse", metrics=["mae"])
    return model


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


def classifier():
    model = Classifier(3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.RMSprop(0.003), loss, metrics=["accuracy"])
    return model


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


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


def with_rules_of_variables():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="first"), layers.Dense(2, name="last")])
    first, last = model.layers
    first.bias.trainable = False
    first.kernel.regularizer = keras.regularizers.L2(0.5)
    last.kernel.constraint = keras.constraints.MaxNorm(0.3)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[last.bias])
    model.compile(optimizer, "mse")
    return model


def stateful():
    inputs = keras.Input(batch_shape=(8, 4, 1))
    return keras.Model(inputs, layers.LSTM(3, stateful=True)(inputs))


def scheduled_by_own_class():
    return scheduled(Falling())


def scheduled(schedule=None):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    schedule = schedule or keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model.compile(keras.optimizers.SGD(schedule), "mse")
    return model
"""
OWN = """
class Own(layers.Layer):
    def call(self, x):
        return x
"""
BESIDE = """
def imported():
    return keras.Sequential([keras.Input((4,)), Own(), layers.Dense(3)])
"""
QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def restored_path() -> Iterator[None]:
    """Undo the changes of user code to sys.path, the imported modules and Keras' registry."""
    path, modules = sys.path.copy(), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("mine", "beside_it"):
            del sys.modules[name]
    keras().saving.get_custom_objects().clear()


@pytest.fixture(autouse=True)
def mine(tmp_path: Path) -> Path:
    """Write the user's file."""
    (tmp_path / "mine.py").write_text(FUNCTION)
    return tmp_path / "mine.py"


def spec_of(reference: str, directory: Path, **recipe: Any) -> BuildSpec:
    """Return the request for a model whose file is the job's only code."""
    file = reference.rpartition(":")[0]
    roots = (file,) if file.endswith(".py") else ()
    return BuildSpec(reference, {}, Recipe(**{"learning_rate": 0.01, **recipe}), str(directory), roots)


def refusal(directory: Path, reference: str, **recipe: Any) -> str:
    """Return the message of the error, exit code 2, with which the model is refused."""
    with pytest.raises(WorkerError) as caught:
        build(BuildRequest(spec_of(reference, directory, **recipe), str(directory)))
    assert caught.value.exit_code == 2
    return caught.value.message


def save_keras_file(path: Path, middle: Any) -> str:
    layers = keras().layers
    keras().Sequential([keras().Input((4, 4, 1)), middle, layers.Flatten(), layers.Dense(3)]).save(path)
    return str(path)


def test_keras_file_is_transferred_as_architecture_and_weights(tmp_path: Path) -> None:
    file = save_keras_file(tmp_path / "model.keras", keras().layers.Rescaling(2.0))
    info = build(BuildRequest(spec_of(file, tmp_path), str(tmp_path)))
    assert (info.inputs, info.outputs[0].shape) == ({"": (4, 4, 1)}, (3,))
    assert {"architecture.json", "weights.npz"} < set(os.listdir(tmp_path))


def test_adapted_normalization_computes_the_same_once_it_is_loaded(tmp_path: Path) -> None:
    samples = np.linspace(90, 110, 32, dtype=np.float32).reshape(2, 4, 4, 1)
    adapted = keras().layers.Normalization()
    adapted.adapt(samples)
    file = save_keras_file(tmp_path / "model.keras", adapted)
    build(BuildRequest(spec_of(file, tmp_path), str(tmp_path)))
    loaded = load(tmp_path / "architecture.json", tmp_path / "weights.npz")
    assert np.array_equal(loaded(samples), keras().models.load_model(file)(samples))


def test_atexit_handlers_of_user_code_run(tmp_path: Path) -> None:
    mark = "lambda: pathlib.Path(__file__).with_name('at-the-end').touch()"
    (tmp_path / "mine.py").write_text(f"import atexit, pathlib\natexit.register({mark})\n{FUNCTION}")
    request = to_json(BuildRequest(spec_of(f"{tmp_path}/mine.py:fine", tmp_path), str(tmp_path)))
    subprocess.run(
        [sys.executable, "-m", "csdctl.worker", "build"], input=f"{request}\n".encode(), check=True
    )
    assert (tmp_path / "at-the-end").exists()


def test_code_in_place_of_other_code_of_the_same_size_and_time_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    shown = "print(VALUE, beside_it.VALUE, parts.VALUE, parts.deep.VALUE)"
    loads = f"from csdctl.worker.compute.user_code import *; import_file(Path({str(tmp_path / 'mine.py')!r}))"
    for value, program in enumerate(("import mine", loads)):  # the first is the user's own, with .pyc files
        for name in ("mine.py", "beside_it.py", "parts/__init__.py", "parts/deep.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            imports = f"import beside_it, parts.deep; {shown}\n" * (name == "mine.py")
            (tmp_path / name).write_text(f"VALUE = {value}\n{imports}")
            os.utime(tmp_path / name, (1, 1))
        run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True)
        assert run([sys.executable, "-c", program]).stdout == f"{value} {value} {value} {value}\n"
    assert (tmp_path / "__pycache__").exists()


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.fault(42)
def test_keras_file_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    file = save_keras_file(tmp_path / "model.keras", keras().layers.Lambda(lambda x: x * 2))
    assert "not a model that can be loaded safely" in refusal(tmp_path, file)
    Path(file).write_bytes(pickle.dumps(Runs(tmp_path / "was-run")))
    assert "not a model that can be loaded safely" in refusal(tmp_path, file)
    assert not (tmp_path / "was-run").exists()


OWN_CODE = ("with_lambda", "unregistered", "subclassed")


def test_own_code_at_the_top_of_a_file_goes_to_the_nodes(tmp_path: Path) -> None:
    for function in OWN_CODE:
        output = tmp_path / function
        output.mkdir()
        assert build(BuildRequest(spec_of(f"{tmp_path}/mine.py:{function}", output), str(output))).needs_code
    archive = tmp_path / "code.zip"
    archive.write_bytes(pack_code([tmp_path / "mine.py"]))
    (tmp_path / "mine.py").unlink()
    with_code = load_on_a_node(tmp_path, UserCode(str(archive), ("mine",)))
    assert all("Dense" in (with_code[function] or []) for function in OWN_CODE), with_code
    without = load_on_a_node(tmp_path, None)
    assert without == dict.fromkeys(OWN_CODE), "every model needs its code"


def test_what_is_set_on_variables_holds_on_the_ranks(tmp_path: Path) -> None:
    """Keras saves it neither in a configuration nor in a file."""
    spec = spec_of(f"{tmp_path}/mine.py:with_rules_of_variables", tmp_path, learning_rate=None)
    assert build(BuildRequest(spec, str(tmp_path))).needs_code
    ours = load(tmp_path / "architecture.json", tmp_path / "weights.npz")
    theirs = load_function(f"{tmp_path}/mine.py:with_rules_of_variables")()
    theirs.set_weights(ours.get_weights())
    samples, labels = np.random.default_rng(0).random((2, 8, 4), np.float32)
    for model in (ours, theirs):
        for _ in range(3):
            model.train_on_batch(samples, labels[:, :2])
    for found, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(csdctl.CsdctlError, match=r"first/kernel: regularizer=.*0.5.* is set on the variable"):
        csdctl.Job.from_model(theirs, samples, labels[:, :2], directory=tmp_path / "job")


def load_on_a_node(directory: Path, code: UserCode | None) -> dict[str, list[str] | None]:
    """Load built models in a process that has nothing of the user's; return the layers of each, or None."""
    program = f"""
import json
from pathlib import Path
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.model import load
from csdctl.worker.protocol.run_spec import UserCode
keras, found = load_backend()[1], {{}}
for function in {OWN_CODE!r}:
    files = [Path({str(directory)!r}, function, name) for name in ("architecture.json", "weights.npz")]
    try:
        model = load(*files, {code!r})
        found[function] = [type(layer).__name__ for layer in model._flatten_layers()]
    except Exception as error:
        print(function, repr(error)[:2000])
        found[function] = None
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=QUIET, check=False, cwd="/"
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str] | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.fault(42)
def test_file_beside_that_is_not_named_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from beside_it import Own\n" + FUNCTION + BESIDE)
    (tmp_path / "beside_it.py").write_text(FUNCTION + OWN)
    why = refusal(tmp_path, f"{tmp_path}/mine.py:imported")
    assert "imports beside_it.py, which the nodes would not have" in why


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "own step": (
        "own_train_step",
        {"losses": {"": LossTerm("mse")}},
        "has its own train_step, which recipe.loss cannot",
    ),
    "own schedule": ("scheduled_by_own_class", {"learning_rate": None}, "Falling, is not a Keras schedule"),
    "unknown metric": ("fine", {"metrics": ("nonsense",)}, "'nonsense' can"),
    "unknown loss": ("fine", {"losses": {"": LossTerm("nonsense")}}, "'nonsense' can"),
    "no learning rate": ("fine", {"learning_rate": None}, "recipe.learning_rate is missing"),
    "state of samples": ("stateful", {}, "has stateful=True"),
    "a sum": ("fine", {"losses": {"": LossTerm("mse", {"reduction": "sum"})}}, "reduction='sum'"),
}


@pytest.mark.parametrize(("name", "recipe", "why"), REFUSED.values(), ids=REFUSED)
def test_model_that_ranks_cannot_train_is_refused(
    tmp_path: Path, name: str, recipe: dict[str, Any], why: str
) -> None:
    assert why in refusal(tmp_path, f"{tmp_path}/mine.py:{name}", **recipe)


def built(directory: Path, name: str, **recipe: Any) -> ModelInfo:
    return build(BuildRequest(spec_of(f"{directory}/mine.py:{name}", directory, **recipe), str(directory)))


def test_subclass_is_built_by_the_shapes_of_the_data(tmp_path: Path) -> None:
    assert not built(tmp_path, "Subclassed").is_built
    spec = spec_of(f"{tmp_path}/mine.py:Subclassed", tmp_path)
    info = build(BuildRequest(replace(spec, sample_shapes={"": ("float32", (4,))}), str(tmp_path)))
    assert (info.is_built, info.num_parameters, info.input_shape) == (True, 15, (4,))


def test_what_the_model_was_compiled_with_completes_the_recipe(tmp_path: Path) -> None:
    info = built(tmp_path, "compiled", learning_rate=None)
    assert (info.recipe.optimizer, info.recipe.learning_rate) == ("Adam", pytest.approx(0.003))
    assert [(output.name, output.loss) for output in info.outputs] == [("", "mean_squared_error")]
    named = built(tmp_path, "compiled", learning_rate=0.5).recipe
    assert (named.optimizer, named.learning_rate) == ("Adam", 0.5)
    scheduled = built(tmp_path, "scheduled", learning_rate=None).recipe
    assert json.loads(scheduled.schedule)["class_name"] == "ExponentialDecay"
    assert scheduled.learning_rate == pytest.approx(0.1)
    assert built(tmp_path, "scheduled_by_own_class", learning_rate=0.5).recipe.learning_rate == 0.5


def test_metrics_are_accepted_by_either_name(tmp_path: Path) -> None:
    metrics = ("accuracy", "AUC", "sparse_top_k_categorical_accuracy", "SparseCategoricalCrossentropy")
    info = built(tmp_path, "fine", metrics=metrics)
    assert (info.outputs[0].shape, info.needs_code, info.num_operations) == ((3,), False, 2 * 4 * 3)


def test_layers_that_keep_state_of_their_samples_are_found() -> None:
    layers = keras().layers
    norm = keras().Sequential([keras().Input((4,)), layers.Dense(4), layers.BatchNormalization()])
    fixed = [layers.Normalization(mean=0.5, variance=1.0), layers.GroupNormalization(3), layers.Dropout(0.5)]
    num_found = {
        norm: 1,
        keras().Sequential([keras().Input((4,)), norm, layers.Dense(2)]): 1,
        keras().Sequential([keras().Input((4,)), layers.SpectralNormalization(layers.Dense(2))]): 1,
        keras().Sequential([keras().Input((4,)), layers.BatchNormalization(trainable=False)]): 0,
        keras().Sequential([keras().Input((8, 8, 3)), layers.RandomFlip(), *fixed]): 0,
    }
    found = {model: len(find_stateful_layers(model)) for model in num_found}
    assert list(found.values()) == list(num_found.values())


def test_weights_are_read_back_in_their_order(tmp_path: Path) -> None:
    weights = [np.full((2, number % 3 + 1), number, np.float32) for number in range(120)]
    save_weights(tmp_path / "weights.npz", weights)
    assert all(map(np.array_equal, load_weights(tmp_path / "weights.npz"), weights))


def test_weights_of_16_bits_keep_their_values(tmp_path: Path) -> None:
    layer = keras().layers.Dense(3, dtype="bfloat16")
    layer.build((None, 4))
    before = layer.kernel.numpy().astype(np.float32)
    save_weights(tmp_path / "weights.npz", layer.get_weights())
    layer.kernel.assign(0 * layer.kernel)
    layer.set_weights(load_weights(tmp_path / "weights.npz"))
    assert np.array_equal(layer.kernel.numpy().astype(np.float32), before)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", w00000=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        load_weights(tmp_path / "weights.npz")


def test_what_the_user_compiled_reaches_the_ranks(tmp_path: Path, mine: Path) -> None:
    spec = replace(spec_of(f"{mine}:classifier", tmp_path), sample_shapes={"": ("float32", (4,))})
    assert build(BuildRequest(replace(spec, recipe=Recipe()), str(tmp_path))).recipe.optimizer == "RMSprop"
    assert BUILDER not in (tmp_path / "architecture.json").read_text()
    loaded = load(tmp_path / "architecture.json", tmp_path / "weights.npz")
    assert type(loaded.optimizer).__name__ == "RMSprop"
    assert loaded.loss.name == "sparse_categorical_crossentropy"
    assert loaded._compile_config.config["metrics"] == ["accuracy"]


def small_gan(mine: Path) -> Any:
    generator = keras().Sequential([keras().Input((2,)), keras().layers.Dense(4)])
    model = import_file(mine).SmallGan(generator, latent=2)
    loss = keras().losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras().optimizers.SGD(0.1), keras().optimizers.Adam(0.2), loss, penalty=7.0)
    return model


def test_model_from_python_with_its_own_train_step_and_compile_reaches_the_ranks(
    tmp_path: Path, mine: Path
) -> None:
    model, samples = small_gan(mine), np.ones((6, 4), np.float32)
    job = csdctl.Job.from_model(model, samples, directory=tmp_path / "job", code=[mine]).load()
    roots = tuple(map(str, job.code_roots))
    spec = BuildSpec(job.model, {}, Recipe(), str(tmp_path), roots, {"": ("float32", (4,))})
    info = build(BuildRequest(spec, str(tmp_path)))
    assert (info.has_own_step, info.needs_code) == (True, True)
    (tmp_path / "code.zip").write_bytes(pack_code([mine]))
    del sys.modules[mine.stem]  # as on a node, which has the packed code alone
    code = UserCode(str(tmp_path / "code.zip"), (mine.stem,))
    loaded = load(tmp_path / "architecture.json", tmp_path / "weights.npz", code)
    found = [float(one.learning_rate) for one in (loaded.d_optimizer, loaded.g_optimizer)]
    assert found == pytest.approx([0.1, 0.2])
    assert (loaded.loss_fn.from_logits, loaded.penalty) == (True, 7.0)
    assert (loaded.generator.input_shape, loaded.latent) == ((None, 2), 2)
    pairs = zip(loaded.weights, model.weights, strict=True)
    assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)
    assert np.array_equal(load_function(job.data.public.function)(job.data.public.path), samples)


def test_argument_of_an_own_compile_that_the_model_does_not_keep_is_named(tmp_path: Path, mine: Path) -> None:
    model = small_gan(mine)
    del model.g_optimizer
    with pytest.raises(csdctl.CsdctlError, match=r"compile\(\) of SmallGan takes g_optimizer"):
        csdctl.Job.from_model(model, np.ones((6, 4)), directory=tmp_path / "job", code=[mine])


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
        csdctl.Job.from_model(model, x, labels, directory=tmp_path / "job")
    assert not (tmp_path / "job").exists()
    csdctl.Job.from_model(model, np.ones((4, 2)), labels % 3, directory=tmp_path / "job")
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
    model = keras().Sequential([keras().Input((4,)), keras().layers.Dense(2, name="dense")])
    if compiled:
        model.compile(**compiled)
    assert describe_compile(model) == expected
