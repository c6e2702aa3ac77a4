"""`verify` over models of all kinds × engines that are right, and that are wrong on purpose.

The other ranks' vectors come from a process with other threads and kernels, as from other machines.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.keras_step import KerasStep
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import RankLostError, decode_value, encode_value
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import Verified, event_from_line
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.progress import Reporter, RunProgress
from csdctl.worker.tasks.task import TaskContext
from csdctl.worker.tasks.verify import MAX_SAMPLES, Reference, Verify, draw_samples
from csdctl.workflows.train.verify import Judgement, judge
from tests.patience import run_command
from tests.unit.worker.compute.built_models import Step
from tests.unit.worker.tasks.verified_models import (
    ROWS,
    SEED,
    SIZES,
    WRONG,
    Row,
    RowReader,
    make_step,
    specs_of,
)

pytestmark = [
    pytest.mark.first(3),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras
]

Vectors = dict[str, np.ndarray]
"""What other_ranks_program.py saved for a row."""
NODES = ["host", "csd0", "csd1"]


@dataclasses.dataclass(frozen=True)
class Engine:
    """How the ranks compute and add: `send` changes what the ranks computed, `add` is their sum."""

    send: Callable[[list[np.ndarray], Vectors], list[np.ndarray]] = lambda sent, _: sent
    add: Callable[[list[np.ndarray], Vectors], np.ndarray] = lambda sent, _: sum_of(sent)


def sum_of(vectors: list[np.ndarray]) -> np.ndarray:
    total = np.zeros_like(vectors[0])
    for vector in vectors:
        total += vector
    return total


def plain_mean(sent: list[np.ndarray], _: Vectors) -> np.ndarray:
    """Every rank counts the same, whatever number of samples it has. The count is right."""
    part = sum(SIZES) / len(SIZES)
    total = sum_of([vector * np.float32(part / size) for vector, size in zip(sent, SIZES, strict=True)])
    total[-1] = sum(SIZES)
    return total


def without_rank(sent: list[np.ndarray], _: Vectors) -> np.ndarray:
    total = sum_of([vector for rank, vector in enumerate(sent) if rank != WRONG])
    total[-1] = sum(SIZES)
    return total


def replaced(by: str) -> Callable[[list[np.ndarray], Vectors], list[np.ndarray]]:
    def change(sent: list[np.ndarray], saved: Vectors) -> list[np.ndarray]:
        return [saved[by] if rank == WRONG else vector for rank, vector in enumerate(sent)]

    return change


def without_count(change: Callable[..., Any]) -> Callable[..., Any]:
    """The rank says that it has as many samples as expected."""

    def changed(sent: list[np.ndarray], saved: Vectors) -> list[np.ndarray]:
        vectors = [vector.copy() for vector in change(sent, saved)]
        vectors[WRONG][-1] = SIZES[WRONG]
        return vectors

    return changed


def in_sum(change: Callable[..., Any]) -> Engine:
    """The rank computes what it should, and another vector is in the sum."""
    return Engine(add=lambda sent, saved: sum_of(change(sent, saved)))


TWICE, MORE, STALE = replaced("one sample twice"), replaced("one sample more"), replaced("stale")
WRONG_ENGINES = {
    "plain mean": Engine(add=plain_mean),
    "dropped rank": Engine(add=without_rank),
    "stale gradient": Engine(STALE),
    "stale gradient in the sum": in_sum(STALE),
    "sample twice in place of another": Engine(TWICE),
    "sample twice in place of another in the sum": in_sum(TWICE),
    "sample twice": Engine(MORE),
    "sample twice, counted once": Engine(without_count(MORE)),
    "sample twice in the sum, counted once": in_sum(without_count(MORE)),
}
"""Name → engine. A rank that computes something else sends it to rank 0, too."""
OTHER_STATES = Engine(replaced("another rank's random states"))
"""Wrong for a model that draws random numbers."""


class RanksWithVectors(Communicator):
    """This process, and ranks whose vectors are known. `lost` are lost in the sum, `lost_then` after it."""

    def __init__(
        self,
        engine: Engine,
        saved: Vectors,
        num_elements: int,
        lost: tuple[int, ...] = (),
        lost_then: tuple[int, ...] = (),
    ) -> None:
        super().__init__(0, ((num_elements, 0),))
        self.members = tuple(range(len(SIZES)))
        self._lost, self._lost_then = lost, lost_then
        self._engine, self._saved = engine, saved
        self._sent = engine.send([saved[f"rank {rank}"] for rank in self.members], saved)

    def sum(self, vector: np.ndarray, *_: Any, **__: Any) -> np.ndarray:
        self.members = tuple(rank for rank in self.members if rank not in self._lost)
        total = np.zeros_like(vector)
        self._sent[0] = vector[: len(self._sent[0])]
        total[: len(self._sent[0])] = self._engine.add(self._sent, self._saved)
        return total

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        if rank in self._lost_then:
            self.members = tuple(member for member in self.members if member != rank)
            raise RankLostError(rank)
        return bytearray(self._sent[rank].tobytes())

    def gather(self, value: Any, hint: Any) -> dict[int, Any]:
        return dict.fromkeys(self.members, decode_value(hint, encode_value(value)))


class RememberingReference(Reference):
    """Measures only once: what rank 0 computes does not depend on what the others send."""

    def __init__(self, results: dict[Any, Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._results = results

    def measure(self, rank: RankSpec) -> Any:
        if rank.rank not in self._results:
            self._results[rank.rank] = super().measure(rank)
        return self._results[rank.rank]

    def measure_one_batch(self) -> Any:
        if "one batch" not in self._results:
            self._results["one batch"] = super().measure_one_batch()
        return self._results["one batch"]


class RowVerify(Verify):
    """Rank 0's task with the model of a row, and without files."""

    def __init__(self, context: TaskContext, row: Row, step: Step) -> None:
        super().__init__(context)
        self._row, self._loaded = row, step
        self._results: dict[Any, Any] = {}

    def open_reader(self) -> Any:
        return RowReader(self._row, self._loaded.info)

    def _load_step(self) -> Step:
        return self._loaded

    def _find_ranges(self) -> Any:
        return self._row.ranges

    def _make_reference(self, totals: Any = ()) -> Reference:
        if "step" not in self._results:
            step, example = self._loaded, (self._row.samples, self._row.labels)
            recipe = dataclasses.replace(self._row.recipe, seed=SEED)
            self._results["step"] = KerasStep(step.compiler.model, recipe, step, example)
        return RememberingReference(self._results, self._results["step"], self._ranks, self._draw)


def load_task(row: Row, kind: type[Step] = Step) -> Verify:
    """Return rank 0's task, ready to run."""
    ranks = specs_of(SIZES)
    recipe = dataclasses.replace(row.recipe, seed=SEED)
    spec = RunSpec("verify-matrix", "", "", recipe, ranks, None, None, "")
    no_orders: Any = None
    step = make_step(row, load_backend()[1], kind)
    context = TaskContext(spec, ranks[0], RunProgress(spec), Reporter(ranks[0]), no_orders)
    task = RowVerify(context, row, step)
    task.load()
    return task


def compute_vectors(task: Verify) -> Vectors:
    """Return the vectors of all ranks, each of its samples, with the weights that `verify` moves."""
    example, vectors = task.reader.first(0), {}
    task.step.values = task._move_weights()
    for rank, size in enumerate(SIZES):
        task.step.position = 0, rank
        batch = draw_samples(rank, size, seed=SEED, example=example, info=task.step.info, ranges={})
        vectors[f"rank {rank}"] = task.step.local(*batch)
    return vectors


def verify(task: Verify, engine: Engine, saved: Vectors, capsys: Any) -> Verified:
    """Run the task with other ranks whose vectors are `saved`. Return what it reports."""
    capsys.readouterr()
    task.run(RanksWithVectors(engine, saved, max(task.sum_sizes)[0]))
    verified = event_from_line(capsys.readouterr().out.strip())
    assert isinstance(verified, Verified)
    return verified


@pytest.fixture(scope="module")
def other_ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Compute the other ranks' vectors of all rows that are tested. Return their directory."""
    directory = tmp_path_factory.mktemp("other-ranks")
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [item.callspec.params["name"] for item in items if "other_ranks" in item.fixturenames]
    program = [sys.executable, "-m", "tests.unit.worker.tasks.other_ranks_program", str(directory), *names]
    done = run_command(program)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


class PlainMeanStep(Step):
    """Sends the gradient of its mean, times the same number on every rank."""

    def local(self, *batch: Any, **options: Any) -> Any:
        vector = np.array(super().local(*batch, **options))
        vector[self.layout.gradients] *= MAX_SAMPLES / vector[self.layout.count]
        return vector


def test_step_that_is_wrong_on_host_and_ranks_alike_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    task = load_task(ROWS["convolutions"], PlainMeanStep)
    saved = compute_vectors(task)
    task = load_task(ROWS["convolutions"], PlainMeanStep)
    verdict = judge(verify(task, Engine(), saved, capsys), NODES)
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
    vectors = {f"rank {rank}": np.zeros(task.layout.step_size, np.float32) for rank in range(len(SIZES))}
    if not options:
        vectors["rank 1"] = vectors["rank 1"][:1]
    right = Engine(add=lambda sent, _: sent[0])
    with pytest.raises(WorkerError, match=message):
        task.run(RanksWithVectors(right, vectors, max(task.sum_sizes)[0], **options))


@pytest.mark.parametrize("name", ROWS)
def test_right_engine_passes_and_every_wrong_one_fails(
    name: str, other_ranks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, saved = ROWS[name], dict(np.load(other_ranks / f"{name}.npz"))
    task = load_task(row)
    start = task.step.values

    def judged(engine: Engine) -> tuple[Verified, Judgement]:
        task.step.values = start
        verified = verify(task, engine, saved, capsys)
        return verified, judge(verified, NODES)

    verified, verdict = judged(Engine())
    wrong = dict(WRONG_ENGINES)
    if verified.not_one_batch and "random" in verified.not_one_batch[0]:
        wrong["another rank's random states"] = OTHER_STATES
    missed = [engine for engine in wrong if judged(wrong[engine])[1].is_equal]
    print(f"{name}: {verdict.text}; {verified}")
    assert verdict.is_equal, verdict.text
    assert not missed
    assert (verified.one_batch is None) == bool(row.reasons)
    assert all(any(part in reason for reason in verified.not_one_batch) for part in row.reasons)
