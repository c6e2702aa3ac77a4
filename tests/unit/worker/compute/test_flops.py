"""FLOPs of models, against manual counts; TensorFlow runs in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.first(4)

COUNT = """
import json
from csdctl.worker.compute.backend import load_backend
tf, keras = load_backend()
from csdctl.worker.compute.cuts import count_flops
from keras import Input, Model, Sequential, layers


class Broken:
    inputs = [Input((4,))]

    def __call__(self, *inputs, **settings):
        raise ValueError("cannot be called")


def attention():
    sequence = Input((10, 8))
    return Model(sequence, layers.MultiHeadAttention(2, 4)(sequence, sequence))


def two_inputs():
    left, right = Input((4,)), Input((5,), dtype="uint8")
    return Model([left, right], layers.Dense(3)(layers.Concatenate()([left, layers.Rescaling(1.0)(right)])))


def shared():
    dense, start = layers.Dense(4), Input((4,))
    return Model(start, dense(dense(start)))


def without_top():
    middle = keras.applications.MobileNetV2(include_top=False, weights=None)
    return Sequential([Input((224, 224, 3)), middle, layers.GlobalAveragePooling2D(), layers.Dense(1000)])


models = {
    "MobileNetV2": keras.applications.MobileNetV2(weights=None),
    "MobileNetV2 without top": without_top(),
    "dense": Sequential([Input((4, 4, 1)), layers.Flatten(), layers.Dense(3)]),
    "convolution": Sequential([Input((8, 8, 4)), layers.Conv2D(6, 3, strides=2, padding="same")]),
    "channels in groups": Sequential([Input((8, 8, 4)), layers.Conv2D(6, 3, groups=2, padding="same")]),
    "separable": Sequential([Input((8, 8, 4)), layers.SeparableConv2D(6, 3, padding="same")]),
    "transposed": Sequential([Input((8, 8, 4)), layers.Conv2DTranspose(6, 3, strides=2, padding="same")]),
    "one dimension": Sequential([Input((10, 4)), layers.Conv1D(6, 3)]),
    "three dimensions": Sequential([Input((5, 5, 5, 4)), layers.Conv3D(6, 3)]),
    "recurrent": Sequential([Input((10, 4)), layers.LSTM(6)]),
    "both ways": Sequential([Input((10, 4)), layers.Bidirectional(layers.GRU(6))]),
    "einsum": Sequential([Input((10, 4)), layers.EinsumDense("...x,xy->...y", output_shape=(7,))]),
    "attention": attention(),
    "words": Sequential([Input((10,), dtype="int32"), layers.Embedding(9, 8), layers.Flatten()]),
    "two inputs": two_inputs(),
    "shared": shared(),
    "any size": Sequential([Input((None, None, 3)), layers.Conv2D(4, 3)]),
    "broken": Broken(),
}
print(json.dumps({name: count_flops(model) for name, model in models.items()}))
"""
EXPECTED_MACS = {
    "dense": 16 * 3,
    "convolution": 4 * 4 * 6 * 3 * 3 * 4,
    "channels in groups": 8 * 8 * 6 * 3 * 3 * 2,
    "separable": 8 * 8 * 4 * 3 * 3 + 8 * 8 * 4 * 6,
    "transposed": 8 * 8 * 4 * 3 * 3 * 6,
    "one dimension": 8 * 6 * 3 * 4,
    "three dimensions": 3**3 * 6 * 3**3 * 4,
    "recurrent": 10 * 4 * (4 + 6) * 6,
    "both ways": 2 * 10 * 3 * (4 + 6) * 6,
    "einsum": 10 * 4 * 7,
    "attention": 4 * 10 * 8 * 8 + 2 * 10 * 10 * 8,
    "words": 0,
    "two inputs": 9 * 3,
    "shared": 2 * 4 * 4,
    "any size": 0,
    "broken": 0,
}
"""Multiply-accumulates of one sample, counted manually."""


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", COUNT],
        capture_output=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", EXPECTED_MACS)
def test_flops_equal_manual_counts(counted: dict[str, int], name: str) -> None:
    assert counted[name] == 2 * EXPECTED_MACS[name]


def test_mobilenet_has_the_300_million_multiply_accumulates_of_its_paper(counted: dict[str, int]) -> None:
    assert counted["MobileNetV2"] == pytest.approx(2 * 300e6, rel=0.01)


def test_nested_model_is_counted_at_its_actual_input_size(counted: dict[str, int]) -> None:
    assert counted["MobileNetV2 without top"] == counted["MobileNetV2"]
