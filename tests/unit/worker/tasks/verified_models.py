"""Models as Keras users write them, tiny, with the recipe and the data that each one takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import widen
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.data.arrays import dtype_to_text
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.recipe import LossTerm, Recipe
from csdctl.worker.protocol.run_spec import RankSpec, Runtime
from tests.unit.worker.compute.built_models import Step

SIZES = (16, 12, 5)
"""The batch sizes of the ranks."""
SEED = 5
PIXELS = np.zeros((0, 16, 16, 3), np.uint8)
CLASSES = np.zeros(0, np.int32)
TOKENS = np.zeros((0, 12), np.int32)
TABLE = np.zeros((0, 10), np.float32)
NUMBERS = np.zeros((0, 1), np.float32)


@dataclass(frozen=True)
class Row:
    """A row of the matrix."""

    build: Callable[[Any], Any]
    """Given the module keras, returns the model."""
    samples: Any = field(default_factory=lambda: PIXELS)
    labels: Any = field(default_factory=lambda: CLASSES)
    recipe: Recipe = field(default_factory=lambda: Recipe(learning_rate=0.01))
    policy: str = "float32"
    """Keras' dtype policy."""
    max_values: dict[str, int] = field(default_factory=dict)
    """The largest values of inputs of integers."""

    @property
    def form(self) -> DatasetInfo:
        """What random samples are drawn by. Classes are below 3."""
        shapes = self.samples.shape[1:], dtype_to_text(self.samples.dtype), self.labels.shape[1:]
        labels = {"label_dtype": dtype_to_text(self.labels.dtype), "max_labels": {"kind": 2}}
        return DatasetInfo("", 0, *shapes, 2, "", max_values=self.max_values, **labels)


def convolutions(keras: Any) -> Any:
    layers = keras.layers
    inner = [layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D()]
    inner += [layers.Conv2D(16, 3, activation="relu"), layers.GlobalAveragePooling2D()]
    last = layers.Dense(5, activation="softmax", dtype="float32")
    return keras.Sequential([keras.Input((16, 16, 3)), *inner, last])


def with_dropout(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D()(x)
    x = layers.SpatialDropout2D(0.2)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(16, activation="relu")(x)
    x = layers.Dropout(0.5)(x)
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(x))


def residual_with_batch_norm(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((16, 16, 3))
    x = layers.Rescaling(2.0, offset=-1.0)(inputs)
    for filters in (8, 16):
        shortcut = layers.Conv2D(filters, 1, strides=2, use_bias=False)(x)
        x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x)
        x = layers.SeparableConv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(gamma_initializer="zeros" if filters == 16 else "ones")(x)
        x = layers.ReLU()(layers.Add()([x, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(5, activation="softmax", dtype="float32")(x))


def zero_weights(keras: Any) -> Any:
    dense = keras.layers.Dense(3, activation="softmax", kernel_initializer="zeros")
    return keras.Sequential([keras.Input((10,)), dense])


def two_outputs(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((16, 16, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(inputs))
    kind = layers.Dense(5, activation="softmax", name="kind")(x)
    return keras.Model(inputs, {"kind": kind, "size": layers.Dense(1, name="size")(x)})


def masked(keras: Any) -> Any:
    layers = keras.layers
    inputs = keras.Input((12,), dtype="int32")
    x = layers.LSTM(8, return_sequences=True)(layers.Embedding(40, 8, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(x))


def with_class_as_input(keras: Any) -> Any:
    """The loss looks up the class: one beyond the last would be an error."""
    layers, ops = keras.layers, keras.ops

    class Endpoint(layers.Layer):
        def call(self, outputs: Any, kind: Any) -> Any:
            self.add_loss(-ops.take_along_axis(ops.log_softmax(outputs), kind, axis=1))
            return outputs

    inputs, kind = keras.Input((10,), name="table"), keras.Input((1,), dtype="int32", name="kind")
    outputs = Endpoint()(layers.Dense(4)(inputs), kind)
    model = keras.Model([inputs, kind], outputs)
    model.compile("sgd")
    return model


TABLE_AND_KIND = np.zeros(0, [("table", np.float32, (10,)), ("kind", np.int32, (1,))])
NO_LABELS = np.zeros((0, 0), np.float32)
KINDS_AND_SIZES = np.zeros(0, [("kind", np.int32), ("size", np.float32, (1,)), ("sample_weight", np.float32)])
TAGS = np.zeros((0, 12), np.int32)
SQUARES = Recipe(losses={"": LossTerm("mean_squared_error")}, learning_rate=0.01)
TWO = Recipe(
    losses={"kind": LossTerm("sparse_categorical_crossentropy"), "size": LossTerm("mse", {}, 0.3)},
    learning_rate=0.01,
)
ROWS = {
    "convolutions": Row(convolutions),
    "dropout": Row(with_dropout),
    "batch norm": Row(residual_with_batch_norm),
    "two outputs, weighted": Row(two_outputs, labels=KINDS_AND_SIZES, recipe=TWO),
    "masked time steps": Row(masked, TOKENS, TAGS, max_values={"": 39}),
    "a class as input": Row(with_class_as_input, TABLE_AND_KIND, NO_LABELS, max_values={"kind": 3}),
    "all weights 0": Row(zero_weights, TABLE),
    "bfloat16 convolutions": Row(convolutions, policy="mixed_bfloat16"),
}


def make_step(row: Row, keras: Any, kind: type[Step] = Step) -> Step:
    """Return the step of rank 0, with the same weights in every process."""
    keras.backend.clear_session()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(row.policy)
    keras.utils.set_random_seed(SEED)
    try:
        model = row.build(keras)
        recipe = compile_model(model, replace(row.recipe, seed=SEED))
        widen(model)
    finally:
        keras.config.set_dtype_policy(before)
    return kind(model, recipe, (row.samples, row.labels))


def specs_of(sizes: Sequence[int], num_steps: int = 1) -> tuple[RankSpec, ...]:
    """Return ranks with these batch sizes, whose samples are public and last for so many steps."""
    nodes = ["host", *(f"csd{number}" for number in range(len(sizes) - 1))]
    return tuple(
        RankSpec(rank, node, size, Runtime(), None, None, 0, num_steps * size)
        for rank, (node, size) in enumerate(zip(nodes, sizes, strict=True))
    )
