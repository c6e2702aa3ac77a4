"""FLOPs of models, against manual counts."""

from collections.abc import Callable
from typing import Any

import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.cuts import count_flops

pytestmark = pytest.mark.first(6)

keras = load_backend()[1]
layers, Input, Model = keras.layers, keras.Input, keras.Model


class Broken:
    inputs = [Input((4,))]

    def __call__(self, *inputs: Any, **settings: Any) -> Any:
        raise ValueError("cannot be called")


def chain(shape: tuple[int | None, ...], *inner: Any, dtype: str = "float32") -> Any:
    return keras.Sequential([Input(shape, dtype=dtype), *inner])


def attention() -> Any:
    sequence = Input((10, 8))
    return Model(sequence, layers.MultiHeadAttention(2, 4)(sequence, sequence))


def two_inputs() -> Any:
    left, right = Input((4,)), Input((5,), dtype="uint8")
    return Model([left, right], layers.Dense(3)(layers.Concatenate()([left, layers.Rescaling(1.0)(right)])))


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
    "attention": (attention, 4 * 10 * 8 * 8 + 2 * 10 * 10 * 8),
    "two inputs": (two_inputs, 9 * 3),
    "any size": (lambda: chain((None, None, 3), layers.Conv2D(4, 3)), 0),
    "broken": (Broken, 0),
}
"""Models, and the multiply-accumulates of one sample, counted manually."""


@pytest.mark.parametrize(("build", "num_macs"), MODELS.values(), ids=MODELS)
def test_flops_equal_manual_counts(build: Callable[[], Any], num_macs: int) -> None:
    assert count_flops(build()) == 2 * num_macs


def test_mobilenet_has_the_300_million_multiply_accumulates_of_its_paper_also_as_a_layer() -> None:
    whole = count_flops(keras.applications.MobileNetV2(weights=None))
    assert whole == pytest.approx(2 * 300e6, rel=0.01)
    middle = keras.applications.MobileNetV2(include_top=False, weights=None)
    head = layers.GlobalAveragePooling2D(), layers.Dense(1000)
    assert count_flops(chain((224, 224, 3), middle, *head)) == whole
