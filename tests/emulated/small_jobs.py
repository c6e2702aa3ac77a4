"""Models and data of small jobs: TensorFlow starts for seconds, and they train for milliseconds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

TRAINING_DATA = ("public", "private")
ALL_DATA = (*TRAINING_DATA, "validation")


def small_job(
    recipe: str, suffix: str = "", *, model: str = "model.py:build", data: Sequence[str] = TRAINING_DATA
) -> str:
    """Return the text of job.yaml: each of `data` is in a file or directory of its name, with this suffix."""
    paths = {name: f"~/{name}{suffix}" if name == "private" else f"{name}{suffix}" for name in data}
    lines = "".join(f"  {name}: {{path: {path}}}\n" for name, path in paths.items())
    return f"model: {model}\ndata:\n{lines}recipe: {{{recipe}}}\n"


def dense_model(*shape: int, outputs: int = 3, activation: str = "softmax") -> str:
    """Return the text of model.py: one dense layer on samples of this shape."""
    return f"""\
import keras


def build():
    output = keras.layers.Dense({outputs}, activation={activation!r})
    return keras.Sequential([keras.Input({shape}), keras.layers.Flatten(), output])
"""


def frozen_model(size: int, *base: str) -> str:
    """Return the text of model.py: a head on frozen layers `base`, which `build_trained` trains, too."""
    layers = "".join(f"        layers.{layer},\n" for layer in base)
    return f"""\
import keras
from keras import layers


def build():
    base = keras.Sequential([
        keras.Input(({size}, {size}, 3)),
{layers}        layers.GlobalAveragePooling2D(),
    ], name="base")
    base.trainable = False
    inputs = keras.Input(({size}, {size}, 3))
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(base(inputs)))


def build_trained():
    model = build()
    model.get_layer("base").trainable = True
    return model
"""


def pausing_layer(seconds: float, condition: str = "True") -> str:
    """Return the text of a module with the layer Pause, which waits in every step while `condition` holds."""
    return f"""\
import os
import time

import keras
import tensorflow as tf


def wait(samples):
    if {condition}:
        time.sleep({seconds})
    return samples


class Pause(keras.layers.Layer):
    def call(self, samples):
        waited = tf.numpy_function(wait, [samples], samples.dtype)
        waited.set_shape(samples.shape)
        return waited

    def compute_output_shape(self, shape):
        return shape
"""


def save_arrays(directory: Path, count: int, *shape: int, num_classes: int = 3) -> None:
    """Write images.npy with random samples and labels.npy with as many of each class."""
    generator = np.random.default_rng(count)
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "images.npy", generator.integers(0, 256, (count, *shape), dtype=np.uint8))
    np.save(directory / "labels.npy", (np.arange(count) % num_classes).astype(np.int32))
