"""The first ten steps of compiled steps against Keras' `train_on_batch`: twelve models, the same samples.

    make bench ARGS="-k against_fit"

The networks of Table I at small sizes, and five others; without dropout, which draws other random numbers.
One thread, batches of 8. Each of Keras' ten steps is repeated by the compiled step from the same state, and
by Keras with the samples of the batch in reverse order. Printed are the largest relative difference of the
loss, of the state (weights, moving statistics, momentum) relative to its change, and of the losses of ten
steps in a row: training a deep network with batch normalization amplifies rounding.
"""

from pathlib import Path

import pytest

from benchmarks.bench_first_gradient import run

IMAGES = {
    "SqueezeNet": 64,
    "MobileNetV2": 64,
    "NASNetMobile": 64,
    "DenseNet121": 64,
    "InceptionV3": 75,
    "ResNet50": 64,
    "VGG16": 32,
}
"""Pixels of a side."""
NETWORKS = (*IMAGES, "cnn", "lstm", "transformer", "unet", "siamese")
BUILD = """
import json, sys
import numpy as np
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.protocol.recipe import Recipe
directory, network, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
recipe, steps, batch = Recipe(learning_rate=1e-4), 10, 8
rng = np.random.default_rng(0)
shape = {"cnn": (28, 28, 1), "lstm": (20,), "transformer": (20,), "unet": (32, 32, 3), "siamese": (2, 20)}
shape = shape.get(network, (size, size, 3))
if network in ("lstm", "transformer"):
    samples = rng.integers(1, 1000, (steps * batch, *shape)).astype(np.int32)
else:
    samples = rng.random((steps * batch, *shape), np.float32)
if size:  # coarse pictures: to a deep network, all pictures of noise are alike
    coarse = rng.random((steps * batch, 5, 5, 3), np.float32)
    samples = np.repeat(np.repeat(coarse, size // 5 + 1, 1), size // 5 + 1, 2)[:, :size, :size]
labels = rng.integers(0, 10, (steps * batch, 32, 32) if network == "unet" else steps * batch).astype(np.int32)
if network == "siamese":
    labels = (labels % 2).astype(np.float32)

def squeezenet(layers, x):
    def fire(x, narrow, wide):
        x = layers.Conv2D(narrow, 1, activation="relu")(x)
        both = [layers.Conv2D(wide, k, padding="same", activation="relu")(x) for k in (1, 3)]
        return layers.Concatenate()(both)
    x = layers.MaxPool2D(3, 2)(layers.Conv2D(64, 3, strides=2, activation="relu")(x))
    x = layers.MaxPool2D(3, 2)(fire(fire(x, 16, 64), 16, 64))
    x = layers.MaxPool2D(3, 2)(fire(fire(x, 32, 128), 32, 128))
    x = fire(fire(fire(fire(x, 48, 192), 48, 192), 64, 256), 64, 256)
    return layers.Softmax()(layers.GlobalAveragePooling2D()(layers.Conv2D(10, 1, activation="relu")(x)))

def unet(layers, x):
    skips = []
    for width in (8, 16):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        skips.append(x)
        x = layers.MaxPool2D()(x)
    for width in (16, 8):
        x = layers.UpSampling2D()(layers.Conv2DTranspose(width, 3, padding="same", activation="relu")(x))
        x = layers.Concatenate()([x, skips.pop()])
    return layers.Conv2D(10, 1, activation="softmax")(x)

def transformer(layers, x):
    x = layers.Embedding(1000, 32)(x)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, activation="gelu")(x)))
    return layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x))

def build():
    keras = load_backend()[1]
    keras.utils.set_random_seed(0)
    layers, loss = keras.layers, "sparse_categorical_crossentropy"
    inputs = keras.Input(shape, dtype=samples.dtype)
    if network == "cnn":
        x = layers.MaxPool2D()(layers.Conv2D(32, 3, activation="relu")(inputs))
        x = layers.MaxPool2D()(layers.Conv2D(64, 3, activation="relu")(x))
        outputs = layers.Dense(10, activation="softmax")(layers.Flatten()(x))
    elif network == "lstm":
        x = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(
            layers.Embedding(1000, 32, mask_zero=True)(inputs))
        outputs = layers.Dense(10, activation="softmax")(layers.LSTM(16)(x))
    elif network == "siamese":
        tower = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)])
        apart = keras.ops.norm(tower(inputs[:, 0]) - tower(inputs[:, 1]), axis=-1, keepdims=True)
        outputs, loss = layers.Dense(1, activation="sigmoid")(apart), "binary_crossentropy"
    elif network in ("SqueezeNet", "unet", "transformer"):
        function = {"SqueezeNet": squeezenet, "unet": unet, "transformer": transformer}[network]
        outputs = function(layers, inputs)
    else:
        made = getattr(keras.applications, network)(input_shape=shape, classes=10, weights=None)
        inputs, outputs = made.inputs, made.outputs
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    return model
"""
COMPARE = """
from pathlib import Path
from csdctl.worker.compute.compile import assign, make_compiler, trace, write_graph
from csdctl.worker.engine.step import StepEngine, StepInfo, load_compiled
from csdctl.worker.protocol.run_spec import CompiledStep, Runtime
compiler = make_compiler(build(), recipe, (samples[:0], labels[:0]))
info, builder = trace(compiler)
write_graph(builder, info, compiler.values, Path(directory))
files = CompiledStep(*(f"{directory}/{name}" for name in ("graph.pb", "info.json", "state.npz")))
engine = StepEngine(*load_compiled(files, StepInfo, Runtime()), Recipe().seed)
model, first = compiler.model, engine.values

def read():
    return [np.array(variable) for variable in compiler.variables]

def apart(left, right):
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a.dtype.kind == "f"]
    return float(sum(np.square(a - b, dtype=float).sum() for a, b in pairs) ** 0.5)

def compiled(number, rows):
    engine.set_step(number, 1e-4)
    return engine.alone(samples[rows], labels[rows]).mean_loss

def keras(rows):
    model.reset_metrics()
    return float(model.train_on_batch(samples[rows], labels[rows], return_dict=True)["loss"])

found, losses = {"compiled": [], "reversed": []}, []
for number in range(steps):
    before, rows = read(), np.arange(number * batch, (number + 1) * batch)
    engine.values = before
    trained = {"compiled": (compiled(number, rows), engine.values)}
    trained["reversed"] = keras(rows[::-1]), read()
    for variable, value in zip(compiler.variables, before, strict=True):
        assign(variable, value)
    losses.append(keras(rows))
    after = read()
    for name, (loss, values) in trained.items():
        found[name].append((abs(loss / losses[-1] - 1), apart(values, after) / apart(before, after)))
engine.values = first
row = [abs(compiled(k, np.arange(k * batch, (k + 1) * batch)) / losses[k] - 1) for k in range(steps)]
print(json.dumps({**{name: np.max(values, 0).tolist() for name, values in found.items()}, "row": max(row)}))
"""


@pytest.mark.parametrize("network", NETWORKS)
def test_against_fit(tmp_path: Path, network: str) -> None:
    found = run(BUILD + COMPARE, str(tmp_path), network, str(IMAGES.get(network, 0)))
    (loss, weights), (own_loss, own_weights) = found["compiled"], found["reversed"]
    print(
        f"\n{network}: from the same state, losses apart by {loss:.1e} (Keras itself {own_loss:.1e}), "
        f"states by {weights:.1e} of their change ({own_weights:.1e}); ten steps in a row {found['row']:.1e}",
        end="",
        flush=True,
    )
