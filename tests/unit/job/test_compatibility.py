from dataclasses import replace

import pytest

from csdctl.errors import InputError
from csdctl.job.compatibility import check_compatibility, check_noise
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import Noise, Recipe

MODEL = ModelInfo("my_model.py:build", (28, 28, 1), (10,), 1000, 990, "softmax")
DATA = DatasetInfo("/data", 100, (28, 28, 1), "uint8", (), 9, "f")
ONE_HOT = replace(DATA, label_shape=(10,), max_label=-1, dtype="float32")
SPARSE = Recipe()
CATEGORICAL = Recipe(loss="categorical_crossentropy")


def refused(
    recipe: Recipe, model: ModelInfo = MODEL, name: str = "public", data: DatasetInfo = DATA
) -> InputError:
    with pytest.raises(InputError) as raised:
        check_compatibility(recipe, model, {name: data})
    return raised.value


def test_compatible_model_data_and_loss_are_accepted() -> None:
    check_compatibility(
        SPARSE, MODEL, {"public": DATA, "validation": None, "csd0": replace(DATA, max_label=3)}
    )
    check_compatibility(CATEGORICAL, MODEL, {"public": ONE_HOT})
    check_compatibility(
        Recipe(from_logits=True), replace(MODEL, output_activation="linear"), {"public": DATA}
    )


def test_unspecified_input_sizes_accept_any_sample() -> None:
    check_compatibility(SPARSE, replace(MODEL, input_shape=(0, 0, 1)), {"public": DATA})


@pytest.mark.parametrize("shape", [(32, 32, 1), (28, 28, 3), (28, 28), (28, 28, 1, 1)])
def test_samples_of_another_shape_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    error = refused(SPARSE, data=replace(DATA, sample_shape=shape))
    shown = "×".join(map(str, shape))
    assert error.message == (
        f"model my_model.py:build takes samples of shape 28×28×1, the public data has {shown}"
    )


def test_incompatible_private_data_is_reported_with_its_node() -> None:
    error = refused(SPARSE, name="csd3", data=replace(DATA, sample_shape=(64, 64, 1)))
    assert error.message.endswith("the private data of csd3 has 64×64×1")


def test_too_few_outputs_are_reported_with_the_largest_label() -> None:
    error = refused(SPARSE, replace(MODEL, output_shape=(5,)), name="validation")
    assert error.message == ("model my_model.py:build has 5 outputs, the validation data has labels up to 9")
    assert error.remedy == "give the model at least 10 outputs"


def test_as_many_outputs_as_labels_are_enough() -> None:
    check_compatibility(SPARSE, MODEL, {"public": replace(DATA, max_label=9)})
    refused(SPARSE, MODEL, data=replace(DATA, max_label=10))


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "SparseCategoricalCrossentropy"])
def test_one_hot_labels_with_a_sparse_loss_suggest_the_other_loss(loss: str) -> None:
    error = refused(Recipe(loss=loss), data=ONE_HOT)
    assert f"loss {loss} needs one integer label per sample" in error.message
    assert "labels of shape 10" in error.message
    assert "categorical_crossentropy" in error.remedy


def test_integer_labels_with_another_loss_are_reported_with_both_shapes() -> None:
    error = refused(CATEGORICAL)
    assert "has outputs of shape 10, the public data has labels of shape 1" in error.message


def test_single_output_matches_scalar_labels() -> None:
    check_compatibility(
        Recipe(loss="mean_squared_error"),
        replace(MODEL, output_shape=(1,), output_activation="linear"),
        {"public": replace(DATA, max_label=-1)},
    )


@pytest.mark.parametrize(
    ("activation", "from_logits", "remedy"),
    [("softmax", True, "recipe.from_logits: false"), ("linear", False, "recipe.from_logits: true")],
)
def test_softmax_used_as_logits_or_the_reverse_is_refused(
    activation: str, from_logits: bool, remedy: str
) -> None:
    error = refused(Recipe(from_logits=from_logits), replace(MODEL, output_activation=activation))
    assert f"ends in a {activation} layer" in error.message
    assert remedy in error.remedy


@pytest.mark.parametrize("from_logits", [True, False])
def test_unknown_activation_is_accepted(from_logits: bool) -> None:
    check_compatibility(
        Recipe(from_logits=from_logits), replace(MODEL, output_activation=""), {"public": DATA}
    )


NOISE = Noise(1.0, 8.0, 1e-5)


def test_noise_is_accepted_for_a_model_without_sample_statistics() -> None:
    check_noise(NOISE, MODEL, {"csd0": DATA})


def test_noise_is_refused_for_a_model_with_sample_statistics() -> None:
    layers = tuple(f"bn_{number} (BatchNormalization)" for number in range(6))
    with pytest.raises(InputError, match="bn_3 [(]BatchNormalization[)] and 2 more") as caught:
        check_noise(NOISE, replace(MODEL, stateful_layers=layers), {"csd0": DATA})
    assert "trainable=False" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_delta_that_permits_publishing_a_sample_is_refused() -> None:
    with pytest.raises(InputError, match="delta is 0.01, but csd1 has 100 private samples"):
        check_noise(replace(NOISE, delta=0.01), MODEL, {"csd0": replace(DATA, num_samples=99), "csd1": DATA})
