"""The training loop: what sums and answers of the other ranks it does not act on, and the noise it adds."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.model import save_model
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.data.arrays import hash_arrays
from csdctl.worker.data.prepared import SyntheticReader
from csdctl.worker.data.schedule import OwnSamples
from csdctl.worker.engine.layout import Sums
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import LinkLostError, StepVoidError, decode_value, encode_value
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import (
    MAX_STEPS,
    SAMPLES,
    STOPPED,
    EpochEnd,
    Joined,
    Progress,
    event_from_line,
)
from csdctl.worker.protocol.recipe import LossTerm, Noise, ReduceOnPlateau
from csdctl.worker.protocol.run_spec import BEST_MODEL, COPIES, LAST_MODEL, RankSpec, RunSpec, Runtime
from csdctl.worker.tasks import train
from csdctl.worker.tasks.balancer import Balancer
from csdctl.worker.tasks.progress import EpochTotals, Reporter, RunProgress, unpack
from csdctl.worker.tasks.task import FINISHED, TaskContext
from csdctl.worker.tasks.train import DIVERGED, LAST_GOOD, Train
from csdctl.workflows.train.resume import load_spec
from tests.unit.worker.compute.built_models import Step
from tests.unit.worker.tasks.verified_models import NUMBERS, SQUARES, TABLE, Row, make_step, specs_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras

SIZES = (4, 2, 3)
"""The batch sizes of the ranks. An epoch is of two steps."""
NUM_STEPS = 2
NO_ORDERS: Any = SimpleNamespace(is_stopping=False)
STOPPING: Any = SimpleNamespace(is_stopping=True)


def dense(keras: Any) -> Any:
    return keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)])


ROW = Row(dense, TABLE, NUMBERS, SQUARES)


class RowReader(SyntheticReader):
    """Has samples for other ranks, too."""

    def pack_reassigned(self, spans: Any) -> bytes:
        return b""


class RandomTrain(Train):
    """The training loop without files."""

    loaded: Any

    def open_reader(self) -> Any:
        return RowReader(ROW.form, 0)

    def _load_step(self) -> Any:
        return self.loaded

    def save_trained(self, path: Path) -> Path:
        return save_model(self.step.model, path)


class PlayedRanks(Communicator):
    """This process and other ranks, which send what it sends, for as many samples as they have.

    `add` changes the sum, `answer` what a rank answers. `lost` has the ranks that are lost in a sum, by its
    number from 1, `joining` those that join there; a sum in `void` is none, and its step is taken anew.
    """

    def __init__(
        self,
        task: Train,
        rank: int = 0,
        *,
        add: Callable[[np.ndarray, Any], None] = lambda total, layout: None,
        answer: Callable[[int, Any], Any] = lambda rank, value: value,
        lost: Mapping[int, tuple[int, ...]] = {},
        joining: Mapping[int, tuple[int, ...]] = {},
        void: tuple[int, ...] = (),
    ) -> None:
        super().__init__(rank, tuple(task.sum_sizes))
        self.local[:] = 9.0  # of an earlier sum
        self.members = self.counted = tuple(share.rank for share in task.progress.segment.shares)
        self._progress = task.progress
        self._layout, self._add, self._answer = task.layout, add, answer
        self._lost, self._joining, self._void = lost, joining, void
        self.asked: list[Any] = []
        """What this rank has given to the others."""
        self.given: list[tuple[Any, Any]] = []
        """What it has given to each sum, and what it expects of the others."""
        self.messages: list[tuple[int, Any, str]] = []
        """Messages that it sends and expects."""
        self.evicted: list[tuple[int, str]] = []
        self.states: list[tuple[int, bytes]] = []
        """What it has given to the ranks that join."""

    def sum(self, vector: np.ndarray, expected: Any = None, *, checks_finite: bool = False) -> np.ndarray:
        self.given.append((np.array(vector), expected))
        number = len(self.given)
        lost, joining = self._lost.get(number, ()), set(self._joining.get(number, ()))
        samples = dict(zip(self.members, self._progress.step_samples, strict=True))
        self.counted = tuple(rank for rank in self.members if rank not in lost)
        self.members = tuple(sorted({*self.counted, *joining}))
        self.lost += [(rank, "is gone", False) for rank in lost]
        self.admitted |= joining
        if number in self._void:
            raise StepVoidError
        total = np.array(vector)
        count = np.float32(sum(samples[rank] for rank in self.counted))
        total[self._layout.step] *= count / vector[self._layout.count]
        self._add(total, self._layout)
        return total

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        self.messages.append((rank, content, traffic_class))

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        self.messages.append((rank, max_bytes, traffic_class))
        return bytearray()

    def gather(self, value: Any, hint: Any) -> dict[int, Any]:
        def check(answer: Any) -> Any:
            return decode_value(hint, encode_value(answer))

        self.asked.append(value)
        self.counted = self.members
        answers = {rank: self._answer(rank, value) for rank in self.members if rank != self.rank}
        return {rank: check(answers.get(rank, value)) for rank in self.members}

    def give_state(self, rank: int, packed: bytes) -> None:
        self.states.append((rank, packed))

    def evict(self, rank: int, reason: str) -> None:
        self.evicted.append((rank, reason))


def load_task(
    rank: int = 0,
    directory: Path | None = None,
    step_file: Path | None = None,
    manifest: str = "",
    **changes: Any,
) -> Train:
    """Return the task of a rank, ready to run; `changes` are those of the recipe.

    Checkpoints are kept below `directory`, if it is given, and without `step_file` no more: as after a power
    cut. With a `manifest`, rank 1 is that of another server, and rank 2 that of its node.
    """
    ranks = specs_of(SIZES, NUM_STEPS)
    if manifest:
        ranks = (ranks[0], *(dataclasses.replace(rank_spec, server=1) for rank_spec in ranks[1:]))
    recipe = dataclasses.replace(SQUARES, **{"epochs": 1, **changes})
    output, num_checkpoints = (str(directory), 3) if directory else ("", 0)
    spec = RunSpec(
        *("run", "", "", recipe, ranks, None, None, output),
        num_checkpoints=num_checkpoints,
        is_balanced=False,
        step_file=str(step_file or ""),
        manifest=manifest,
        checkpoint_interval_s=0.0 if manifest else 600.0,
    )
    step = make_step(dataclasses.replace(ROW, recipe=recipe), load_backend()[1])
    me = ranks[rank]
    task = RandomTrain(TaskContext(spec, me, RunProgress(spec), Reporter(me), NO_ORDERS))
    task.loaded = step
    task.load()
    task.progress.regroup((0, 1, 2))
    return task


def weights_of(task: Train) -> list[Any]:
    return [np.array(weights) for weights in task.step.weights]


def fill_weights(task: Train, value: float) -> None:
    weights = [np.full_like(weights_of_layer, value) for weights_of_layer in task.step.weights]
    task.step.values = [*weights, *task.step.values[len(weights) :]]


def assert_nothing_applied(task: Train, before: list[Any]) -> None:
    assert all(map(np.array_equal, before, weights_of(task)))
    assert task.progress.position.total_steps == 0


def test_right_sums_are_applied_and_weights_that_are_not_finite_end_the_run() -> None:
    task = load_task()
    before = weights_of(task)
    assert task.run(PlayedRanks(task)) == FINISHED
    assert task.progress.position.total_steps == NUM_STEPS
    assert not np.array_equal(before[0], weights_of(task)[0])
    fill_weights(task, np.inf)
    with pytest.raises(WorkerError, match="the weights are no longer finite after epoch 2"):
        task.compare_weights(PlayedRanks(load_task()))


def test_state_is_given_to_other_ranks_alone_and_to_none_where_there_is_none() -> None:
    task = load_task()
    ranks = PlayedRanks(task)
    task.settle(ranks, ())
    assert [rank for rank, _ in ranks.states] == [*ranks.members[1:]] != []
    load_task().settle(Communicator(0, tuple(task.sum_sizes)), ())


def test_epoch_without_any_weight_ends_the_run() -> None:
    task = load_task(losses={"": LossTerm("mean_squared_error", {"reduction": "mean_with_sample_weight"})})
    task.progress.end_step(Sums(0.0, (), 0.0), sum(SIZES))
    with pytest.raises(WorkerError, match="epoch 1 has no loss: the weights of all samples are 0") as caught:
        task._epoch_results()
    assert (caught.value.exit_code, "sample_weight" in caught.value.remedy) == (2, True)


def rates_of(
    task: Train, then: Callable[[list[float]], None] = lambda rates: None, rank: int = 0, **options: Any
) -> list[float]:
    """Run the task, with `then` called in each step. Return the learning rate of each."""
    rates: list[float] = []

    def note(total: np.ndarray, layout: Any) -> None:
        rates.append(float(task.step.rate))
        then(rates)

    with contextlib.suppress(LinkLostError):
        task.run(PlayedRanks(task, rank, add=note, **options))
    return rates


def test_learning_rate_follows_the_global_batch_when_a_node_is_lost() -> None:
    """Linear scaling: lr · N / B of the recipe, where N are the samples of the ranks that are left.

    A last step with fewer samples takes their mean, at the rate of the whole epoch.
    """
    task = load_task(learning_rate=0.01, reference_batch=3)
    task.progress.change_batch_sizes({0: 6, 1: 3, 2: 4})
    samples: list[int] = []

    def note_samples(rates: list[float]) -> None:
        samples.append(sum(task.progress.step_samples))

    first, second, *later = rates_of(task, note_samples, lost={2: (2,)})  # in the last step
    assert [first, second] == pytest.approx([0.01 * 13 / 3] * 2)
    assert samples[:2] == [13, 5]
    assert later
    assert later == pytest.approx([0.01 * 9 / 3] * len(later))


def test_learning_rate_follows_a_schedule_and_is_reduced_in_the_epoch_after_a_plateau() -> None:
    keras = load_backend()[1]
    halving = keras.optimizers.schedules.ExponentialDecay(0.08, 1, 0.5)
    schedule = json.dumps(keras.optimizers.schedules.serialize(halving))
    task = load_task(learning_rate=0.08, reference_batch=9, epochs=2, schedule=schedule)
    assert rates_of(task) == pytest.approx([0.08, 0.04, 0.02, 0.01])
    plateau = ReduceOnPlateau("loss", patience=1, factor=0.5, min_delta=1e9)
    task = load_task(learning_rate=0.01, reference_batch=9, epochs=4, reduce_on_plateau=plateau)
    factors = [1.0, 1.0, 0.5, 0.25]
    assert rates_of(task) == pytest.approx([0.01 * factor for factor in factors for _ in range(NUM_STEPS)])


@pytest.mark.parametrize("has_step_file", [False, True])
def test_epoch_is_not_ended_twice_when_a_run_continues(tmp_path: Path, *, has_step_file: bool) -> None:
    """Early stopping and plateaus count epochs. Checkpoint and step file have the same number of steps."""
    step_file = tmp_path / "memory" / "step" if has_step_file else None
    (tmp_path / "memory").mkdir(mode=0o700)
    plateau = ReduceOnPlateau("loss", patience=9, min_delta=1e9)
    uninterrupted = load_task(epochs=2, reduce_on_plateau=plateau)
    uninterrupted.run(PlayedRanks(uninterrupted))
    first = load_task(0, tmp_path, step_file, epochs=1, reduce_on_plateau=plateau)
    first.run(PlayedRanks(first))
    again = load_task(0, tmp_path, step_file, epochs=2, reduce_on_plateau=plateau)
    position = again.progress.position
    assert (position.epoch, position.step, position.total_steps) == (2, 0, NUM_STEPS)
    assert position.totals == EpochTotals()
    again.run(PlayedRanks(again))
    assert again.progress.position == uninterrupted.progress.position
    assert all(map(np.array_equal, weights_of(again), weights_of(uninterrupted)))


@pytest.mark.needs("shared memory")
def test_server_keeps_what_a_resume_there_needs_and_its_node_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manifest").write_text("{}")
    directory = Path(".csdctl/runs/run")
    server, node = (load_task(rank, directory, manifest="manifest", epochs=2) for rank in (1, 2))

    def lose_the_second(rates: list[float]) -> None:
        if len(rates) == 2:
            raise LinkLostError

    copies = ProjectDirectory(Path(COPIES))
    copy = copies.find_run("run")
    step_file = copies.step_file(copy)
    try:
        for rank, task in ((2, node), (1, server)):
            assert not step_file.exists()
            assert len(rates_of(task, lose_the_second, rank)) == 2
        assert (copy.manifest.read_text(), load_spec(copy).ranks) == ("{}", server.spec.ranks)
        assert {path.name for path in copy.path.iterdir()} == {"manifest.json", "spec.json"}
        assert not directory.exists()
        again = load_task(0, tmp_path / "elsewhere", step_file, epochs=3)
    finally:
        step_file.unlink(missing_ok=True)
    assert again.progress.position == server.progress.position
    assert again.progress.position.total_steps == 1
    assert all(map(np.array_equal, weights_of(again), weights_of(server)))


def test_run_that_is_stopped_within_an_epoch_reports_its_steps_and_continues_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = load_task(directory=tmp_path)
    task.orders = STOPPING
    assert task.run(PlayedRanks(task)) == STOPPED
    (report,) = reports(capsys.readouterr().out)
    assert (report.steps, report.global_samples) == (1, sum(SIZES))
    again = load_task(directory=tmp_path)
    assert again.progress.position == task.progress.position
    assert again.progress.position.step == 1
    assert all(map(np.array_equal, weights_of(again), weights_of(task)))


@pytest.mark.parametrize("changes", [{}, {"decay": "cosine"}, {"decay": "linear", "warmup_epochs": 1}])
def test_model_that_is_saved_again_has_the_learning_rate_of_the_last_step(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    load_model, rates = load_backend()[1].models.load_model, []
    for is_first in (True, False):
        task = load_task(directory=tmp_path, epochs=2, **changes)
        if is_first:
            task.run(PlayedRanks(task))
        task.finish(FINISHED)
        rates.append(float(load_model(tmp_path / LAST_MODEL).optimizer.learning_rate))
        (tmp_path / LAST_MODEL).unlink()
    assert rates[0] > 0
    assert rates[1] == pytest.approx(rates[0], rel=1e-6)


def test_best_model_is_that_of_the_epoch_with_the_best_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last model is that of the last epoch."""
    losses, trained = iter([1.0, 0.5, 0.7]), []

    def evaluate(step: Any, *_: Any) -> dict[str, Any]:
        trained.append(weights_of(task))
        return {"validation_loss": next(losses)}

    monkeypatch.setattr(train, "evaluate", evaluate)
    task = load_task(directory=tmp_path, epochs=3)
    validation: Any = ()
    task._validation = validation
    task.run(PlayedRanks(task))
    task.save_model()
    load_model = load_backend()[1].models.load_model
    for name, epoch in ((BEST_MODEL, 2), (LAST_MODEL, 3)):
        saved = load_model(tmp_path / name).get_weights()
        assert all(map(np.array_equal, saved, trained[epoch - 1]))
    assert task.progress.position.callbacks.best_epoch == 2


def test_run_ends_after_the_steps_that_it_may_take_in_all_epochs() -> None:
    task = load_task(epochs=3)
    task.spec = dataclasses.replace(task.spec, max_steps=NUM_STEPS + 1)
    assert task.run(PlayedRanks(task)) == MAX_STEPS
    assert task.progress.position.total_steps == NUM_STEPS + 1


def test_rank_gives_its_own_samples_and_seconds_and_asks_nobody_to_stop() -> None:
    """Rank 2 of the run, without rank 1. Only rank 0 may stop all."""
    task = load_task(rank=2)
    task.orders = STOPPING
    task.progress.regroup((0, 2))
    num_steps = task.progress.segment.stop_step
    group = PlayedRanks(task, rank=2)
    with pytest.raises(LinkLostError):
        task.run(group)  # at the end of the epoch: rank 0 sends no decision
    layout = task.layout
    assert len(group.given) == num_steps
    for vector, _ in group.given[:-1]:
        assert vector[layout.count] == SIZES[2]
        assert vector[layout.step_size] == 0
        assert [seconds > 0 for seconds in vector[layout.step_size + 1 : -1]] == [False, False, False, True]


def test_rank_0_expects_of_each_rank_that_takes_part_its_weighted_samples() -> None:
    task = load_task()
    task.progress._weights = [1.0, 0.5, 2.0]
    task.progress.regroup((0, 2))
    group = PlayedRanks(task)
    with pytest.raises(WorkerError, match="expected 10"):
        task.run(group)
    (_, counts), *_ = group.given
    assert counts == {0: 4.0, 2: 6.0}


def test_samples_of_a_rank_that_is_lost_go_from_rank_0_to_those_that_read_them_now() -> None:
    host, csd1 = load_task(), load_task(rank=2)
    expected = []
    for task in (host, csd1):
        task.progress.regroup((0, 2))
    segment = host.progress.segment
    for step in range(segment.stop_step):
        share = segment.shares[1].batch(step)
        if share.reassigned:
            expected.append((share.reassigned, share.num_reassigned * (10 + 1) * 4))
    host.reader.pack_reassigned = lambda spans: repr(tuple(spans)).encode()  # type: ignore[method-assign]
    sending, receiving = PlayedRanks(host), PlayedRanks(csd1, rank=2)
    host.run(sending)
    with pytest.raises(LinkLostError):  # rank 0 sends no decision
        csd1.run(receiving)
    assert expected
    assert sending.messages == [(2, repr(spans).encode(), SAMPLES) for spans, _ in expected]
    assert receiving.messages == [(0, num_bytes, SAMPLES) for _, num_bytes in expected]


@pytest.mark.parametrize(
    ("is_balanced", "limit", "sizes"),
    [(False, None, (4, 2, 3)), (True, None, (6, 2, 1)), (True, 5, (5, 2, 2))],
)
def test_slow_rank_gets_fewer_samples_within_a_constant_global_batch(
    *, is_balanced: bool, limit: int | None, sizes: tuple[int, ...]
) -> None:
    """No other gets more than its `limit`, which is what its memory holds."""

    def slow_down(total: np.ndarray, layout: Any) -> None:
        total[layout.step_size + 1] = 3.0 * task.progress.position.batch_sizes["2"]
        total[layout.step_size + 2 : -1] = 0.01, 0.0, total[layout.step_size + 1]

    task = load_task(epochs=8)
    host, *nodes = task.spec.ranks
    ranks = (dataclasses.replace(host, max_batch_size=limit), *nodes)
    task.spec = dataclasses.replace(task.spec, is_balanced=is_balanced, ranks=ranks)
    task.load()
    task.progress.regroup((0, 2))
    task.run(PlayedRanks(task, add=slow_down))
    assert task.progress.position.batch_sizes == {str(rank): size for rank, size in enumerate(sizes)}


class WatchedBalancer(Balancer):
    """Notes the compute times that it gets, and tries nothing. `before`: sizes before an open trial."""

    def __init__(self, before: dict[int, int] | None = None) -> None:
        super().__init__({})
        self.before, self.seen = before or {}, list[Mapping[int, float]]()

    def observe(self, times_s: Mapping[int, float], previous_step_s: float) -> None:
        self.seen.append(times_s)

    def decide(self, *arguments: Any, may_try: bool = True) -> None:
        return None

    def forget(self) -> dict[int, int]:
        sizes, self.before = getattr(self, "before", {}), {}
        return sizes


def test_only_steps_in_which_all_ranks_have_a_full_batch_show_their_balance() -> None:
    """The private samples of rank 0 last for twice as many steps as those of the others."""
    task = load_task()
    balancer = task.balancer = WatchedBalancer()
    task.progress.samples = [
        OwnSamples(NUM_STEPS * size * (1 + (rank == 0)), 0) for rank, size in enumerate(SIZES)
    ]
    task.progress.position = dataclasses.replace(task.progress.position, segment=None)
    task.progress.regroup((0, 1, 2))
    task.run(PlayedRanks(task))
    assert task.progress.position.total_steps == 2 * NUM_STEPS
    assert len(balancer.seen) == NUM_STEPS


def test_batch_sizes_of_an_open_trial_are_taken_back_when_a_rank_is_lost() -> None:
    task = load_task()
    task.progress.change_batch_sizes({0: 2, 1: 4, 2: 3})
    task.balancer = WatchedBalancer()
    group = PlayedRanks(task, lost={2: (2,)})

    def begin_trial(total: np.ndarray, layout: Any) -> None:
        assert isinstance(task.balancer, WatchedBalancer)
        task.balancer.before = {0: 4, 1: 2, 2: 3}

    group._add = begin_trial
    task.run(group)
    assert task.progress.position.batch_sizes == {"0": 4, "1": 2, "2": 3}


def test_rank_that_joins_again_has_the_batch_sizes_of_rank_0_and_not_those_before_its_own_trial() -> None:
    task = load_task(rank=2)
    task.balancer = WatchedBalancer({0: 2, 1: 4, 2: 3})
    with contextlib.suppress(LinkLostError):  # rank 0 sends no decision
        task.run(PlayedRanks(task, rank=2))
    assert task.progress.position.batch_sizes == {str(rank): size for rank, size in enumerate(SIZES)}


def change_count(total: np.ndarray, layout: Any) -> None:
    total[layout.count] += 1


def change_stop(total: np.ndarray, layout: Any) -> None:
    total[layout.step_size] = 1


def lose_numbers(total: np.ndarray, layout: Any) -> None:
    total[layout.gradients] = np.nan


WRONG_SUM = r"the sum over the ranks is of \d+ samples, expected 9"
OVERFLOWED = "^the gradient overflowed in epoch 1, step 1"


@pytest.mark.parametrize(
    ("add", "message", "remedy"),
    [(change_count, WRONG_SUM, "please report it"), (lose_numbers, OVERFLOWED, DIVERGED)],
)
def test_sum_that_cannot_be_is_not_applied(add: Any, message: str, remedy: str) -> None:
    """The hub leaves out one rank whose gradient is not finite. Of most ranks, the training diverges."""
    task = load_task()
    before = weights_of(task)
    with pytest.raises(WorkerError, match=message) as raised:
        task.run(PlayedRanks(task, add=add))
    assert remedy in raised.value.remedy
    assert_nothing_applied(task, before)


def test_model_of_the_last_good_epoch_is_saved_when_a_training_diverges(tmp_path: Path) -> None:
    task = load_task(directory=tmp_path, epochs=2)
    good: list[Any] = []

    def diverge_in_the_second_epoch(total: np.ndarray, layout: Any) -> None:
        position = task.progress.position
        if (position.epoch, position.step) == (2, 0):
            good.extend(weights_of(task))
        if (position.epoch, position.step) == (2, 1):
            lose_numbers(total, layout)

    with pytest.raises(WorkerError, match="the gradient overflowed in epoch 2, step 2") as raised:
        task.run(PlayedRanks(task, add=diverge_in_the_second_epoch))
    assert raised.value.remedy == DIVERGED + LAST_GOOD
    saved = load_backend()[1].models.load_model(tmp_path / LAST_MODEL).get_weights()
    assert good
    assert all(map(np.array_equal, saved, good))


def test_no_other_rank_is_at_fault_when_rank_0_has_no_finite_gradient_either() -> None:
    task = load_task()
    fill_weights(task, np.nan)
    with pytest.raises(WorkerError, match="the loss became nan"):
        task.run(PlayedRanks(task))


def test_other_ranks_refuse_a_count_leave_a_gradient_to_rank_0_and_stop_when_it_asks() -> None:
    """Rank 0 ends a run whose gradient is not finite. The others wait for that."""
    task = load_task(rank=1)
    before = weights_of(task)
    with pytest.raises(WorkerError, match="the sum over the ranks is of 10 samples, expected 9"):
        task.run(PlayedRanks(task, rank=1, add=change_count))
    group = PlayedRanks(task, rank=1, add=lose_numbers)
    with pytest.raises(LinkLostError):
        task.run(group)
    assert group.asked == [True, None]
    assert_nothing_applied(task, before)
    assert task.run(PlayedRanks(task, rank=1, add=change_stop)) == STOPPED


def test_samples_with_nan_are_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task()
    images, labels = task.reader.first(SIZES[0])
    monkeypatch.setattr(task.reader, "read", lambda *_: (np.full_like(images, np.nan), labels))
    with pytest.raises(WorkerError, match=r"^samples of host, csd1 have NaN or infinity: ") as raised:
        task.run(PlayedRanks(task, answer=lambda rank, value: rank == 1))
    assert "np.isfinite" in raised.value.remedy
    assert LAST_GOOD not in raised.value.remedy


def test_rank_with_other_weights_is_at_fault_and_most_of_them_end_the_run() -> None:
    def others(*ranks: int) -> Any:
        def answer(rank: int, value: Any) -> Any:
            return "0" * len(value) if rank in ranks and isinstance(value, str) else value

        return answer

    task = load_task()
    ranks = PlayedRanks(task, answer=others(2))
    assert task.run(ranks) == FINISHED
    assert ranks.evicted == [(2, "has other weights than rank 0 after epoch 1")]
    task = load_task()
    with pytest.raises(WorkerError, match="the weights of csd0, csd1 differ from rank 0's"):
        task.run(PlayedRanks(task, answer=others(1, 2)))
    assert task.progress.position.epoch == 1


class PrivateReader(RowReader):
    """All samples are private."""

    def private_copies(self, share: Any) -> Any:
        return np.ones(share.num_samples, np.int64)


class PrivateTrain(Train):
    """One rank alone, which loads its model itself."""

    def open_reader(self) -> Any:
        return PrivateReader(ROW.form, 0)

    def _load_step(self) -> Step:
        keras = load_backend()[1]
        keras.utils.set_random_seed(1)
        model = dense(keras)
        compile_model(model, self.spec.recipe)
        return Step(model, self.spec.recipe, self.example(0), noise=self.spec.noise)


def hash_of_a_run_alone(noise: Noise | None) -> str:
    me = RankSpec(0, "host", 4, Runtime(), None, None, 4 * NUM_STEPS, 0)
    keras = load_backend()[1]
    recipe = compile_model(dense(keras), dataclasses.replace(SQUARES, epochs=1))
    spec = RunSpec("run", "", "", recipe, (me,), None, None, "", num_checkpoints=0, noise=noise)
    task = PrivateTrain(TaskContext(spec, me, RunProgress(spec), Reporter(me), NO_ORDERS))
    task.load()
    task.progress.regroup((0,))
    task.run(Communicator(0, tuple(task.sum_sizes)))
    assert task.step.has_noise is (noise is not None)
    return hash_arrays(task.step.weights)


def test_noise_of_a_run_makes_its_weights_others_each_time() -> None:
    """It is secret: no seed repeats it."""
    noise = Noise(1.0, 1.1, 1e-5)
    assert hash_of_a_run_alone(noise) != hash_of_a_run_alone(noise)
    assert hash_of_a_run_alone(None) == hash_of_a_run_alone(None)


def reports(text: str) -> list[Any]:
    """Return the reports of steps in what a rank has printed."""
    events = map(event_from_line, text.splitlines())
    return [event for event in events if isinstance(event, Progress | EpochEnd)]


@pytest.mark.parametrize("num_sums", [1, NUM_STEPS])
def test_steps_before_the_loss_of_the_link_are_reported_once(
    num_sums: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the epoch, and at its end, after the last step."""
    task = load_task(rank=1)
    ranks = PlayedRanks(task, rank=1)

    def lose_link(*_: Any, **__: Any) -> Any:
        raise LinkLostError

    add_up = ranks.sum
    ranks.sum = lambda *given, **options: (  # type: ignore[method-assign]
        add_up(*given, **options) if len(ranks.given) < num_sums else lose_link()
    )
    ranks.gather = lose_link  # type: ignore[method-assign]
    with pytest.raises(LinkLostError):
        task.run(ranks)
    (report,) = reports(capsys.readouterr().out)
    assert (type(report), report.step, report.steps) == (Progress, num_sums, num_sums)
    assert report.samples == num_sums * SIZES[1]
    assert report.compute_s + report.wait_s <= report.wall_s + 1e-3
    task.progress.regroup((0, 1))
    with pytest.raises(LinkLostError):  # rank 0 sends no decision
        task.run(PlayedRanks(task, rank=1))
    later = reports(capsys.readouterr().out)
    assert (type(later[-1]), later[-1].steps) == (EpochEnd, task.progress.position.total_steps - num_sums)


@pytest.mark.parametrize("is_void", [False, True])
def test_steps_go_on_without_a_lost_rank_whose_samples_of_the_step_do_not_count(
    *, is_void: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks divide what is left alike. The public samples of the lost rank are read by the others.

    A step of several sums is taken anew.
    """
    void = (1,) if is_void else ()
    tasks = [load_task(rank) for rank in (0, 1)]
    for rank, task in enumerate(tasks):
        with contextlib.suppress(LinkLostError):  # rank 1 gets no decision at the end
            task.run(PlayedRanks(task, rank, lost={1: (2,)}, void=void))
    host, csd0 = tasks
    assert host.progress.position.total_steps == csd0.progress.position.total_steps == 3
    events = [event_from_line(line) for line in capsys.readouterr().out.splitlines()]
    (joined,) = [event for event in events if isinstance(event, Joined)]
    num_steps = 0 if is_void else 1
    assert (joined.step, joined.batch_sizes, joined.lost) == (
        *(num_steps, {"0": 4, "1": 2}),
        ((2, "is gone"),),
    )
    assert (joined.epoch_samples, joined.num_lost, joined.is_start) == (num_steps * (4 + 2), 0, False)
    (end,) = [event for event in events if isinstance(event, EpochEnd) and event.rank == 0]
    assert (end.global_samples, end.num_lost) == (NUM_STEPS * sum(SIZES), 0)


@pytest.mark.parametrize("number", [1, 2, 3], ids=["hashes", "decision", "admission"])
def test_rank_that_is_lost_at_the_end_of_an_epoch_is_reported_before_the_next(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    host = load_task(epochs=2)
    ranks = PlayedRanks(host)
    gather = ranks.gather

    def lose(value: Any, hint: Any) -> dict[int, Any]:
        values = gather(value, hint)
        if len(ranks.asked) == number:
            del values[2]
            ranks.members = ranks.counted = tuple(values)
            ranks.lost.append((2, "is gone", False))
        return values

    ranks.gather = lose  # type: ignore[method-assign]
    host.run(ranks)
    events = [event_from_line(line) for line in capsys.readouterr().out.splitlines()]
    (joined,) = [event for event in events if isinstance(event, Joined)]
    assert (joined.epoch, joined.step, joined.batch_sizes) == (2, 0, {"0": 4, "1": 2})
    assert (joined.lost, joined.is_start, joined.epoch_samples) == (((2, "is gone"),), False, 0)
    first, second = [event for event in events if isinstance(event, EpochEnd)]
    assert (first.global_samples, first.num_lost) == (NUM_STEPS * sum(SIZES), 0)
    assert second.global_samples + second.num_lost == NUM_STEPS * sum(SIZES)


def test_rank_that_joins_takes_over_the_state_after_the_step_and_takes_part_in_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host, joiner = load_task(), load_task(2)
    joiner.values = [value + 1 for value in joiner.values]
    host.progress.regroup((0, 1))
    ranks = PlayedRanks(host, joining={1: (2,)})
    taken: list[Any] = []
    said: list[str] = []

    def take_over(rank: int, packed: bytes) -> None:
        assert rank == 2
        said.append(capsys.readouterr().out)
        joiner.progress.position, joiner.values = unpack(
            np.frombuffer(packed, np.uint8), joiner.values, joiner.progress.samples
        )
        taken.append((joiner.progress.position, weights_of(joiner)))

    ranks.give_state = take_over  # type: ignore[method-assign]
    host.spec = dataclasses.replace(host.spec, max_steps=1)
    assert host.run(ranks) == MAX_STEPS
    ((position, weights),) = taken
    assert (position, position.step) == (host.progress.position, 1)
    assert all(map(np.array_equal, weights, weights_of(host)))
    assert [share.rank for share in joiner.progress.segment.shares] == [0, 1, 2]
    assert ranks.members == (0, 1, 2)
    (joined,) = map(event_from_line, said[0].splitlines())  # before it can take a step
    assert isinstance(joined, Joined)
    assert joined.batch_sizes == {"0": 4, "1": 2, "2": 3}
