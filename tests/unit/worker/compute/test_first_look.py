"""What a model brings to a job: its own compile(), and layers that scale."""

from typing import Any

import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.keras_internals import describe_compile, find_scaling_layers
from csdctl.worker.protocol.model_info import OwnCompile

_, keras = load_backend()
SGD = keras.optimizers.SGD


def model(**compiled: Any) -> Any:
    made = keras.Sequential(
        [keras.Input((4,)), keras.layers.Rescaling(0.5, name="half"), keras.layers.Dense(2)]
    )
    if compiled:
        made.compile(**compiled)
    return made


@pytest.mark.parametrize(
    ("compiled", "expected"),
    [
        ({}, None),
        ({"optimizer": "adam", "loss": "mse"}, OwnCompile("Adam", 0.001)),
        (
            {"optimizer": SGD(0.3), "loss": "mse", "metrics": ["mae", keras.metrics.AUC(name="a")]},
            OwnCompile("SGD", 0.3, metrics=("mae", "a")),
        ),
        (
            {"optimizer": SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)), "loss": "mse"},
            OwnCompile("SGD", 0.1, "CosineDecay"),
        ),
        (
            {"optimizer": None, "loss": None, "weighted_metrics": {"dense": ["mae"]}},
            OwnCompile("", 0.0, "", False, ("mae",)),
        ),
    ],
)
def test_compile_is_described(compiled: dict[str, Any], expected: OwnCompile | None) -> None:
    assert describe_compile(model(**compiled)) == expected


def test_layers_that_scale_are_named_also_in_models_inside() -> None:
    outer = keras.Sequential([keras.Input((4,)), model(), keras.layers.Normalization(name="norm")])
    assert find_scaling_layers(outer) == ("half (Rescaling)", "norm (Normalization)")
