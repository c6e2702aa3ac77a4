"""What verify judges a model with its own train_step by: wrong engines, and losses that are no means."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.interception import Interception
from csdctl.worker.compute.statistics import Snapshot
from csdctl.worker.protocol.run_spec import RankSpec, Runtime
from csdctl.worker.tasks.verify import NEAR, CustomReference, ExactSum
from tests.unit.worker.compute.test_custom_step import Pair, build, keras, make_step, samples, tf

SIZES = (7, 5)


def draw(rank: int, count: int) -> Any:
    return samples(16, 40 + rank)[:count], np.zeros((count, 0), np.float32)


class Judged:
    """One step of two ranks with an engine, and what the reference finds."""

    def __init__(self, model: Callable[[], Any], collective: Callable[[int, list[Any]], Any]) -> None:
        steps = [make_step(model(), rank) for rank in range(2)]
        totals: list[Any] = []
        parts: list[list[Any]] = [[], []]
        start = [[np.asarray(one.value).copy() for one in step.state] for step in steps]
        for step in steps:
            step.set_step(0, step._first_rate)
        for index in range(len(steps[0].layouts)):
            found: list[Any] = []

            def exchange(at: int, part: Any, index: int = index, found: list[Any] = found) -> Any:
                if at == index:
                    found.append(part.copy())
                return totals[at] if at < index else part

            for rank, step in enumerate(steps):
                step.seeds.set_step(0, rank)
                step._run(*draw(rank, SIZES[rank]), exchange)
                step._restore()
                parts[rank].append(found[-1])
            totals.append(np.asarray(collective(index, found), np.float32))
        step = steps[0]
        step.seeds.set_step(0, 0)
        step.run(*draw(0, SIZES[0]), lambda at, _: totals[at])
        after = [np.asarray(one.value).astype(np.float64) for one in step.state]
        for one, value in zip(step.state, start[0], strict=True):
            one.assign(value)
        specs = [
            RankSpec(rank, f"csd{rank}", size, Runtime(), None, None, 0, size)
            for rank, size in enumerate(SIZES)
        ]
        self.reference = CustomReference(step, 5, specs, SIZES, draw, totals=totals)
        exact = ExactSum(step.layout.step_size)
        for own in parts:
            exact.add(step.join(own))
            self.reference.compare(step.join(own))
        self.reference.compare_one_batch()
        self.after = after
        self.update = self.reference.measure_update(after)
        self.is_sum = exact.difference(step.join(totals)) <= exact.rounding

    @property
    def are_ranks_right(self) -> bool:
        return all(one.difference <= NEAR * one.spread for one in self.reference.of_ranks)


def add(_: int, parts: list[Any]) -> Any:
    return parts[0] + parts[1]


def test_right_engine_is_found_right() -> None:
    found = Judged(build, add)
    assert found.is_sum
    assert found.are_ranks_right
    assert found.update < 1e-4
    (reason,) = found.reference.not_one_batch
    assert "normalization by the batch in batch_normalization" in reason


def test_sum_that_is_left_out_is_found() -> None:
    assert not Judged(build, lambda at, parts: parts[0] if at == 1 else add(at, parts)).is_sum


def test_sum_that_is_taken_twice_is_found() -> None:
    assert not Judged(build, lambda at, parts: add(at, parts) * (2 if at == 0 else 1)).is_sum


def test_plain_mean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Interception._sum_gradients

    def wrong(self: Any, *arguments: Any) -> Any:
        weight, self._weight = self._weight, tf.ones_like(self._weight)
        try:
            return right(self, *arguments)
        finally:
            self._weight = weight

    monkeypatch.setattr(Interception, "_sum_gradients", wrong)
    assert not Judged(build, add).are_ranks_right


def test_sum_that_is_applied_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Interception._sum_gradients

    def wrong(self: Any, *arguments: Any) -> Any:
        return [None if one is None else 2 * one for one in right(self, *arguments)]

    monkeypatch.setattr(Interception, "_sum_gradients", wrong)
    assert Judged(build, add).update > 0.5


class Reduced(Pair):
    """The second loss is reduced over the batch in some way."""

    reduce = staticmethod(tf.reduce_mean)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.second(data)))
        variables = self.second.trainable_variables
        self.second_optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            other = self.reduce(tf.square(self.first(data, training=True) - data))
        variables = self.first.trainable_variables
        self.first_optimizer.apply(tape.gradient(other, variables), variables)
        return {"loss": loss}


def reduced() -> Any:
    keras.utils.set_random_seed(3)
    model = Reduced()
    model.compile(keras.optimizers.SGD(0.01, name="a"), keras.optimizers.SGD(0.01, name="b"))
    return model


def test_means_are_equal_to_one_batch() -> None:
    one_batch = Judged(reduced, add).reference.one_batch
    assert one_batch is not None
    assert one_batch.difference <= NEAR * one_batch.spread


def test_loss_that_is_no_mean_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reduced, "reduce", staticmethod(tf.reduce_sum))
    found = Judged(reduced, add)
    assert found.is_sum
    assert found.are_ranks_right
    (reason,) = found.reference.not_one_batch
    assert f"in sum 2, gradients of {len(reduced().first.trainable_variables)} variables for a" in reason
    assert "in sum 1" not in reason


class Dropping(Reduced):
    """A layer draws random numbers in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first.add(keras.layers.Dropout(0.5))


def dropping() -> Any:
    keras.utils.set_random_seed(3)
    model = Dropping()
    model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01))
    return model


def test_layers_draw_the_same_numbers_in_the_reference() -> None:
    found = Judged(dropping, add)
    assert found.are_ranks_right
    assert found.update < 1e-4
    (reason,) = found.reference.not_one_batch
    assert reason.startswith("random numbers in dropout")


def test_reference_that_changes_nothing_does_not_pass() -> None:
    found = Judged(reduced, add)
    step = found.reference._step
    found.reference._start.restore()
    for rate in step.learning_rates:
        rate.assign(0.0)
    found.reference._start = Snapshot(step.state)
    assert found.reference.measure_update(found.after) == np.inf
