"""Compiled forward passes against Keras' `predict`, and a whole model saved by the step of its head."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.compile import assemble, compile_all, compile_forward, compile_step
from csdctl.worker.compute.cuts import frozen_cut, split_at
from csdctl.worker.compute.forward import forward_pass
from csdctl.worker.compute.keras_internals import compile_arguments
from csdctl.worker.compute.model import load, save_weights, with_settings
from csdctl.worker.data.arrays import Array, dtype_to_text
from csdctl.worker.engine.keras_file import places_of_head, save_like
from csdctl.worker.engine.step import StepEngine, StepInfo, load_compiled, load_info
from csdctl.worker.ingest.extract import extract
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.features import VALUES, ExtractSpec, ResultRule
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import CompileRequest, CompileRequests
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import CompiledStep, HeadSpec, Prefix, Runtime
from tests.unit.worker.compute.built_models import as_records, carry, keras
from tests.unit.worker.ingest.prepared_data import extract_spec, store_prefix, stored

NUM_SAMPLES = 40
GENERATOR = np.random.default_rng(0)
PICTURES = GENERATOR.integers(0, 256, (NUM_SAMPLES, 12, 12, 3), np.uint8)
ROWS = GENERATOR.normal(size=(NUM_SAMPLES, 6)).astype(np.float32)
TOKENS = GENERATOR.integers(0, 50, (NUM_SAMPLES, 7)).astype(np.int32)
RANGE = (-1.0, 1.0)
SCALED = PICTURES.astype(np.float32) * np.float32(2 / 255) - 1


def pictures(dtype: str = "float32") -> Any:
    layers = keras().layers
    return keras().Sequential(
        [
            keras().Input((12, 12, 3)),
            layers.Conv2D(8, 3, use_bias=False, dtype=dtype),
            layers.BatchNormalization(gamma_initializer="random_normal", dtype=dtype),
            layers.ReLU(dtype=dtype, name="hidden"),
            layers.Dropout(0.5),
            layers.GlobalAveragePooling2D(dtype=dtype),
        ]
    )


def two_inputs() -> Any:
    layers = keras().layers
    rows, tokens = keras().Input((6,), name="rows"), keras().Input((7,), dtype="int32", name="tokens")
    words = layers.LSTM(5)(layers.Embedding(50, 4, mask_zero=True)(tokens))
    joined = layers.Concatenate()([layers.Dense(5, "relu")(rows), words])
    outputs = [layers.Dense(3, "softmax", name="kind")(joined), layers.Dense(1, name="size")(joined)]
    return keras().Model({"rows": rows, "tokens": tokens}, outputs)


def looked_up() -> Any:
    layers, tokens = keras().layers, keras().Input((7,), dtype="int32")
    one_hot = layers.IntegerLookup(vocabulary=list(range(1, 40)), output_mode="multi_hot")(tokens)
    return keras().Model(tokens, layers.Dense(3)(one_hot))


BOTH = as_records({"rows": ROWS, "tokens": TOKENS})
MODELS: dict[str, tuple[Any, ...]] = {
    "pictures": (pictures, PICTURES, SCALED, RANGE, 1e-5, ""),
    "a layer": (pictures, PICTURES, SCALED, RANGE, 1e-5, "hidden"),
    "bfloat16": (lambda: pictures("bfloat16"), PICTURES, SCALED, RANGE, 2e-2, ""),
    "mixed_float16": (lambda: pictures("mixed_float16"), PICTURES, SCALED, RANGE, 2e-3, ""),
    "a lookup table": (looked_up, TOKENS, TOKENS, None, 1e-5, ""),
    "two inputs and outputs": (two_inputs, BOTH, {"rows": ROWS, "tokens": TOKENS}, None, 1e-5, ""),
}


def compiled(directory: Path, prefix: Prefix, samples: Array, layer: str = "") -> Prefix:
    """Compile what `prefix` names; its files are renamed as in the store."""
    output = directory / "compiled"
    output.mkdir()
    data = DatasetInfo("", 0, samples.shape[1:], dtype_to_text(samples.dtype), (), -1, "")
    recipe = replace(RECIPE, input_range=prefix.input_range)
    request = CompileRequest(prefix.architecture, prefix.weights, recipe, data, str(output), layer=layer)
    assert compile_forward(request) == ""
    return replace(prefix, compiled=files_in(output))


def files_in(directory: Path, template: str = "") -> CompiledStep:
    names = ("graph.pb", "info.json", "state.npz")
    return CompiledStep(*(str(directory / name) for name in names), template and str(directory / template))


@pytest.mark.parametrize("max_constant_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_constant_bytes: int, name: str
) -> None:
    monkeypatch.setattr("csdctl.worker.compute.compile.MAX_CONSTANT_BYTES", max_constant_bytes)
    build, samples, as_given, input_range, tolerance, layer = MODELS[name]
    model = build()
    prefix = replace(store_prefix(tmp_path, model), input_range=input_range)
    computed = keras().Model(model.inputs, model.get_layer(layer).output) if layer else model
    expected = join(keras().tree.flatten(computed.predict(as_given, verbose=0)))
    for part in (compiled(tmp_path, prefix, samples, layer), prefix):
        outputs = forward_pass(part, join, Runtime(), layer).run(samples)
        np.testing.assert_allclose(outputs, expected, tolerance, tolerance)


def join(outputs: list[Array]) -> Array:
    """Return all outputs in one array."""
    return np.concatenate([one.reshape(len(one), -1).astype(np.float32) for one in outputs], axis=1)


OWN = """\
import keras
import tensorflow as tf


class Double(keras.layers.Layer):
    def call(self, samples):
        return tf.ensure_shape(tf.numpy_function(lambda x: 2 * x, [samples], tf.float32), samples.shape)
"""


def test_model_that_calls_python_says_so(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    module: dict[str, Any] = {}
    exec(OWN, module)
    double = keras().saving.register_keras_serializable("own")(module["Double"])
    model = keras().Sequential([keras().Input((6,)), double(), keras().layers.Dense(2)])
    prefix = store_prefix(tmp_path, model)
    data = DatasetInfo("", 0, (6,), "float32", (), -1, "")
    recipe = replace(RECIPE, input_range=None)
    request = CompileRequest(prefix.architecture, prefix.weights, recipe, data, str(tmp_path))
    assert "calls Python" in compile_forward(request)
    found = forward_pass(prefix, lambda outputs: outputs[0], Runtime()).run(ROWS)
    np.testing.assert_allclose(found, model.predict(ROWS, verbose=0), rtol=1e-5)


def test_head_of_features_whose_size_is_not_known_runs_by_keras(tmp_path: Path) -> None:
    data = DatasetInfo("", 0, (0, 0, 8), "float32", (), 3, "")
    request = CompileRequest("", "", RECIPE, data, str(tmp_path))
    (reason,) = compile_all(CompileRequests((request,))).reasons
    assert reason == "the size of its samples is not fixed"


PROGRAM = """
import sys
from csdctl.worker.ingest.extract import extract
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.json_codec import from_json
extract(from_json(ExtractSpec, sys.argv[1]))
print({"tensorflow", "keras", "h5py"} & {*sys.modules})
"""


def compiled_spec(directory: Path) -> ExtractSpec:
    spec = extract_spec(directory)
    return replace(spec, prefix=compiled(directory, spec.prefix, ROWS))


@pytest.mark.parametrize("results", [(), (ResultRule("", VALUES),)])
def test_machine_imports_neither_keras_nor_tensorflow(
    tmp_path: Path, results: tuple[ResultRule, ...]
) -> None:
    spec = replace(compiled_spec(tmp_path), results=results)
    command = [sys.executable, "-c", PROGRAM, to_json(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    (there,) = extract(spec).parts
    (by_keras,) = extract(replace(spec, prefix=replace(spec.prefix, compiled=None))).parts
    assert there.fingerprint != by_keras.fingerprint
    for name in stored(there).dtype.names or [...]:
        np.testing.assert_allclose(stored(there)[name], stored(by_keras)[name], rtol=1e-5, atol=1e-6)


RECIPE = Recipe(learning_rate=0.01, optimizer="adam", metrics=("accuracy",))


def test_step_of_the_head_saves_the_whole_model_as_keras_does(tmp_path: Path) -> None:
    layers = keras().layers
    base = keras().Sequential(
        [keras().Input((6,)), layers.Dense(5), layers.BatchNormalization()], name="base"
    )
    base.trainable = False
    inputs = keras().Input((6,))
    model = keras().Model(inputs, layers.Dense(4, "softmax")(layers.BatchNormalization()(base(inputs))))
    architecture, weights = carry(model, tmp_path, RECIPE)
    _, head = split_at(frozen_cut(model))
    places = {id(one): number for number, one in enumerate(model.weights)}
    numbers = tuple(places[id(one)] for one in head.weights)
    head.compile(**compile_arguments(model))
    of_head = tmp_path / "head.json", tmp_path / "head.npz"
    of_head[0].write_text(with_settings(head.to_json()))
    save_weights(of_head[1], head.get_weights())

    features, classes = GENERATOR.normal(size=(8, 5)).astype("f4"), np.arange(8, dtype=np.int32) % 4
    files = {}
    for name, (paths, shape) in {"whole": ((architecture, weights), 6), "head": (of_head, 5)}.items():
        (tmp_path / name).mkdir()
        data = DatasetInfo("", 0, (shape,), "float32", (), 3, "")
        assert not compile_step(CompileRequest(*map(str, paths), RECIPE, data, str(tmp_path / name)))
        files[name] = files_in(tmp_path / name, "template.keras")
    engine = StepEngine(*load_compiled(files["head"], StepInfo, Runtime()), RECIPE.seed)
    for step in range(3):
        engine.set_step(step, 0.02)
        engine.alone(features, classes)
    whole_info = load_info(files["whole"], StepInfo)
    values = [*engine.averaged_values(), np.asarray(engine.rate)]
    found = places_of_head(engine.info, whole_info, numbers)
    saved = keras().models.load_model(
        save_like(files["whole"].template, found, values, tmp_path / "saved.keras")
    )

    trained = load(*of_head)
    trained.optimizer.build(trained.trainable_variables)
    others = [one for one in trained.optimizer.variables if one is not trained.optimizer.learning_rate]
    for variable, value in zip(
        [*trained.weights, *others, trained.optimizer.learning_rate], values, strict=True
    ):
        variable.assign(value)
    prefix = Prefix("", "", None)
    expected = assemble(HeadSpec(prefix, architecture, weights, numbers), trained)
    for one, other in zip(
        [*saved.weights, *saved.optimizer.variables],
        [*expected.weights, *expected.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(one, other, one.path)
    saved.fit(ROWS, np.zeros(NUM_SAMPLES), verbose=0)
