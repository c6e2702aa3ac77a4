"""Whether model, data and losses fit together, by input and output; every refusal's sentence."""

import json
from dataclasses import replace
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.job.compatibility import check_compatibility, check_noise
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.worker.protocol.recipe import LossTerm, Noise, Recipe

MODEL = ModelInfo("my_model.py:build", (28, 28, 1), (10,), 1000, 990, "softmax")
DATA = DatasetInfo("/data", 100, (28, 28, 1), "uint8", (), 9, "f", label_dtype="int32")
ONE_HOT = replace(DATA, label_shape=(10,), max_label=-1, label_dtype="float32")
NUMBERS = replace(DATA, max_label=-1, label_dtype="float32")
SPARSE = Recipe(losses={"": LossTerm("sparse_categorical_crossentropy")})
CATEGORICAL = Recipe(losses={"": LossTerm("categorical_crossentropy")})
MSE = Recipe(losses={"": LossTerm("mean_squared_error")})


def refused(
    recipe: Recipe = SPARSE, model: ModelInfo = MODEL, name: str = "public", data: DatasetInfo = DATA
) -> InputError:
    with pytest.raises(InputError) as raised:
        check_compatibility(recipe, model, {name: data})
    assert raised.value.remedy
    return raised.value


def accepted(recipe: Recipe = SPARSE, model: ModelInfo = MODEL, data: DatasetInfo = DATA) -> None:
    check_compatibility(recipe, model, {"public": data})


def output(shape: tuple[int, ...], loss: str, **others: Any) -> OutputInfo:
    return OutputInfo(others.pop("name", ""), shape, others.pop("activation", ""), loss, **others)


def with_outputs(*outputs: OutputInfo, **changes: Any) -> ModelInfo:
    return replace(MODEL, outputs=outputs, **changes)


def fields(**parts: tuple[str, list[int]]) -> str:
    return json.dumps([[name, dtype, shape] for name, (dtype, shape) in parts.items()])


class TestInputs:
    def test_compatible_model_data_and_loss_are_accepted(self) -> None:
        check_compatibility(
            SPARSE, MODEL, {"public": DATA, "validation": None, "csd0": replace(DATA, max_label=3)}
        )
        accepted(CATEGORICAL, data=ONE_HOT)
        accepted(replace(SPARSE, from_logits=True), replace(MODEL, output_activation="linear"))

    def test_unspecified_input_sizes_accept_any_sample(self) -> None:
        accepted(model=replace(MODEL, input_shape=(0, 0, 1)))

    @pytest.mark.parametrize("shape", [(32, 32, 1), (28, 28, 3), (28, 28, 1, 1, 1), (28,)])
    def test_samples_of_another_shape_are_refused_with_both_shapes(self, shape: tuple[int, ...]) -> None:
        error = refused(data=replace(DATA, sample_shape=shape))
        shown = "×".join(map(str, shape))
        assert error.message == (
            f"model my_model.py:build takes samples of shape 28×28×1, the public data has {shown}"
        )

    @pytest.mark.parametrize(
        ("model", "shape"), [((28, 28, 1), (28, 28)), ((1,), ()), ((28, 28), (28, 28, 1)), ((100, 1), (100,))]
    )
    def test_last_axis_of_size_1_may_be_missing_as_in_keras(
        self, model: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        accepted(model=replace(MODEL, input_shape=model), data=replace(DATA, sample_shape=shape))

    def test_incompatible_private_data_is_reported_with_its_node(self) -> None:
        error = refused(name="csd3", data=replace(DATA, sample_shape=(64, 64, 1)))
        assert error.message.endswith("the private data of csd3 has 64×64×1")

    def test_inputs_match_by_name_or_in_order(self) -> None:
        model = replace(MODEL, input_shape=(), inputs={"a": (3,), "b": (0, 2)})
        named = fields(b=("int32", [7, 2]), a=("float32", [3]))
        accepted(model=model, data=replace(DATA, sample_shape=(), dtype=named))
        placed = fields(input_0=("float32", [3]), input_1=("float32", [7, 2]))
        accepted(model=model, data=replace(DATA, sample_shape=(), dtype=placed))
        error = refused(model=model, data=replace(DATA, dtype=fields(a=("float32", [3]), c=("f", []))))
        assert error.message == "model my_model.py:build takes a, b, the public data has a, c"
        assert "names of the model's inputs" in error.remedy
        error = refused(model=model)
        assert error.message.endswith("takes a, b, the public data has one array")
        error = refused(model=model, data=replace(DATA, dtype=fields(a=("f", [4]), b=("f", [7, 2]))))
        assert error.message.startswith("input a of model my_model.py:build takes samples of shape 3")

    def test_subclass_is_not_judged(self) -> None:
        unknown = output((), "sparse_categorical_crossentropy", is_known=False)
        accepted(model=with_outputs(unknown, input_shape=()), data=ONE_HOT)


class TestClasses:
    def test_too_few_outputs_are_reported_with_the_largest_label(self) -> None:
        error = refused(SPARSE, replace(MODEL, output_shape=(5,)), name="validation")
        assert error.message == (
            "model my_model.py:build has 5 outputs, the validation data has labels up to 9"
        )
        assert error.remedy == "give the model at least 10 outputs"

    def test_as_many_outputs_as_labels_are_enough(self) -> None:
        accepted(data=replace(DATA, max_label=9))
        refused(data=replace(DATA, max_label=10))

    def test_labels_that_are_no_classes_are_refused(self) -> None:
        assert "needs integer labels from 0" in refused(data=NUMBERS).message
        assert "needs integer labels from 0" in refused(data=replace(DATA, max_label=-1)).message

    @pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "SparseCategoricalCrossentropy"])
    def test_one_hot_labels_with_a_sparse_loss_suggest_the_other_loss(self, loss: str) -> None:
        error = refused(Recipe(losses={"": LossTerm(loss)}), data=ONE_HOT)
        assert f"loss {loss} needs one integer label per sample" in error.message
        assert "labels of shape 10" in error.message
        assert "categorical_crossentropy" in error.remedy

    def test_integer_labels_with_a_loss_of_one_hot_labels_suggest_the_other_loss(self) -> None:
        error = refused(CATEGORICAL)
        assert "has outputs of shape 10, the public data has labels of shape 1" in error.message
        assert "sparse_categorical_crossentropy" in error.remedy

    @pytest.mark.parametrize(
        ("shape", "labels"), [((7, 10), (7,)), ((0, 10), (7,)), ((8, 8, 10), (8, 8, 1)), ((10,), (1,))]
    )
    def test_labels_of_each_time_step_or_pixel(self, shape: tuple[int, ...], labels: tuple[int, ...]) -> None:
        model = with_outputs(output(shape, "sparse_categorical_crossentropy"))
        accepted(model=model, data=replace(DATA, label_shape=labels))
        wrong = replace(DATA, label_shape=(*labels[:-1], 3, 3))
        assert "needs " in refused(model=model, data=wrong).message
        assert (
            "labels up to 10"
            in refused(model=model, data=replace(DATA, label_shape=labels, max_label=10)).message
        )

    def test_ignored_class_may_be_any_number(self) -> None:
        model = with_outputs(output((8, 8, 3), "sparse_categorical_crossentropy", ignores_class=True))
        for largest in (255, -1):
            accepted(model=model, data=replace(DATA, label_shape=(8, 8), max_label=largest))


class TestOtherLosses:
    def test_single_output_matches_scalar_labels(self) -> None:
        model = replace(MODEL, output_shape=(1,), output_activation="linear")
        accepted(MSE, model, NUMBERS)
        accepted(MSE, model, replace(NUMBERS, label_shape=(1,)))

    @pytest.mark.parametrize("loss", ["mse", "mean_squared_error", "BinaryCrossentropy", "huber", "poisson"])
    def test_labels_have_the_shape_of_the_output(self, loss: str) -> None:
        model = with_outputs(output((3, 4), loss))
        accepted(model=model, data=replace(NUMBERS, label_shape=(3, 4)))
        error = refused(model=model, data=replace(NUMBERS, label_shape=(4, 3)))
        assert error.message == (
            "model my_model.py:build has outputs of shape 3×4, the public data has labels of shape 4×3"
        )
        assert error.remedy == "change the model's last layer, the labels or recipe.loss"

    @pytest.mark.parametrize("loss", ["contrastive", "my_loss", ""])
    def test_own_losses_are_not_judged(self, loss: str) -> None:
        accepted(model=with_outputs(output((3, 4), loss)), data=replace(NUMBERS, label_shape=(9,)))


class TestSeveralOutputs:
    MODEL = with_outputs(
        output((10,), "sparse_categorical_crossentropy", name="kind"),
        output((1,), "mean_squared_error", name="age"),
        output((64,), "", name="features"),
    )
    NAMED = fields(age=("float32", []), kind=("int32", []), sample_weight=("float32", []))

    def labelled(self, text: str, **largest: int) -> DatasetInfo:
        return replace(DATA, label_dtype=text, max_label=-1, max_labels=largest)

    def test_labels_match_by_name_and_one_without_a_loss_needs_none(self) -> None:
        accepted(model=self.MODEL, data=self.labelled(self.NAMED, kind=9))

    def test_only_labels_belong_to_the_only_output_with_a_loss(self) -> None:
        outputs = (
            output((0, 10), "sparse_categorical_crossentropy", name="next"),
            output((4,), "", name="x"),
        )
        model = with_outputs(*outputs)
        accepted(model=model, data=replace(DATA, label_shape=(7,)))
        assert (
            "labels up to 12"
            in refused(model=model, data=replace(DATA, label_shape=(7,), max_label=12)).message
        )

    def test_labels_match_in_order(self) -> None:
        text = fields(output_0=("int32", []), output_1=("float32", [1]), output_2=("float32", [3]))
        accepted(model=self.MODEL, data=self.labelled(text, output_0=9))

    def test_problem_names_the_output(self) -> None:
        error = refused(model=self.MODEL, data=self.labelled(self.NAMED, kind=12))
        assert error.message == (
            "model my_model.py:build has 10 outputs in kind, the public data has labels of kind up to 12"
        )
        error = refused(
            model=self.MODEL, data=self.labelled(self.NAMED.replace('32", []', '32", [4]', 1), kind=9)
        )
        assert error.message.startswith("output age of model my_model.py:build has outputs of shape 1")
        assert error.message.endswith("the public data has labels of age of shape 4")

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ("int32", "outputs kind, age with a loss, the public data has labels for one"),
            (
                fields(kind=("int32", []), ages=("f", [])),
                "kind, age with a loss, the public data has labels kind, ages",
            ),
            (fields(output_0=("int32", []), output_1=("f", [])), "has labels output_0, output_1"),
        ],
    )
    def test_missing_labels_are_refused(self, labels: str, message: str) -> None:
        error = refused(model=self.MODEL, data=self.labelled(labels))
        assert message in error.message
        assert "a dict of labels with the names of the model's outputs" in error.remedy

    def test_several_labels_for_one_output_are_refused(self) -> None:
        error = refused(data=self.labelled(self.NAMED, kind=9))
        assert error.message.endswith("has one output, the public data has labels age, kind")

    def test_weighted_labels_of_one_output(self) -> None:
        text = fields(label=("int32", []), sample_weight=("float32", []))
        accepted(data=self.labelled(text, label=9))
        assert "labels up to 12" in refused(data=self.labelled(text, label=12)).message

    def test_missing_labels_of_any_loss_are_refused(self) -> None:
        alone = replace(DATA, label_shape=(0,), label_dtype="float32", max_label=-1)
        for model in (MODEL, self.MODEL, with_outputs(output((3,), "my_loss"))):
            assert "has a loss that compares with labels, the public data has none" in (
                refused(model=model, data=alone).message
            )
        accepted(model=with_outputs(output((3,), "")), data=alone)


class TestLogits:
    @pytest.mark.parametrize(
        ("activation", "from_logits", "remedy"),
        [("softmax", True, "recipe.from_logits: false"), ("linear", False, "recipe.from_logits: true")],
    )
    def test_softmax_used_as_logits_or_the_reverse_is_refused(
        self, activation: str, from_logits: bool, remedy: str
    ) -> None:
        recipe = replace(SPARSE, from_logits=from_logits)
        error = refused(recipe, replace(MODEL, output_activation=activation))
        assert f"ends in a {activation} layer" in error.message
        assert remedy in error.remedy

    @pytest.mark.parametrize("from_logits", [True, False])
    def test_unknown_activation_is_accepted(self, from_logits: bool) -> None:
        accepted(replace(SPARSE, from_logits=from_logits), replace(MODEL, output_activation=""))

    @pytest.mark.parametrize(
        ("activation", "from_logits", "is_right"),
        [
            ("sigmoid", False, True),
            ("linear", True, True),
            ("sigmoid", True, False),
            ("linear", False, False),
        ],
    )
    def test_sigmoid_of_a_binary_loss(self, activation: str, from_logits: bool, is_right: bool) -> None:
        last = output((1,), "binary_crossentropy", activation=activation, from_logits=from_logits)
        if is_right:
            accepted(model=with_outputs(last), data=NUMBERS)
        else:
            assert f"ends in a {activation} layer" in refused(model=with_outputs(last), data=NUMBERS).message


class TestSeveralDataSets:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"dtype": "float32"},
                "samples of different types: public data uint8 28×28×1, private data of csd0 f",
            ),
            (
                {"label_dtype": "float32"},
                "labels of different types: public data int32 1, private data of csd0 fl",
            ),
            ({"sample_shape": (28, 28)}, "private data of csd0 uint8 28×28"),
            (
                {"label_dtype": fields(label=("int32", []), sample_weight=("float32", []))},
                "sample_weight float32",
            ),
        ],
    )
    def test_data_sets_of_different_types_are_refused(self, change: dict[str, Any], message: str) -> None:
        unjudged = with_outputs(output((10,), "my_loss"))
        with pytest.raises(InputError) as raised:
            check_compatibility(SPARSE, unjudged, {"public": DATA, "csd0": replace(DATA, **change)})
        assert message in raised.value.message
        assert "same shape and type" in raised.value.remedy


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
