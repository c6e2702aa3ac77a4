"""Models as Keras users write them, tiny, with the recipe and the data that each one takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import widen
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.engine.step import StepInfo
from csdctl.worker.protocol.recipe import LossTerm, Recipe
from csdctl.worker.protocol.run_spec import RankSpec, Runtime
from csdctl.worker.tasks.verify import Ranges, draw_samples
from tests.unit.worker.compute.built_models import Step

SIZES = (16, 12, 5)
"""The batch sizes of the ranks."""
WRONG = 1
"""The rank that computes something else where the engine is wrong."""
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
    reasons: tuple[str, ...] = ()
    """Why it is not compared with one batch of all samples: parts of these sentences."""
    ranges: Ranges = field(default_factory=dict)
    """Of the data."""


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


def tiny_gradients(keras: Any) -> Any:
    layers = keras.layers
    shrink = layers.Rescaling(1e-12)
    inner = [layers.Dense(16, activation="relu"), layers.Dense(16, activation="relu")]
    return keras.Sequential([keras.Input((10,)), *inner, layers.Dense(1), shrink])


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


def coupled(keras: Any) -> Any:
    """Every output depends on all samples of the batch."""
    inputs = keras.Input((10,))
    x = keras.layers.Dense(8)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(x - 0.5 * keras.ops.mean(x, axis=0, keepdims=True)))


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


def normalized(keras: Any) -> Any:
    """Takes numbers around 240: those around 0 are far off, and saturate the output."""
    layers = keras.layers
    inner = [layers.Dense(16, activation="relu"), layers.Dense(1, activation="sigmoid")]
    return keras.Sequential([keras.Input((10,)), layers.Normalization(mean=240.0, variance=100.0), *inner])


TABLE_AND_KIND = np.zeros(0, [("table", np.float32, (10,)), ("kind", np.int32, (1,))])
NO_LABELS = np.zeros((0, 0), np.float32)
KINDS_AND_SIZES = np.zeros(0, [("kind", np.int32), ("size", np.float32, (1,)), ("sample_weight", np.float32)])
TAGS = np.zeros((0, 12), np.int32)
SQUARES = Recipe(losses={"": LossTerm("mean_squared_error")}, learning_rate=0.01)
BINARY = Recipe(losses={"": LossTerm("binary_crossentropy")}, learning_rate=0.01)
TWO = Recipe(
    losses={"kind": LossTerm("sparse_categorical_crossentropy"), "size": LossTerm("mse", {}, 0.3)},
    learning_rate=0.01,
)
ROWS = {
    "convolutions": Row(convolutions),
    "dropout": Row(with_dropout, reasons=("dropout", "spatial_dropout2d")),
    "batch norm": Row(residual_with_batch_norm, reasons=("batch_normalization",)),
    "two outputs, weighted": Row(two_outputs, labels=KINDS_AND_SIZES, recipe=TWO),
    "masked time steps": Row(masked, TOKENS, TAGS),
    "coupled samples": Row(coupled, TABLE, NUMBERS, SQUARES, reasons=("compares samples of a batch",)),
    "a class as input": Row(with_class_as_input, TABLE_AND_KIND, NO_LABELS, ranges={"kind": ((0.0, 3.0),)}),
    "table, normalized": Row(normalized, TABLE, NUMBERS, BINARY, ranges={"": ((200.0, 280.0),) * 10}),
    "all weights 0": Row(zero_weights, TABLE),
    "tiny gradients": Row(tiny_gradients, TABLE, NUMBERS, SQUARES),
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


class RowReader:
    """Stands in for a reader of files: draws what the row's model takes."""

    def __init__(self, row: Row, info: StepInfo) -> None:
        self._example, self._info, self._ranges = (row.samples, row.labels), info, row.ranges

    def set_epoch(self, epoch: int) -> None:
        pass

    def first(self, count: int) -> tuple[Any, Any]:
        return draw_samples(0, count, seed=0, example=self._example, info=self._info, ranges=self._ranges)

    def read(self, share: Any, reassigned: Any = None) -> tuple[Any, Any]:
        return self.first(share.num_samples)

    def pack_reassigned(self, spans: Any) -> bytes:
        return b""
