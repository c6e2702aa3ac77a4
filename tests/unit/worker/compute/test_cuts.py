"""Cuts of models whose layers are models, as those of transfer learning are; FLOPs, against manual counts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.cuts import NoCutError, count_flops, find_cuts, frozen_cut, split_at
from tests.unit.worker.compute.built_models import keras

NUM_FROZEN = 4
layers, Input, Model = keras().layers, keras().Input, keras().Model


def make_base(name: str = "base") -> Any:
    inputs = x = keras().Input((8, 8, 3))
    for number in range(3):
        skipped = x = keras().layers.Conv2D(4, 3, padding="same", name=f"{name}_conv{number}")(x)
        x = keras().layers.BatchNormalization(name=f"{name}_norm{number}")(x)
        x = keras().layers.Add(name=f"{name}_add{number}")([x, skipped])
    return keras().Model(inputs, x, name=name)


def put_head_on(base: Any) -> Any:
    inputs = keras().Input((8, 8, 3))
    x = base(keras().layers.Rescaling(1 / 255, name="scale")(inputs), training=False)
    x = keras().layers.GlobalAveragePooling2D(name="pool")(x)
    return keras().Model(inputs, keras().layers.Dense(2, name="head")(x))


def two_inputs() -> Any:
    left, right = Input((4,)), Input((5,), dtype="uint8")
    return Model([left, right], layers.Dense(3)(layers.Concatenate()([left, layers.Rescaling(1.0)(right)])))


def samples(count: int = 4) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3)).astype(np.float32)


def layers_of(model: Any) -> list[str]:
    return [cut.layer for cut in find_cuts(model)]


def test_model_is_cut_inside_of_the_models_that_are_its_layers() -> None:
    model = put_head_on(make_base())
    expected = [name for number in range(2) for name in (f"base_conv{number}", f"base_add{number}")]
    assert layers_of(model) == ["scale", *expected, "base_conv2", "base", "pool"]
    assert [layer.name for layer in model.layers if layer.name == "base"], "the model itself has changed"


def test_no_cut_has_a_shared_weight_on_both_sides_or_leaves_out_code_of_the_users() -> None:
    inputs, shared = Input((4,)), layers.Dense(4, name="shared")
    middle = layers.ReLU(name="middle")(shared(inputs))
    outputs = layers.Dense(2)(shared(middle))
    assert layers_of(Model(inputs, outputs)) == ["shared"], "behind its second use"

    class Own(Model):  # type: ignore[misc]
        def compute_loss(self, *_: Any, **__: Any) -> Any:
            return 0.0

    assert layers_of(Own(inputs, outputs)) == []


@pytest.mark.parametrize("is_training", [False, True])
def test_prefix_and_head_compute_what_the_whole_model_does(is_training: bool) -> None:
    model = put_head_on(make_base())
    whole = np.asarray(model(samples(), training=is_training))
    for cut in find_cuts(model):
        prefix, head = split_at(cut)
        parts = head(prefix(samples(), training=is_training), training=is_training)
        np.testing.assert_array_equal(np.asarray(parts), whole)
        assert {id(one) for one in (*prefix.weights, *head.weights)} == {id(one) for one in model.weights}


def test_first_frozen_layers_of_a_base_are_its_frozen_prefix() -> None:
    base = make_base()
    for layer in base.layers[: 1 + NUM_FROZEN]:
        layer.trainable = False
    cut = frozen_cut(put_head_on(base))
    assert cut.layer == "base_conv1"
    assert not split_at(cut)[0].trainable_variables


def name_twice() -> Any:
    inputs = keras().Input((8, 8, 3))
    narrow = keras().layers.Conv2D(3, 1, name="narrow")
    first, second = make_base("base"), make_base("base")
    second.name = "other"
    return keras().Model(inputs, keras().layers.Flatten(name="flat")(second(narrow(first(inputs)))))


def compute_otherwise() -> Any:
    """Return a model in which one is of a class of the user's own, which computes more than its graph."""

    class Doubled(keras().Model):
        def call(self, x: Any, training: bool | None = None) -> Any:
            return 2 * super().call(x, training=training)

    inner = keras().Input((8, 8, 3))
    return put_head_on(Doubled(inner, keras().layers.Conv2D(4, 3, name="inner_conv")(inner), name="own"))


def convert_input() -> Any:
    inputs = keras().Input((8, 8, 3), dtype="uint8")
    return keras().Model(inputs, keras().layers.Flatten(name="flat")(make_base()(inputs)))


@pytest.mark.parametrize(
    ("build", "cuts"),
    [
        (name_twice, ["base", "narrow", "other"]),
        (compute_otherwise, ["scale", "own", "pool"]),
        (convert_input, ["base"]),
    ],
)
def test_models_that_cannot_be_unrolled_are_left_whole(build: Callable[[], Any], cuts: list[str]) -> None:
    assert layers_of(build()) == cuts


def begin(*layers: Any, is_frozen: bool = True) -> Any:
    """Return a model that begins with a model of these layers and a dense one."""
    inputs = keras().Input((8, 8, 3))
    base = keras().Sequential([keras().Input((8, 8, 3)), *layers, keras().layers.Dense(5)])
    base.trainable = not is_frozen
    return keras().Model(inputs, keras().layers.Dense(2)(base(inputs)))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: begin(is_frozen=False), "has no frozen first layers"),
        (lambda: begin(keras().layers.Dropout(0.5)), "draws random numbers, or changes its state"),
        (lambda: begin(keras().Sequential([keras().layers.RandomFlip()])), "draws random numbers"),
        (two_inputs, "has no frozen first layers"),
        (Model, "is not a functional model with a single tensor between two layers"),
    ],
)
def test_model_without_features_says_why(build: Callable[[], Any], reason: str) -> None:
    with pytest.raises(NoCutError, match=reason):
        frozen_cut(build())


def chain(shape: tuple[int | None, ...], *inner: Any, dtype: str = "float32") -> Any:
    return keras().Sequential([Input(shape, dtype=dtype), *inner])


def attention() -> Any:
    sequence = Input((10, 8))
    return Model(sequence, layers.MultiHeadAttention(2, 4)(sequence, sequence))


def in_place(**options: Any) -> Any:
    return layers.Conv2D(6, 3, padding="same", **options)


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "dense": (lambda: chain((4, 4, 1), layers.Flatten(), layers.Dense(3)), 16 * 3),
    "channels in groups": (lambda: chain((8, 8, 4), in_place(groups=2)), 8 * 8 * 6 * 3 * 3 * 2),
    "separable": (
        lambda: chain((8, 8, 4), layers.SeparableConv2D(6, 3, padding="same")),
        8 * 8 * 4 * 3 * 3 + 8 * 8 * 4 * 6,
    ),
    "transposed": (
        lambda: chain((8, 8, 4), layers.Conv2DTranspose(6, 3, strides=2, padding="same")),
        8 * 8 * 4 * 3 * 3 * 6,
    ),
    "three dimensions": (lambda: chain((5, 5, 5, 4), layers.Conv3D(6, 3)), 3**3 * 6 * 3**3 * 4),
    "recurrent": (lambda: chain((10, 4), layers.LSTM(6)), 10 * 4 * (4 + 6) * 6),
    "both ways": (lambda: chain((10, 4), layers.Bidirectional(layers.GRU(6))), 2 * 10 * 3 * (4 + 6) * 6),
    "einsum": (lambda: chain((10, 4), layers.EinsumDense("...x,xy->...y", output_shape=(7,))), 10 * 4 * 7),
    "projections of attention": (attention, 4 * 10 * 8 * 8),
    "two inputs": (two_inputs, 9 * 3),
    "a model as a layer": (lambda: chain((4,), chain((4,), layers.Dense(3)), layers.Dense(2)), 4 * 3 + 3 * 2),
    "any size": (lambda: chain((None, None, 3), layers.Conv2D(4, 3)), 0),
    "subclassed": (Model, 0),
}
"""Models, and the multiply-accumulates of one sample, counted manually."""


@pytest.mark.first(6)
@pytest.mark.parametrize(("build", "num_macs"), MODELS.values(), ids=MODELS)
def test_flops_equal_manual_counts(build: Callable[[], Any], num_macs: int) -> None:
    assert count_flops(build()) == 2 * num_macs
