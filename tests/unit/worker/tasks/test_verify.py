"""`verify` over models of all kinds × engines that are right, and that are wrong on purpose."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.keras_step import KerasStep
from csdctl.worker.data.arrays import hash_arrays
from csdctl.worker.engine.step import ROUNDOFFS
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import RankLostError, decode_value, encode_value
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import Verified, event_from_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import ELEMENT_SPEC, RANGES, VERIFY, RunSpec, TaskSpec
from csdctl.worker.tasks.progress import Reporter, RunProgress
from csdctl.worker.tasks.task import TaskContext
from csdctl.worker.tasks.verify import (
    MAX_MOVE,
    MAX_SAMPLES,
    Reference,
    Verify,
    choose_sizes,
    measure_sum,
    move_weights,
)
from csdctl.workflows.train.verify import judge
from tests.unit.worker.compute.built_models import Step
from tests.unit.worker.tasks.verified_models import ROWS, SEED, SIZES, Row, make_step, specs_of

pytestmark = [
    pytest.mark.first(3),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras
]

Vectors = list[np.ndarray]
Change = Callable[[Vectors, dict[str, np.ndarray]], Vectors]
"""Given the vectors of the ranks, and wrong ones of rank WRONG by name, returns what takes their place."""
NODES = ["host", "csd0", "csd1"]
WRONG = 1


def right(vectors: Vectors, _: Any) -> Vectors:
    return vectors


def plain_mean(vectors: Vectors, _: Any) -> Vectors:
    """Every rank counts the same, whatever number of samples it has."""
    return [vector * np.float32(11 / size) for vector, size in zip(vectors, SIZES, strict=True)]


def without_rank(vectors: Vectors, _: Any) -> Vectors:
    return [vector * np.float32(rank != WRONG) for rank, vector in enumerate(vectors)]


def replaced(by: str) -> Change:
    return lambda vectors, wrong: [
        wrong[by] if rank == WRONG else vector for rank, vector in enumerate(vectors)
    ]


WRONG_ENGINES: dict[str, tuple[Change, Change]] = {
    "plain mean": (right, plain_mean),
    "dropped rank": (right, without_rank),
    "stale gradient": (replaced("stale"), right),
    "stale gradient in the sum": (right, replaced("stale")),
    "sample twice in place of another": (replaced("one sample twice"), right),
    "sample twice in place of another in the sum": (right, replaced("one sample twice")),
    "sample twice": (replaced("one sample more"), right),
    "sample twice, counted once": (replaced("one sample more, counted once"), right),
}
"""Name → what the ranks compute, and what is in the sum beside it."""
OTHER_STATES = replaced("another rank's random states"), right
"""Wrong for a model that draws random numbers."""


class RanksWithVectors(Communicator):
    """This process, and ranks whose vectors are known. `lost` are lost in the sum, `lost_then` after it."""

    def __init__(
        self,
        sent: Vectors,
        total: np.ndarray,
        num_elements: int,
        lost: tuple[int, ...] = (),
        lost_then: tuple[int, ...] = (),
    ) -> None:
        super().__init__(0, ((num_elements, 0),))
        self.members = tuple(range(len(SIZES)))
        self._sent, self._total, self._lost, self._lost_then = sent, total, lost, lost_then

    def sum(self, vector: np.ndarray, *_: Any, **__: Any) -> np.ndarray:
        self.members = tuple(rank for rank in self.members if rank not in self._lost)
        return np.concatenate([self._total, np.zeros(len(vector) - len(self._total), np.float32)])

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        if rank in self._lost_then:
            self.members = tuple(member for member in self.members if member != rank)
            raise RankLostError(rank)
        return bytearray(self._sent[rank].tobytes())

    def gather(self, value: Any, hint: Any) -> dict[int, Any]:
        return dict.fromkeys(self.members, decode_value(hint, encode_value(value)))


class RememberingStep(KerasStep):
    """Computes each vector once: what Keras computes does not depend on what the ranks send."""

    def vector(self, values: Any, images: Any, labels: Any, totals: Any = ()) -> Any:
        results = vars(self).setdefault("results", {})
        key = self.engine.position, images.tobytes(), hash_arrays(values)
        if key not in results:
            results[key] = super().vector(values, images, labels, totals)
        return results[key]


class RowVerify(Verify):
    """Rank 0's task with the model of a row, and without files."""

    def __init__(self, context: TaskContext, row: Row, step: Step) -> None:
        super().__init__(context)
        self._loaded = step
        recipe = dataclasses.replace(row.recipe, seed=SEED)
        self._keras_step = RememberingStep(step.compiler.model, recipe, step, (row.samples, row.labels))

    def _load_step(self) -> Step:
        return self._loaded

    def _make_reference(self) -> Reference:
        return Reference(self._keras_step, self._ranks, self.draw)


def load_task(row: Row, kind: type[Step] = Step) -> Verify:
    """Return rank 0's task, ready to run."""
    ranks, no_orders = specs_of(SIZES), object()
    recipe = dataclasses.replace(row.recipe, seed=SEED)
    task = TaskSpec(VERIFY, {ELEMENT_SPEC: json.loads(to_json(row.form))})
    spec = RunSpec("verify-matrix", "", "", recipe, ranks, None, None, "", task=task)
    step = make_step(row, load_backend()[1], kind)
    context: Any = TaskContext(spec, ranks[0], RunProgress(spec), Reporter(ranks[0]), no_orders)  # type: ignore[arg-type]
    loaded = RowVerify(context, row, step)
    loaded.load()
    return loaded


def compute_vectors(task: Verify) -> tuple[Vectors, dict[str, np.ndarray]]:
    """Return the vectors of all ranks, with the weights that `verify` moves, and wrong ones of rank WRONG."""
    start = task.step.values
    task.step.values = move_weights(task.step, np.random.default_rng(SEED), MAX_MOVE)

    def compute(rank: int, *batch: np.ndarray) -> np.ndarray:
        task.step.position = 0, rank
        return np.array(task.step.local(*batch))

    vectors = [compute(rank, *task.draw(rank, size)) for rank, size in enumerate(SIZES)]
    batch, size = task.draw(WRONG, SIZES[WRONG]), SIZES[WRONG]
    wrong = {
        "one sample twice": compute(WRONG, *(column[np.r_[0, 0, 2:size]] for column in batch)),
        "one sample more": compute(WRONG, *(column[np.r_[0, :size]] for column in batch)),
        "stale": compute(WRONG, *task.draw(7, size)),
        "another rank's random states": compute(0, *batch),
    }
    wrong["one sample more, counted once"] = wrong["one sample more"].copy()
    wrong["one sample more, counted once"][-1] = size
    task.step.values = start
    return vectors, wrong


def verify(task: Verify, sent: Vectors, total: np.ndarray, capsys: Any) -> Verified:
    """Run the task with these vectors of the ranks, and with this sum. Return what it reports."""
    capsys.readouterr()
    ranks = RanksWithVectors(sent, total, max(task.sum_sizes)[0])
    task.run(ranks)
    verified = event_from_line(capsys.readouterr().out.strip())
    assert isinstance(verified, Verified)
    return verified


def test_random_samples_are_in_the_range_of_the_data() -> None:
    """A layer may be adapted to years, take a logarithm, or compare classes."""
    task = load_task(ROWS["a class as input"])
    ranges = {"table": [[1900, 2020], [-3, -3], *[[0, 1e-3]] * 8], "kind": [[2, 3]]}
    task.spec.task.arguments[RANGES] = ranges
    samples, _ = task.draw(1, MAX_SAMPLES)
    low, high = np.float32(ranges["table"]).T
    assert ((samples["table"] >= low) & (samples["table"] <= high)).all()
    assert np.ptp(samples["table"][:, 0]) > 60
    assert np.unique(samples["kind"]).tolist() == [2, 3]


class PlainMeanStep(Step):
    """Sends the gradient of its mean, times the same number on every rank."""

    def local(self, *batch: Any, **options: Any) -> Any:
        vector = np.array(super().local(*batch, **options))
        vector[self.layout.gradients] *= MAX_SAMPLES / vector[self.layout.count]
        return vector


def test_step_that_is_wrong_on_host_and_ranks_alike_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    task = load_task(ROWS["convolutions"], PlainMeanStep)
    vectors, _ = compute_vectors(task)
    verdict = judge(verify(task, vectors, sum(vectors), capsys), NODES)
    assert not verdict.is_equal
    assert "the gradient differs" in verdict.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lost": (1, 2)}, "verification needs all ranks of the plan; lost: csd0, csd1"),
        ({"lost_then": (2,)}, "verification needs all ranks of the plan; lost: csd1"),
        ({}, r"csd0: rank 1 sent 4 bytes, expected \d+"),
    ],
)
def test_verification_without_the_vector_of_a_rank_is_an_error(
    options: dict[str, tuple[int, ...]], message: str
) -> None:
    task = load_task(ROWS["all weights 0"])
    sent, _ = compute_vectors(task)
    total = sum(sent)
    if not options:
        sent[1] = sent[1][:1]
    with pytest.raises(WorkerError, match=message):
        task.run(RanksWithVectors(sent, total, max(task.sum_sizes)[0], **options))


@pytest.mark.parametrize("name", ROWS)
def test_right_engine_passes_and_every_wrong_one_fails(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = load_task(ROWS[name])
    start, (vectors, saved) = task.step.values, compute_vectors(task)
    engines = {"right": (right, right), **WRONG_ENGINES}
    if name == "dropout":
        engines["another rank's random states"] = OTHER_STATES
    verdicts = {}
    for engine, (send, add) in engines.items():
        task.step.values = start
        sent = send(vectors, saved)
        total = sum(add(sent, saved))
        total[-1] = sum(vector[-1] for vector in sent)
        try:
            verdicts[engine] = judge(verify(task, sent, total, capsys), NODES)
        except WorkerError as error:
            pytest.fail(f"{engine}: {error.message}")
    print(verdicts["right"].text)
    assert verdicts.pop("right").is_equal
    assert not [engine for engine, verdict in verdicts.items() if verdict.is_equal]


class TestSum:
    """What no sum in float32 differs by from the exact one, in whatever order it is taken."""

    def test_one_wrong_element_of_many_is_seen(self) -> None:
        vectors = np.random.default_rng(1).normal(size=(3, 10_000)).astype(np.float32)
        exact, total = vectors.sum(axis=0, dtype=float), vectors.sum(axis=0)
        magnitudes, rounding = np.abs(vectors).sum(axis=0, dtype=float), 3 * ROUNDOFFS["float32"]
        assert measure_sum(total, exact, magnitudes, 3) <= rounding
        total[77] += 1e-5
        assert measure_sum(total, exact, magnitudes, 3) > rounding

    def test_element_that_nobody_computed_is_seen_unless_some_processors_take_it_for_0(self) -> None:
        zeros = np.zeros(3)
        assert measure_sum(np.array([0, 1e-30, 0]), zeros, zeros, 2) == math.inf
        assert measure_sum(np.zeros(3, np.float32), zeros + 2e-40, zeros + 2e-40, 2) == 0

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_values_that_are_not_finite_are_seen(self, value: float) -> None:
        assert not math.isfinite(measure_sum(np.array([2, value]), np.full(2, 2.0), np.full(2, 2.0), 2))


@pytest.mark.parametrize(
    ("plan", "verified"),
    [
        ([320, 32, 8], [16, 16, 8]),
        ([64, 64, 64], [16, 12, 16]),
        ([1, 1, 1], [1, 2, 1]),
        ([0, 64, 64], [0, 16, 12]),
    ],
)
def test_batches_are_of_different_sizes(plan: list[int], verified: list[int]) -> None:
    """With equal ones, a plain mean of means would be right."""
    assert choose_sizes(plan) == verified


def test_two_samples_of_a_rank_that_has_one_fit_into_a_message() -> None:
    task = load_task(ROWS["all weights 0"])
    task.spec = dataclasses.replace(task.spec, ranks=specs_of((1, 1)))
    for limit in (None, 1):
        ranks = tuple(dataclasses.replace(rank, max_batch_size=limit) for rank in task.spec.ranks)
        task.spec = dataclasses.replace(task.spec, ranks=ranks)
        assert min(task.max_batch_sizes.values()) == 2
