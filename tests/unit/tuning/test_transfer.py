"""The distance of models, and the guess for one from others."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fleet_model import ClassModel
from csdctl.tuning.measurements import ModelProperties, ProbeMeasurement, describe_model
from csdctl.tuning.recall import WEIGHTS, feature_distance, guess_class, transfer_step_time
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.run_spec import Runtime

MODEL = ModelProperties("a", "mobilenet", 2_500_000, 2_400_000, 50_000_000, 12_288)
STEP = StepTime(0.02, 0.004)

counts = st.integers(min_value=0, max_value=10**11)
features = st.builds(ModelProperties, st.just("x"), st.just("x"), counts, counts, counts, counts)
step_times = st.builds(StepTime, st.floats(0, 10), st.floats(1e-6, 10))


class TestDistance:
    @given(features, features)
    def test_distance_is_symmetric_and_finite(self, one: ModelProperties, other: ModelProperties) -> None:
        distance = feature_distance(one, other)
        assert 0 <= distance < math.inf
        assert distance == pytest.approx(feature_distance(other, one))

    @pytest.mark.parametrize("name", WEIGHTS)
    def test_farther_in_one_feature_is_farther(self, name: str) -> None:
        distances = [
            feature_distance(MODEL, replace(MODEL, **{name: getattr(MODEL, name) * factor}))
            for factor in (1, 2, 3, 10)
        ]
        assert distances == sorted(set(distances))

    def test_feature_known_for_one_model_only_increases_the_distance(self) -> None:
        unknown = replace(MODEL, num_operations=0)
        assert feature_distance(MODEL, unknown) == pytest.approx(math.log(4))
        assert feature_distance(unknown, unknown) == 0


class TestTransfer:
    def test_twice_the_operations_take_twice_as_long_for_a_sample(self) -> None:
        twice = replace(MODEL, num_operations=MODEL.num_operations * 2)
        found = transfer_step_time(twice, [(MODEL, STEP)])
        assert found
        assert (found.fixed_s, found.per_sample_s) == pytest.approx((STEP.fixed_s, 2 * STEP.per_sample_s))

    def test_twice_the_parameters_make_the_fixed_time_twice_as_long(self) -> None:
        twice = replace(MODEL, num_parameters=MODEL.num_parameters * 2)
        found = transfer_step_time(twice, [(MODEL, STEP)])
        assert found
        assert (found.fixed_s, found.per_sample_s) == pytest.approx((2 * STEP.fixed_s, STEP.per_sample_s))

    def test_nearest_neighbour_counts_most(self) -> None:
        near = replace(MODEL, input_elements=MODEL.input_elements * 2)
        far = replace(MODEL, input_elements=MODEL.input_elements * 20)
        found = transfer_step_time(MODEL, [(far, StepTime(0, 3.0)), (near, StepTime(0, 1.0))])
        assert found
        assert 1.0 < found.per_sample_s < 1.5

    def test_knee_is_not_transferred(self) -> None:
        found = transfer_step_time(MODEL, [(MODEL, replace(STEP, knee=16, above_knee_s=0.01))])
        assert found == STEP


SETTINGS = Runtime(1)


def probes(step: StepTime = STEP, settings: Runtime = SETTINGS) -> list[ProbeMeasurement]:
    return [ProbeMeasurement(settings, size, 1.0, step.at(size), 3, 1 << 20) for size in (8, 32)]


def guess(measured: dict[tuple[ModelProperties, str], list[ProbeMeasurement]]) -> ClassModel:
    return guess_class(ClassModel(("csd0",), SETTINGS), MODEL, "sgd", measured)


class TestGuess:
    def test_nearest_models_are_named_first_and_this_model_with_another_recipe_is_one(self) -> None:
        near = replace(MODEL, hash="n", name="near", num_operations=60_000_000)
        further = replace(MODEL, hash="f", name="further", num_operations=200_000_000)
        found = guess(
            {(one, "sgd"): probes() for one in (further, MODEL, near)} | {(MODEL, "adam"): probes()}
        )
        assert found.guessed_from == ("mobilenet", "near", "further")
        assert found.guess

    def test_distant_and_unknown_models_and_other_settings_are_not_used(self) -> None:
        far = replace(MODEL, hash="b", num_operations=MODEL.num_operations * 20)
        unknown = replace(MODEL, hash="c", num_operations=0)
        other = replace(MODEL, hash="d")
        failed = [ProbeMeasurement(SETTINGS, 8, 1.0, None)]
        measured = {(far, ""): probes(), (unknown, ""): probes(), (MODEL, "adam"): failed}
        found = guess(measured | {(other, ""): probes(settings=Runtime(2))})
        assert (found.guess, found.guessed_from) == (None, ())

    def test_models_at_the_same_distance_have_a_fixed_order(self) -> None:
        equal = {(replace(MODEL, hash=letter, name=letter), ""): probes() for letter in "dcbe"}
        assert guess(equal).guessed_from == ("b", "c", "d")


class TestFeatures:
    def test_features_are_those_of_the_model_that_was_built(self) -> None:
        info = ModelInfo(
            "keras.applications:MobileNetV2", (64, 64, 3), (200,), 7, 5, "softmax", num_operations=9
        )
        described = describe_model(info, "hash")
        assert described == ModelProperties("hash", info.name, 7, 5, 9, 12_288)
        assert (described.short_name, described.vector_bytes) == ("MobileNetV2", 20)

    def test_inputs_are_counted_unless_their_size_is_unknown(self) -> None:
        info = ModelInfo("a", (), (1,), 1, 1, "", inputs={"left": (2, 3), "right": (4,), "text": (0,)})
        assert describe_model(info, "hash").input_elements == 10

    def test_probe_that_did_not_fit_has_no_rate(self) -> None:
        assert ProbeMeasurement(Runtime(1), 8, 0.0, 0.5).samples_per_s == 16
        assert ProbeMeasurement(Runtime(1), 8, 0.0, None).samples_per_s is None
