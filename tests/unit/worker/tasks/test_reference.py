"""What rank 0 computes to judge the others, for own train_steps and wrong engines."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.keras_internals import compute_type, widen
from csdctl.worker.compute.keras_step import KerasStep
from csdctl.worker.compute.own_step import Interception
from csdctl.worker.engine.step import ROUNDOFFS
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.tasks.verify import Reference, measure_sum
from tests.unit.worker.compute.built_models import keras
from tests.unit.worker.compute.test_own_step import Engine, Ranks, build, make_step, samples, tf
from tests.unit.worker.tasks.verified_models import specs_of

SIZES = (7, 5)


def test_layers_that_compute_in_16_bits_compute_in_float32_and_keep_the_type_of_their_weights() -> None:
    layers = keras().layers
    for policy, kept in (("mixed_bfloat16", "float32"), ("float16", "float16")):
        model = keras().Sequential([keras().Input((4,)), layers.Dense(2, dtype=policy), layers.Dense(2)])
        widen(model)
        assert compute_type(model) == "float32"
        assert [weight.dtype for weight in model.weights] == [kept, kept, "float32", "float32"]
        assert np.asarray(model.layers[0](np.ones((1, 4)))).dtype == np.float32


def draw_of_rank(rank: int, count: int) -> Any:
    return samples(16, 40 + rank)[:count], np.zeros((count, 0), np.float32)


class Judged:
    """One step of two ranks with an engine, and what the reference finds."""

    def __init__(self, model: Callable[[], Any], collective: Engine) -> None:
        steps = [make_step(model(), rank) for rank in range(2)]
        step, ranks, specs = steps[0], Ranks(steps, collective), specs_of(SIZES)
        start = step.values
        ranks.take(0, [draw_of_rank(rank, size)[0] for rank, size in enumerate(SIZES)])
        self.after, step.values = step.values, start
        example = samples(1)[:0], np.zeros((0, 0), np.float32)
        keras_step = KerasStep(step.compiler.model, step.compiler.recipe, step, example)
        self.reference = Reference(keras_step, specs, draw_of_rank, totals=ranks.totals)
        vectors = np.array([step.join(parts) for parts in zip(*ranks.parts, strict=True)], float)
        differences = [
            self.reference.compare(rank, vector) for rank, vector in zip(specs, vectors, strict=True)
        ]
        spread, one_sample = self.reference.measure()
        assert one_sample > 1000 * spread
        self.are_ranks_right = max(differences) <= 8 * spread
        self.total = step.join(ranks.totals)
        self.update = self.reference.measure_update(self.after, self.total)
        difference = measure_sum(self.total, vectors.sum(axis=0), np.abs(vectors).sum(axis=0), 2)
        self.is_sum = difference <= 2 * ROUNDOFFS["float32"]


def add(_: int, parts: list[Any]) -> Any:
    return parts[0] + parts[1]


def with_dropout() -> Any:
    model = build()
    model.first.add(keras().layers.Dropout(0.5))
    return model


@pytest.mark.parametrize("model", [build, with_dropout])
def test_right_engine_is_found_right(model: Callable[[], Any]) -> None:
    """Layers draw the same numbers in the reference."""
    judged = Judged(model, add)
    assert judged.is_sum
    assert judged.are_ranks_right
    assert judged.update < 1e-4
    judged.reference._engine.rate = np.zeros((), np.float32)
    assert judged.reference.measure_update(judged.after, judged.total) == np.inf, "Keras changes nothing"


def test_nan_in_one_variable_or_one_rounding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(build, add)
    judged.after[-1] = np.full_like(judged.after[-1], np.nan)
    with pytest.raises(WorkerError, match="differs from Keras' by nan"):
        judged.reference.check_update(judged.after, judged.total)
    vector = np.ones(judged.total.size)
    results = iter([vector, 2 * vector, 1.1 * vector, np.nan * vector, 1.1 * vector])
    monkeypatch.setattr(judged.reference._step, "vector", lambda *_: next(results))
    spread, one_sample = judged.reference.measure()
    assert np.isnan(spread)
    assert np.isfinite(one_sample)


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
