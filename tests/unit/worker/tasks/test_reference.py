"""What rank 0 computes to judge the others: exact sums, samples. Of own train_steps, wrong engines."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.keras_internals import compute_type, widen
from csdctl.worker.compute.keras_step import KerasStep
from csdctl.worker.compute.own_step import Interception
from csdctl.worker.engine.step import StepInfo
from csdctl.worker.group.values import decode_value, encode_value
from csdctl.worker.protocol.json_codec import ProtocolError, read_as
from csdctl.worker.tasks.verify import (
    MAX_SAMPLES,
    NEAR,
    ExactSum,
    Ranges,
    Reference,
    choose_sizes,
    draw_samples,
    find_ranges,
)
from tests.unit.worker.compute.built_models import keras
from tests.unit.worker.compute.test_own_step import (
    Engine,
    Pair,
    Ranks,
    build,
    make_step,
    samples,
    tf,
    update_second,
)
from tests.unit.worker.tasks.verified_models import CLASSES, specs_of


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
    """What no sum in float32 differs by from the exact one, in whatever order it is taken."""

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
        assert choose_sizes(plan) == verified
        assert max(verified) <= MAX_SAMPLES


def info_of(output_sizes: tuple[int, ...], num_indices: int | None = None) -> StepInfo:
    none: Any = {"normalizing": (), "metrics": (), "seeds": (), "has_loss_scaling": False}
    none |= dict.fromkeys(("has_loss_count", "divides_gradients", "has_summed"), False)
    sizes = dict.fromkeys(("num_weights", "num_gradients", "num_statistics", "num_states"), 0)
    return StepInfo({}, (), output_sizes=output_sizes, num_indices=num_indices, **sizes, **none)


def draw(example: Any, count: int, info: StepInfo, ranges: Ranges, labels: Any = CLASSES) -> Any:
    return draw_samples(0, count, seed=3, example=(example, labels), info=info, ranges=ranges)


class TestSamples:
    """Random samples in the range that the model takes."""

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
        drawn, _ = draw(data[:0], 300, info_of((7,)), ranges)
        assert (drawn["kind"].min(), drawn["kind"].max()) == (0, 6)
        assert drawn["picture"].max() > 200
        assert (drawn["table"].min(axis=0) >= [-9, 240]).all()
        assert (drawn["table"].max(axis=0) <= [-8, 300]).all()
        assert drawn["table"].max(axis=0)[1] > 280

    def test_an_embedding_of_few_kinds_does_not_limit_other_inputs(self) -> None:
        """Samples of the same few values would be alike, and one could not be told from another."""
        fields = [("words", np.int32, (24,)), ("kinds", np.int32, (24,))]
        data = np.zeros(2, fields)
        data["words"][0], data["kinds"][0] = 199, 1
        drawn, _ = draw(data[:0], 50, info_of((3,), num_indices=2), find_ranges(data))
        assert drawn["words"].max() > 190
        assert drawn["kinds"].max() == 1
        assert len({row.tobytes() for row in drawn["words"]}) == 50

    def test_class_without_outputs_before_it_is_called_gets_two_classes(self) -> None:
        samples, labels = draw(np.zeros((0, 4), np.float32), 20, info_of(()), {}, np.zeros((0, 5), np.int32))
        assert (samples.shape, labels.max()) == ((20, 4), 1)

    @pytest.mark.parametrize("sent", [None, {"a": 0}, {"a": [[1.0]]}, {"a": [[1.0, math.inf]]}, {"a": []}])
    def test_other_ranges_than_numbers_are_refused(self, sent: object) -> None:
        with pytest.raises(ProtocolError):
            read_as(Ranges, sent)


SIZES = (7, 5)


def draw_of_rank(rank: int, count: int) -> Any:
    return samples(16, 40 + rank)[:count], np.zeros((count, 0), np.float32)


class Judged:
    """One step of two ranks with an engine, and what the reference finds."""

    def __init__(self, model: Callable[[], Any], collective: Engine) -> None:
        steps = [make_step(model(), rank) for rank in range(2)]
        step, ranks = steps[0], Ranks(steps, collective)
        start = step.values
        ranks.take(0, [draw_of_rank(rank, size)[0] for rank, size in enumerate(SIZES)])
        self.after = step.values
        step.values = start
        example = samples(1)[:0], np.zeros((0, 0), np.float32)
        keras_step = KerasStep(step.compiler.model, step.compiler.recipe, step, example)
        self.reference = Reference(keras_step, specs_of(SIZES), draw_of_rank, totals=ranks.totals)
        exact = ExactSum(step.layout.step_size)
        for parts in zip(*ranks.parts, strict=True):
            exact.add(step.join(parts))
            self.reference.compare(step.join(parts))
        self.one_batch, self.reasons = self.reference.compare_one_batch(exact.value)
        self.total = step.join(ranks.totals)
        self.update = self.reference.measure_update(self.after, self.total)
        self.is_sum = exact.difference(self.total) <= exact.rounding

    @property
    def are_ranks_right(self) -> bool:
        return all(compared.difference <= NEAR * compared.spread for compared in self.reference.of_ranks)


def add(_: int, parts: list[Any]) -> Any:
    return parts[0] + parts[1]


def test_right_engine_is_found_right() -> None:
    judged = Judged(build, add)
    assert judged.is_sum
    assert judged.are_ranks_right
    assert judged.update < 1e-4
    (reason,) = judged.reasons
    assert "normalization by the batch in batch_normalization" in reason


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "collective",
    [
        lambda at, parts: parts[0] if at == 1 else add(at, parts),
        lambda at, parts: add(at, parts) * (2 if at == 0 else 1),
    ],
    ids=["left out", "taken twice"],
)
def test_sum_that_is_wrong_is_found(collective: Any) -> None:
    assert not Judged(build, collective).is_sum


def test_plain_mean_and_sum_that_is_applied_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Interception._sum_gradients

    def mean(self: Any, *arguments: Any) -> Any:
        weight, self._weight = self._weight, tf.ones_like(self._weight)
        try:
            return right(self, *arguments)
        finally:
            self._weight = weight

    def twice(self: Any, *arguments: Any) -> Any:
        return [None if gradient is None else 2 * gradient for gradient in right(self, *arguments)]

    monkeypatch.setattr(Interception, "_sum_gradients", mean)
    assert not Judged(build, add).are_ranks_right
    monkeypatch.setattr(Interception, "_sum_gradients", twice)
    assert Judged(build, add).update > 0.5


class Reduced(Pair):
    """The second loss is reduced over the batch in some way."""

    reduce = staticmethod(tf.reduce_mean)

    def train_step(self, data: Any) -> Any:
        logs = update_second(self, data)
        with tf.GradientTape() as tape:
            second_loss = self.reduce(tf.square(self.first(data, training=True) - data))
        variables = self.first.trainable_variables
        self.first_optimizer.apply(tape.gradient(second_loss, variables), variables)
        return logs


class Dropping(Reduced):
    """A layer draws random numbers in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first.add(keras().layers.Dropout(0.5))


def reduced(kind: type[Reduced] = Reduced) -> Any:
    keras().utils.set_random_seed(3)
    model = kind()
    model.compile(keras().optimizers.SGD(0.01, name="a"), keras().optimizers.SGD(0.01, name="b"))
    return model


def test_means_are_equal_to_one_batch_and_a_reference_that_changes_nothing_does_not_pass() -> None:
    judged = Judged(reduced, add)
    assert judged.one_batch is not None
    assert judged.one_batch.difference <= NEAR * judged.one_batch.spread
    judged.reference._engine.rate = np.zeros((), np.float32)
    assert judged.reference.measure_update(judged.after, judged.total) == np.inf


def test_loss_that_is_no_mean_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reduced, "reduce", staticmethod(tf.reduce_sum))
    judged = Judged(reduced, add)
    assert judged.is_sum
    assert judged.are_ranks_right
    (reason,) = judged.reasons
    assert reason.startswith("a loss that is not a mean over the samples of the batch")


def test_layers_draw_the_same_numbers_in_the_reference() -> None:
    judged = Judged(lambda: reduced(Dropping), add)
    assert judged.are_ranks_right
    assert judged.update < 1e-4
    (reason,) = judged.reasons
    assert reason.startswith("random numbers in dropout")
