"""What rank 0 computes to judge the others: exact sums, sizes of batches, random states of every rank."""

import math

import numpy as np
import pytest

from csdctl.worker.compute.statistics import Seeds
from csdctl.worker.group.values import decode_value, encode_value
from csdctl.worker.protocol.json_codec import ProtocolError, read_as
from csdctl.worker.tasks.verify import (
    MAX_SAMPLES,
    ExactSum,
    Ranges,
    compute_type,
    draw_samples,
    find_ranges,
    verified_sizes,
    widen,
)
from tests.unit.worker.compute.built_models import keras

BITS = 24


def test_layers_that_compute_in_16_bits_compute_in_float32_and_keep_the_type_of_their_weights() -> None:
    layers = keras().layers
    for policy, kept in (("mixed_bfloat16", "float32"), ("float16", "float16")):
        model = keras().Sequential([keras().Input((4,)), layers.Dense(2, dtype=policy), layers.Dense(2)])
        widen(model)
        assert compute_type(model) == "float32"
        assert [weight.dtype for weight in model.weights] == [kept, kept, "float32", "float32"]
        assert np.asarray(model.layers[0](np.ones((1, 4)))).dtype == np.float32


def exact_sum(vectors: np.ndarray) -> ExactSum:
    exact = ExactSum(vectors.shape[1])
    for vector in vectors:
        exact.add(vector)
    return exact


class TestExactSum:
    """A sum in float32 is as near as rounding allows, in whatever order it is taken."""

    @pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]])
    def test_sums_in_any_order_are_within_rounding(self, order: list[int]) -> None:
        vectors = np.random.default_rng(1).normal(size=(6, 10_000)).astype(np.float32)
        total = np.zeros(10_000, np.float32)
        for rank in order:
            total += vectors[rank]
        exact = exact_sum(vectors)
        assert 0 < exact.difference(total) <= exact.rounding == 6 * 2.0**-BITS

    def test_one_wrong_element_of_many_is_seen(self) -> None:
        vectors = np.random.default_rng(1).normal(size=(3, 10_000)).astype(np.float32)
        total = vectors.sum(axis=0)
        total[77] += 1e-5
        assert exact_sum(vectors).difference(total) > exact_sum(vectors).rounding

    def test_element_that_nobody_computed_is_seen_unless_some_processors_take_it_for_0(self) -> None:
        assert exact_sum(np.zeros((2, 3), np.float32)).difference(np.array([0, 1e-30, 0])) == math.inf
        assert exact_sum(np.full((2, 3), 1e-40, np.float32)).difference(np.zeros(3, np.float32)) == 0

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_values_that_are_not_finite_are_seen(self, value: float) -> None:
        vectors = np.ones((2, 3), np.float32)
        assert math.isnan(exact_sum(vectors * value).difference(vectors[0] * value))
        assert not math.isfinite(exact_sum(vectors).difference(np.array([2, value, 2])))


class TestSizes:
    """Batches of different sizes: with equal ones, a plain mean of means would be right."""

    @pytest.mark.parametrize(
        ("plan", "verified"),
        [
            ([320, 32, 8], [16, 16, 8]),
            ([64, 64, 64], [16, 12, 16]),
            ([2, 2], [2, 1]),
            ([1, 1], [1, 1]),
            ([0, 64, 64], [0, 16, 12]),
            ([0, 64], [0, 16]),
        ],
    )
    def test_sizes_follow_the_plan(self, plan: list[int], verified: list[int]) -> None:
        assert verified_sizes(plan) == verified
        assert max(verified) <= MAX_SAMPLES


class TestSamples:
    """Random samples in the range that the model takes."""

    def test_integers_stay_below_the_smallest_embedding(self) -> None:
        layers = keras().layers
        model = keras().Sequential([keras().Input((7,)), layers.Embedding(5, 2), layers.Flatten()])
        example = np.zeros((0, 7), np.int32), np.zeros((0, 1), np.float32)
        samples, labels = draw_samples(3, 0, 50, example, model)
        assert (samples.min(), samples.max()) == (0, 4)
        assert labels.shape == (50, 1)
        again = draw_samples(3, 0, 50, example, model)
        assert np.array_equal(samples, again[0])

    def test_values_are_in_the_range_of_the_data(self) -> None:
        """An input may be a class, which a layer compares with, or numbers that a layer normalizes."""
        kinds = [("picture", np.uint8, (2, 2)), ("kind", np.int64), ("table", np.float32, (2,))]
        data = np.zeros(3, kinds)
        data["picture"][0], data["kind"] = 255, [0, 6, 2]
        data["table"] = [[-9, 240], [-7, np.nan], [-8, 300]]
        ranges = decode_value(Ranges, encode_value(find_ranges(data)))
        assert ranges == {
            "picture": ((0.0, 255.0),),
            "kind": ((0.0, 6.0),),
            "table": ((-9.0, -8.0), (240.0, 300.0)),
        }
        model = keras().Sequential([keras().Input((4,)), keras().layers.Dense(7)])
        drawn, _ = draw_samples(3, 0, 300, (data[:0], np.zeros(0, np.int32)), model, ranges)
        assert (drawn["kind"].min(), drawn["kind"].max()) == (0, 6)
        assert drawn["picture"].max() > 200
        assert (drawn["table"].min(axis=0) >= [-9, 240]).all()
        assert (drawn["table"].max(axis=0) <= [-8, 300]).all()
        assert drawn["table"].max(axis=0)[1] > 280

    def test_an_embedding_of_few_kinds_does_not_limit_other_inputs(self) -> None:
        """Samples of the same few values would be alike, and one could not be told from another."""
        layers, fields = keras().layers, [("words", np.int32, (24,)), ("kinds", np.int32, (24,))]
        words, kinds = (keras().Input((24,), dtype="int32", name=name) for name, _, _ in fields)
        both = layers.Embedding(200, 4)(words) + layers.Embedding(2, 4)(kinds)
        model = keras().Model([words, kinds], layers.Dense(3)(layers.Flatten()(both)))
        data = np.zeros(2, fields)
        data["words"][0], data["kinds"][0] = 199, 1
        example = data[:0], np.zeros(0, np.int32)
        drawn, _ = draw_samples(3, 0, 50, example, model, find_ranges(data))
        assert drawn["words"].max() > 190
        assert drawn["kinds"].max() == 1
        assert len({row.tobytes() for row in drawn["words"]}) == 50

    @pytest.mark.parametrize("sent", [None, {"a": 0}, {"a": [[1.0]]}, {"a": [[1.0, math.inf]]}, {"a": []}])
    def test_other_ranges_than_numbers_are_refused(self, sent: object) -> None:
        with pytest.raises(ProtocolError):
            read_as(Ranges, sent)

    def test_labels_of_several_outputs_have_their_own_classes(self) -> None:
        layers = keras().layers
        inputs = keras().Input((4,))
        model = keras().Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])
        fields = [("kind", np.int32), ("place", np.float32, (2,)), ("sample_weight", np.float32)]
        example = np.zeros((0, 4), np.float32), np.zeros(0, fields)
        _, labels = draw_samples(3, 0, 200, example, model)
        assert set(labels["kind"].tolist()) == {0, 1, 2}
        assert labels["place"].shape == (200, 2)
        assert 0.5 <= labels["sample_weight"].min() < labels["sample_weight"].max() < 1.5


class TestSeeds:
    """Random states are a function of seed, rank and step."""

    def build(self) -> object:
        layers = keras().layers
        inner = [layers.LSTM(2), layers.Dropout(0.5, name="drops"), layers.Dropout(0.0, name="keeps")]
        return keras().Sequential([keras().Input((3, 2)), *inner])

    def test_states_depend_on_seed_rank_and_step_and_on_nothing_before(self) -> None:
        """Rank 0 can take the states of every rank."""
        model, values, drawn = self.build(), np.ones((32, 3, 2)), {}
        for own_rank in (None, 3):
            for seed, rank, step in ((7, 0, 5), (8, 0, 5), (7, 1, 5), (7, 0, 6)):
                Seeds(model, seed, rank if own_rank is None else own_rank).set_step(step, rank)
                found = np.array(model(values, training=True)).tobytes()  # type: ignore[operator]
                assert drawn.setdefault((seed, rank, step), found) == found
        assert len(set(drawn.values())) == len(drawn)

    def test_only_layers_that_draw_are_named(self) -> None:
        model = self.build()
        seeds = Seeds(model, 7, 0)
        seeds.set_step(5)
        assert seeds.find_drawing(5) == []
        model(np.ones((4, 3, 2)), training=True)  # type: ignore[operator]
        assert seeds.find_drawing(5) == ["drops"]
