"""Whether model, data and losses fit together, by input and output; every refusal's sentence."""

import json
from dataclasses import replace
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.job.compatibility import check_compatibility, check_noise
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.worker.protocol.recipe import Noise


def with_outputs(*outputs: OutputInfo, **changes: Any) -> ModelInfo:
    return replace(MODEL, outputs=outputs, **changes)


def one_output(shape: tuple[int, ...], loss: str, **others: Any) -> ModelInfo:
    return with_outputs(output(shape, loss, **others))


def output(shape: tuple[int, ...], loss: str, **others: Any) -> OutputInfo:
    return OutputInfo(others.pop("name", ""), shape, others.pop("activation", ""), loss, **others)


def fields(**parts: tuple[str, list[int]]) -> str:
    return json.dumps([[name, dtype, shape] for name, (dtype, shape) in parts.items()])


def labelled(text: str, **largest: int) -> DatasetInfo:
    return replace(DATA, label_dtype=text, max_label=-1, max_labels=largest)


SPARSE_LOSS = "sparse_categorical_crossentropy"
MODEL = ModelInfo(
    *("my_model.py:build", {"": (28, 28, 1)}, 1000, 990),
    outputs=(OutputInfo("", (10,), "softmax", SPARSE_LOSS),),
)
NAME = "model my_model.py:build"
DATA = DatasetInfo("/data", 100, (28, 28, 1), "uint8", (), 9, "f", label_dtype="int32")
ONE_HOT = replace(DATA, label_shape=(10,), max_label=-1, label_dtype="float32")
NUMBERS = replace(DATA, max_label=-1, label_dtype="float32")
ALONE = replace(DATA, label_shape=(0,), label_dtype="float32", max_label=-1)
CATEGORICAL = one_output((10,), "categorical_crossentropy", activation="softmax")
LINEAR = one_output((10,), SPARSE_LOSS, activation="linear")
SCALAR = one_output((1,), "mean_squared_error", activation="linear")
TWO_INPUTS = replace(MODEL, inputs={"a": (3,), "b": (0, 2)})
SEVERAL = with_outputs(
    output((10,), SPARSE_LOSS, name="kind"),
    output((1,), "mean_squared_error", name="age"),
    output((64,), "", name="features"),
)
NAMED = fields(age=("float32", []), kind=("int32", []), sample_weight=("float32", []))
PLACED = fields(output_0=("int32", []), output_1=("float32", [1]), output_2=("float32", [3]))
WEIGHTED = fields(label=("int32", []), sample_weight=("float32", []))
NEXT = with_outputs(output((0, 10), SPARSE_LOSS, name="next"), output((4,), "", name="x"))
IGNORING = one_output((8, 8, 3), SPARSE_LOSS, ignores_class=True)
UNKNOWN = with_outputs(output((), SPARSE_LOSS, is_known=False))
A_LAST_1 = [((28, 28, 1), (28, 28)), ((1,), ()), ((28, 28), (28, 28, 1)), ((100, 1), (100,))]
"""Shapes of a model's input and of samples: the last axis may be missing, as in Keras."""
STEPS = [((7, 10), (7,)), ((0, 10), (7,)), ((8, 8, 10), (8, 8, 1)), ((10,), (1,))]
"""Shapes of an output and of labels: of each time step, or of each pixel."""
LOSSES = ["mse", "mean_squared_error", "BinaryCrossentropy"]


def binary(activation: str, *, from_logits: bool) -> ModelInfo:
    return one_output((1,), "binary_crossentropy", activation=activation, from_logits=from_logits)


ACCEPTED: list[tuple[ModelInfo, DatasetInfo]] = [
    (CATEGORICAL, ONE_HOT),
    (one_output((10,), SPARSE_LOSS, activation="linear", from_logits=True), DATA),
    *((one_output((10,), SPARSE_LOSS, from_logits=is_linear), DATA) for is_linear in (True, False)),
    (replace(MODEL, inputs={"": (0, 0, 1)}), DATA),
    *((replace(MODEL, inputs={"": one}), replace(DATA, sample_shape=other)) for one, other in A_LAST_1),
    (TWO_INPUTS, replace(DATA, dtype=fields(b=("int32", [7, 2]), a=("float32", [3])))),
    (TWO_INPUTS, replace(DATA, dtype=fields(input_0=("f", [3]), input_1=("f", [7, 2])))),
    (UNKNOWN, ONE_HOT),
    *((one_output(shape, SPARSE_LOSS), replace(DATA, label_shape=labels)) for shape, labels in STEPS),
    *((IGNORING, replace(DATA, label_shape=(8, 8), max_label=largest)) for largest in (255, -1)),
    (SCALAR, NUMBERS),
    (SCALAR, replace(NUMBERS, label_shape=(1,))),
    *((one_output((3, 4), loss), replace(NUMBERS, label_shape=(3, 4))) for loss in LOSSES),
    *(
        (one_output((3, 4), loss), replace(NUMBERS, label_shape=(9,)))
        for loss in ("contrastive", "my_loss", "")
    ),
    (SEVERAL, labelled(NAMED, kind=9)),
    (SEVERAL, labelled(PLACED, output_0=9)),
    (NEXT, replace(DATA, label_shape=(7,))),
    (MODEL, labelled(WEIGHTED, label=9)),
    (one_output((3,), ""), ALONE),
    (binary("sigmoid", from_logits=False), NUMBERS),
    (binary("linear", from_logits=True), NUMBERS),
]


@pytest.mark.parametrize(("model", "data"), ACCEPTED)
def test_what_fits_is_accepted(model: ModelInfo, data: DatasetInfo) -> None:
    check_compatibility(model, {"public": data})
    check_compatibility(model, {"public": data, "validation": None, "csd0": data})


OTHER_SHAPES = [(32, 32, 1), (28, 28, 1, 1, 1)]
DICT = "a dict of labels with the names of the model's outputs"
HAS_NONE = "has a loss that compares with labels, the public data has none"
REFUSED: list[tuple[ModelInfo, DatasetInfo, str, str]] = [
    *(
        (
            *(MODEL, replace(DATA, sample_shape=shape)),
            f"{NAME} takes samples of shape 28×28×1, the public data has {'×'.join(map(str, shape))}",
            "",
        )
        for shape in OTHER_SHAPES
    ),
    (
        *(TWO_INPUTS, replace(DATA, dtype=fields(a=("float32", [3]), c=("f", [])))),
        f"{NAME} takes a, b, the public data has a, c",
        "names of the model's inputs",
    ),
    (
        *(TWO_INPUTS, replace(DATA, dtype=fields(a=("f", [4]), b=("f", [7, 2])))),
        f"input a of {NAME} takes samples of shape 3",
        "",
    ),
    (
        MODEL,
        replace(DATA, max_label=10),
        "labels up to 10",
        "number the classes from 0, or give the model at",
    ),
    (
        MODEL,
        NUMBERS,
        "needs integer labels from 0, the public data has labels of type float or bool",
        "int32",
    ),
    (MODEL, replace(DATA, max_label=-1), "the public data has labels below 0", "number the classes"),
    (
        *(one_output((2,), SPARSE_LOSS), replace(DATA, max_label=2, class_counts={"a": 5, "b": 0, "c": 5})),
        "has 2 outputs, the public data has labels up to 2; no usable samples are in b",
        "at least 3 outputs, or remove b",
    ),
    *(
        (
            *(one_output((10,), loss, activation="softmax"), ONE_HOT),
            f"loss {loss} needs one integer label per sample, the public data has labels of shape 10",
            "categorical_crossentropy",
        )
        for loss in (SPARSE_LOSS, "SparseCategoricalCrossentropy")
    ),
    (*(CATEGORICAL, DATA), "has outputs of shape 10, the public data has labels of shape 1", SPARSE_LOSS),
    *(
        (one_output(shape, SPARSE_LOSS), replace(DATA, label_shape=(*labels[:-1], 3, 3)), "needs ", "")
        for shape, labels in STEPS
    ),
    *(
        (
            *(one_output((3, 4), loss), replace(NUMBERS, label_shape=(4, 3))),
            f"{NAME} has outputs of shape 3×4, the public data has labels of shape 4×3",
            "change the model's last layer, the labels or recipe.loss",
        )
        for loss in LOSSES
    ),
    (
        *(SEVERAL, labelled(NAMED, kind=12)),
        f"{NAME} has 10 outputs in kind, the public data has labels of kind up to 12",
        "",
    ),
    (
        *(SEVERAL, labelled(NAMED.replace('32", []', '32", [4]', 1), kind=9)),
        f"output age of {NAME} has outputs of shape 1, the public data has labels of age of shape 4",
        "",
    ),
    (
        *(SEVERAL, labelled(fields(kind=("int32", []), ages=("f", [])))),
        "kind, age with a loss, the public data has labels kind, ages",
        DICT,
    ),
    (*(MODEL, labelled(NAMED, kind=9)), "has one output, the public data has labels age, kind", ""),
    *((model, ALONE, HAS_NONE, "") for model in (MODEL, SEVERAL, one_output((3,), "my_loss"))),
    (
        one_output((10,), SPARSE_LOSS, activation="softmax", from_logits=True),
        DATA,
        "ends in a softmax layer",
        "recipe.from_logits: false",
    ),
    (LINEAR, DATA, "ends in a linear layer", "recipe.from_logits: true"),
    (binary("sigmoid", from_logits=True), NUMBERS, "ends in a sigmoid layer", ""),
]


@pytest.mark.parametrize(("model", "data", "message", "remedy"), REFUSED)
def test_misfit_is_refused(model: ModelInfo, data: DatasetInfo, message: str, remedy: str) -> None:
    for name, owner in (("public", "public data"), ("csd3", "private data of csd3")):
        with pytest.raises(InputError) as raised:
            check_compatibility(model, {name: data})
        assert message.replace("public data", owner) in raised.value.message
        assert raised.value.remedy
        assert remedy in raised.value.remedy


def test_what_a_train_step_of_its_own_takes_is_not_judged() -> None:
    """As in metric learning: a sample is a pair or a set of images, and no labels are needed."""
    sets = replace(ALONE, sample_shape=(2, 28, 28, 1))
    with pytest.raises(InputError):
        check_compatibility(LINEAR, {"public": sets})
    check_compatibility(replace(LINEAR, has_own_step=True), {"public": sets})


OTHER_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float32"}, "samples of different types: public data uint8 28×28×1, private data of csd0 f"),
    ({"label_dtype": "float32"}, "labels of different types: public data int32, private data of csd0 fl"),
    ({"label_dtype": WEIGHTED}, "sample_weight float32"),
]


@pytest.mark.parametrize(("change", "message"), OTHER_TYPES)
def test_data_sets_of_different_types_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        check_compatibility(one_output((10,), "my_loss"), {"public": DATA, "csd0": replace(DATA, **change)})
    assert message in raised.value.message
    assert "same shape and type" in raised.value.remedy


NOISE = Noise(1.0, 8.0, 1e-5)


def test_weights_are_refused_if_all_of_a_training_or_of_the_validation_are_0() -> None:
    some, none = (replace(DATA, label_dtype=WEIGHTED, max_values={"sample_weight": n}) for n in (1, 0))
    check_compatibility(MODEL, {"public": some, "csd0": none})
    check_compatibility(MODEL, {"public": none, "csd0": some, "validation": some})
    check_compatibility(MODEL, {"public": none}, needs_labels=False)
    for datasets, where in (
        ({"public": none}, "in the public data"),
        (
            {"public": none, "csd0": none, "validation": some},
            "in the public data and the private data of csd0",
        ),
        ({"public": some, "validation": none}, "in the validation data"),
    ):
        with pytest.raises(InputError, match=f"all weights are 0 {where}\n"):
            check_compatibility(MODEL, datasets)


def test_integers_that_the_input_does_not_hold_are_refused() -> None:
    model = replace(MODEL, inputs={"": (4,)}, max_inputs={"": 2**31 - 1})
    largest = replace(DATA, sample_shape=(4,), dtype="int64", max_values={"": 2**31 - 1})
    check_compatibility(model, {"public": largest})
    with pytest.raises(InputError, match="takes integers up to 2147483647, the public data has 2147483648\n"):
        check_compatibility(model, {"public": replace(largest, max_values={"": 2**31})})
    two = replace(TWO_INPUTS, max_inputs={"b": 2**31 - 1})
    placed = replace(DATA, dtype=fields(input_0=("int64", [3]), input_1=("int64", [7, 2])))
    check_compatibility(two, {"public": replace(placed, max_values={"input_0": 2**40})})
    with pytest.raises(
        InputError, match="input b of .* up to 2147483647, the public data has 1099511627776\n"
    ):
        check_compatibility(two, {"public": replace(placed, max_values={"input_1": 2**40})})


def test_noise_is_refused_with_sample_statistics_or_a_delta_that_permits_publishing_a_sample() -> None:
    check_noise(NOISE, MODEL, {"csd0": DATA})
    layers = tuple(f"bn_{number} (BatchNormalization)" for number in range(6))
    with pytest.raises(InputError, match="bn_3 [(]BatchNormalization[)] and 2 more") as caught:
        check_noise(NOISE, replace(MODEL, stateful_layers=layers), {"csd0": DATA})
    assert "trainable=False" in caught.value.remedy
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match="delta is 0.01, but csd1 has 100 private samples"):
        check_noise(replace(NOISE, delta=0.01), MODEL, {"csd0": replace(DATA, num_samples=99), "csd1": DATA})
