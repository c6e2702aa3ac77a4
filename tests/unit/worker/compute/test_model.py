"""User models: the files transferred to the nodes, and models that are refused."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.shipping.worker_zip import pack_code
from csdctl.worker.compute.model import build, hash_weights, load_weights, save_weights
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.json_codec import ANSWER_PREFIX, WORKER_ERROR_PREFIX, from_json, to_json
from csdctl.worker.protocol.model_info import BuildSpec, ModelInfo
from csdctl.worker.protocol.recipe import LossTerm, Recipe
from csdctl.worker.protocol.run_spec import UserCode
from tests.unit.worker.compute.built_models import keras
from tests.unit.worker.process.test_files import note_calls

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras

FUNCTION = """
import keras
from keras import layers


def with_lambda():
    return keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2), layers.Dense(3)])


def own_layer():
    class Mine(layers.Layer):
        def call(self, x):
            return x

    return keras.Sequential([keras.Input((4,)), Mine(), layers.Dense(3)])


def any_size():
    middle = [layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((None, None, 3)), *middle, layers.Dense(3)])


def with_an_end():
    import atexit, pathlib
    atexit.register(lambda: pathlib.Path(__file__).with_name("at-the-end").touch())
    return fine()


def fine():
    return keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3, activation="softmax")])


@keras.saving.register_keras_serializable("mine")
class Registered(layers.Layer):
    def call(self, x):
        return x * 2


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


def registered():
    return keras.Sequential([keras.Input((4,)), Registered(), layers.Dense(3)])


def unregistered():
    return keras.Sequential([keras.Input((4,)), Unregistered(4), layers.Dense(3)])


def subclassed():
    model = Subclassed()
    model(keras.ops.zeros((1, 4)))
    return model


def unbuilt():
    return Subclassed()


def own_train_step():
    return OwnStep()


def compiled():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.003), "mse", metrics=["mae"])
    return model


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


def scheduled_by_own_class():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(Falling()), "mse")
    return model


def scheduled():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)), "mse")
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


def spec_of(reference: str, directory: Path, **recipe: Any) -> BuildSpec:
    """Return the request for a model whose file is the job's only code."""
    file = reference.rpartition(":")[0]
    roots = (file,) if file.endswith(".py") else ()
    return BuildSpec(reference, {}, Recipe(**{"learning_rate": 0.01, **recipe}), str(directory), roots)


def refusal(directory: Path, reference: str, **recipe: Any) -> str:
    """Return the message of the error, exit code 2, with which the model is refused."""
    with pytest.raises(WorkerError) as caught:
        build(spec_of(reference, directory, **recipe), directory, keras())
    assert caught.value.exit_code == 2
    return caught.value.message


def build_in_a_worker(directory: Path, reference: str) -> tuple[ModelInfo | None, str]:
    """Run the worker's `build`; return the model's properties, or None and the error message."""
    output = directory / "output"
    output.mkdir(exist_ok=True)
    arguments = ["--spec", to_json(spec_of(reference, directory)), "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "csdctl.worker", "build", *arguments],
        capture_output=True,
        text=True,
        env=QUIET,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER_PREFIX):
            return from_json(ModelInfo, line.removeprefix(ANSWER_PREFIX)), ""
    lines = [line for line in done.stderr.splitlines() if line.startswith(WORKER_ERROR_PREFIX)]
    assert lines, done.stderr
    assert done.returncode == 2
    return None, str(json.loads(lines[-1].removeprefix(WORKER_ERROR_PREFIX))["message"])


def save_keras_file(path: Path, middle: Any) -> str:
    layers = keras().layers
    keras().Sequential([keras().Input((4, 4, 1)), middle, layers.Flatten(), layers.Dense(3)]).save(path)
    return str(path)


def test_keras_file_is_transferred_as_architecture_and_weights(tmp_path: Path) -> None:
    file = save_keras_file(tmp_path / "model.keras", keras().layers.Rescaling(2.0))
    info, _ = build_in_a_worker(tmp_path, file)
    assert info
    assert (info.input_shape, info.output_shape) == ((4, 4, 1), (3,))
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [
        "architecture.json",
        "weights.npz",
    ]


@pytest.mark.fault(42)
def test_keras_file_with_code_in_it_is_refused(tmp_path: Path) -> None:
    file = save_keras_file(tmp_path / "model.keras", keras().layers.Lambda(lambda x: x * 2))
    info, why = build_in_a_worker(tmp_path, file)
    assert info is None
    assert "not a model that can be loaded safely" in why


def test_atexit_handlers_of_user_code_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    assert build_in_a_worker(tmp_path, f"{tmp_path}/mine.py:with_an_end")[0]
    assert (tmp_path / "at-the-end").exists()


@pytest.mark.fault(42)
def test_pickle_under_the_name_of_a_keras_file_is_refused_and_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/was-run",)

    (tmp_path / "model.keras").write_bytes(pickle.dumps(Runs()))
    why = refusal(tmp_path, str(tmp_path / "model.keras"))
    assert "not a model that can be loaded safely" in why
    assert not (tmp_path / "was-run").exists()


OWN_CODE = ("with_lambda", "registered", "unregistered", "subclassed", "own_layer")


def test_own_code_at_the_top_of_a_file_goes_to_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    for function in OWN_CODE:
        output = tmp_path / function
        output.mkdir()
        assert build(spec_of(f"{tmp_path}/mine.py:{function}", output), output, keras()).needs_code
    archive = tmp_path / "code.zip"
    archive.write_bytes(pack_code([tmp_path / "mine.py"]))
    (tmp_path / "mine.py").unlink()
    with_code = load_on_a_node(tmp_path, UserCode(str(archive), ("mine",)))
    assert all("Dense" in (with_code[function] or []) for function in OWN_CODE), with_code
    without = load_on_a_node(tmp_path, None)
    assert without == dict.fromkeys(OWN_CODE), "every model needs its code"


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
        model = load(*files, keras, {code!r})
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


def test_model_without_own_code_needs_none(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    assert not build(spec_of(f"{tmp_path}/mine.py:fine", tmp_path), tmp_path, keras()).needs_code


@pytest.mark.fault(42)
def test_file_beside_that_is_not_named_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from beside_it import Own\n" + FUNCTION + BESIDE)
    (tmp_path / "beside_it.py").write_text(FUNCTION + OWN)
    why = refusal(tmp_path, f"{tmp_path}/mine.py:imported")
    assert "imports beside_it.py, which the nodes would not have" in why


def test_model_with_a_train_step_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    assert "has its own train_step" in refusal(tmp_path, f"{tmp_path}/mine.py:own_train_step")


def test_subclass_is_built_by_the_shapes_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    spec = spec_of(f"{tmp_path}/mine.py:unbuilt", tmp_path)
    assert not build(spec, tmp_path, keras()).is_built
    info = build(replace(spec, sample_shapes={"": ("float32", (4,))}), tmp_path, keras())
    assert (info.is_built, info.num_parameters, info.input_shape) == (True, 15, (4,))


def test_what_the_model_was_compiled_with_completes_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    spec = spec_of(f"{tmp_path}/mine.py:compiled", tmp_path, learning_rate=None)
    info = build(spec, tmp_path, keras())
    assert (info.recipe.optimizer, info.recipe.learning_rate) == ("Adam", pytest.approx(0.003))
    assert [(output.name, output.loss) for output in info.outputs] == [("", "mean_squared_error")]
    named = build(spec_of(f"{tmp_path}/mine.py:compiled", tmp_path, learning_rate=0.5), tmp_path, keras())
    assert (named.recipe.optimizer, named.recipe.learning_rate) == ("Adam", 0.5)


def test_schedule_of_the_users_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    why = refusal(tmp_path, f"{tmp_path}/mine.py:scheduled_by_own_class", learning_rate=None)
    assert "Falling, is not one of Keras'" in why
    spec = spec_of(f"{tmp_path}/mine.py:scheduled_by_own_class", tmp_path, learning_rate=0.5)
    assert build(spec, tmp_path, keras()).recipe.learning_rate == 0.5


def test_schedule_of_a_compiled_model_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    spec = spec_of(f"{tmp_path}/mine.py:scheduled", tmp_path, learning_rate=None)
    info = build(spec, tmp_path, keras())
    assert json.loads(info.recipe.schedule)["class_name"] == "ExponentialDecay"
    assert info.recipe.learning_rate == pytest.approx(0.1)


@pytest.mark.parametrize("recipe", [{"metrics": ("nonsense",)}, {"losses": {"": LossTerm("nonsense")}}])
def test_unknown_names_are_refused(tmp_path: Path, recipe: dict[str, Any]) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    assert "'nonsense' can" in refusal(tmp_path, f"{tmp_path}/mine.py:fine", **recipe)


def test_learning_rate_is_needed_unless_the_model_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    why = refusal(tmp_path, f"{tmp_path}/mine.py:fine", learning_rate=None)
    assert "recipe.learning_rate is missing" in why


def test_loss_that_is_a_sum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    loss = {"": LossTerm("mean_squared_error", {"reduction": "sum"})}
    assert "reduction='sum'" in refusal(tmp_path, f"{tmp_path}/mine.py:fine", losses=loss)


def test_metrics_are_accepted_by_either_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    metrics = ("accuracy", "AUC", "sparse_top_k_categorical_accuracy", "SparseCategoricalCrossentropy")
    assert build(
        spec_of(f"{tmp_path}/mine.py:fine", tmp_path, metrics=metrics), tmp_path, keras()
    ).output_shape == (3,)


@pytest.mark.parametrize(("reference", "num_operations"), [("fine", 2 * 4 * 3), ("any_size", 0)])
def test_built_model_has_its_flops(tmp_path: Path, reference: str, num_operations: int) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    info = build(spec_of(f"{tmp_path}/mine.py:{reference}", tmp_path), tmp_path, keras())
    assert info.num_operations == num_operations


def test_weights_are_read_back_in_their_order_and_synced_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = note_calls(monkeypatch)
    weights = [np.full((2, number % 3 + 1), number, np.float32) for number in range(120)]
    save_weights(tmp_path / "weights.npz", weights)
    assert calls == [("fsync", ".part-weights.npz"), ("replace", "weights.npz")]
    assert all(map(np.array_equal, load_weights(tmp_path / "weights.npz"), weights))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", w00000=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        load_weights(tmp_path / "weights.npz")


def test_hash_of_weights_changes_with_every_one_of_them() -> None:
    """Statistics too, which are not trained, by whatever little."""
    model = keras().Sequential(
        [keras().Input((4,)), keras().layers.Dense(3), keras().layers.BatchNormalization()]
    )
    hashes = {hash_weights(model)}
    for weight in model.weights:
        value = np.array(weight.value)
        weight.assign(np.nextafter(value, np.float32(9)))
        hashes.add(hash_weights(model))
        weight.assign(value)
    assert len(hashes) == 1 + 6
    assert hash_weights(model) in hashes
