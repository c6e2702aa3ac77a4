"""The state of a training, saved and restored also after a process or a machine has ended."""

import os
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.schedule import OwnSamples, Span, begin_epoch
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.protocol.events import CheckpointSaved, Warned, event_from_line
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import LAST_MODEL, RankSpec, RunSpec, Runtime
from csdctl.worker.tasks import checkpointer
from csdctl.worker.tasks.checkpointer import KEPT_STEP_FILE, Checkpointer, Checkpoints, StepFile
from csdctl.worker.tasks.progress import (
    CallbackState,
    EpochTotals,
    Position,
    Reporter,
    max_state_bytes,
    pack,
    unpack,
)
from tests.full_disk import full_disk

OWN = [OwnSamples(5, 95), OwnSamples(20, 80)]
SEGMENT = begin_epoch(OWN, {0: 10, 1: 7})
POSITION = Position(
    2, 3, 45, SEGMENT, {"0": 10, "1": 7}, EpochTotals(3, 51, 4.5, (0.5,)), CallbackState(1.5, 1)
)


def values(fill: float = 0.0) -> list[Array]:
    return [np.full((3, 4), fill, np.float32), np.array(fill, np.int64), np.full(5000, fill, np.float32)]


def test_state_is_restored_bit_by_bit() -> None:
    position, restored = unpack(pack(values(7), POSITION), values(), OWN)
    assert position == POSITION
    assert all(map(np.array_equal, restored, values(7)))
    assert [value.dtype for value in restored] == [np.float32, np.int64, np.float32]


@pytest.mark.parametrize(
    ("like", "message"),
    [
        pytest.param([], r"expected \d+ for this model", id="other size"),
        pytest.param([np.zeros((4, 3), np.float32), np.array(0)], "shapes and types", id="other shape"),
        pytest.param([np.zeros((3, 4), np.int32), np.array(0)], "shapes and types", id="other type"),
    ],
)
def test_state_of_another_model_is_refused(like: list[Any], message: str) -> None:
    packed = pack(values()[:2], POSITION)
    with pytest.raises(WorkerError, match=message):
        unpack(packed, like, OWN)


def changed_share(**changes: Any) -> Position:
    first, second = SEGMENT.shares
    return replace(POSITION, segment=replace(SEGMENT, shares=(replace(first, **changes), second)))


IMPOSSIBLE = {
    "epoch 0": replace(POSITION, epoch=0),
    "epoch as text": replace(POSITION, epoch="2"),
    "step below 0": replace(POSITION, step=-1),
    "more steps than in the run": replace(POSITION, total_steps=2),
    "steps beyond counting": replace(POSITION, total_steps=10**30),
    "batch size below 0": replace(POSITION, batch_sizes={"0": -1, "1": 7}),
    "batch sizes of other ranks": replace(POSITION, batch_sizes={"0": 1, "7": 7}),
    "batch sizes as list": replace(POSITION, batch_sizes=[1, 2]),
    "segment in the future": replace(POSITION, segment=replace(SEGMENT, start_step=4)),
    "share of no rank": changed_share(rank=2),
    "private samples that do not exist": changed_share(private_stop=6),
    "public samples that do not exist": changed_share(public_stop=96),
    "samples before the first": changed_share(public_start=-1),
    "span of no rank": changed_share(reassigned=(Span(5, 0, 1),)),
    "span beyond the samples": changed_share(reassigned=(Span(1, 0, 81),)),
    "loss that is no number": replace(POSITION, totals=EpochTotals(3, 51, float("nan"))),
    "metric as text": replace(POSITION, totals=EpochTotals(3, 51, 1.0, ("x",))),
    "infinite rate": replace(POSITION, callbacks=CallbackState(rate_factor=float("inf"))),
    "stop as number": replace(POSITION, callbacks=CallbackState(is_stopping=1)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_position_is_refused(name: str) -> None:
    with pytest.raises(WorkerError, match="saved state cannot be read"):
        unpack(pack(values(7), IMPOSSIBLE[name]), values(), OWN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def write_steps(path: Path, *steps: int) -> StepFile:
    """Write a state after each step, full of the number of the step."""
    file = StepFile(path, values())
    file.read()
    for step in steps:
        file.write(values(step), replace(POSITION, total_steps=step))
    return file


def step_of(packed: Array | None) -> int:
    """Return the steps of a state, which is full of this number."""
    assert packed is not None
    position, restored = unpack(packed, values(), OWN)
    assert all((value == position.total_steps).all() for value in restored)
    return position.total_steps


def read_step(path: Path) -> int:
    return step_of(StepFile(path, values()).read())


def test_step_file_exists_from_the_first_step_on_and_returns_the_latest_state(path: Path) -> None:
    file = write_steps(path)
    assert file.read() is None
    assert not path.exists()
    for steps in ((45,), (46, 47), (48, 49)):
        write_steps(path, *steps)
        assert read_step(path) == steps[-1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_state_that_cannot_be_written_to_its_end_leaves_the_one_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a process that was started again: it writes over the older state first."""

    def write_half(written: Any, position: Position, out: Array) -> Array:
        out[: len(out) // 2] = 7
        raise InterruptedError

    for steps in ((45, 46), (47,)):
        write_steps(path, *steps)
        started_again = write_steps(path)
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer, "pack", write_half)
            with pytest.raises(InterruptedError):
                started_again.write(values(), POSITION)
        assert read_step(path) == steps[-1]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("place", [0, 3, 7, 12, 17, *(StepFile._MARK.size + at for at in (60, 5000, 20_000))])
def test_half_of_a_step_file_that_is_damaged_is_left_out_and_named(path: Path, half: int, place: int) -> None:
    """In its mark: number, size or checksum. Or anywhere in the state."""
    write_steps(path, 45, 46)
    content = bytearray(path.read_bytes())
    content[half * (len(content) // 2) + place] ^= 0x80
    path.write_bytes(content)
    problems: list[str] = []
    assert step_of(StepFile(path, values()).read(problems.append)) == (46 if half == 0 else 45)
    assert problems == [f"{path} is damaged: state {half + 1} of 2 has another checksum"]


def test_state_that_is_not_complete_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that was killed at its first step, or at a later one."""
    for steps in ((), (45,)):
        file = write_steps(path, *steps)
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer, "pack", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                file.write(values(), POSITION)
        problems: list[str] = []
        assert (StepFile(path, values()).read(problems.append) is None) == (not steps)
        assert problems == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(6000, len(content), 4096):
        content[place] ^= 1
    path.write_bytes(content)


def in_place(put: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        put(path)

    return damage


def size_of(path: Path) -> int:
    return path.stat().st_size


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, size_of(path) // 2),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(random.Random(1).randbytes(size_of(path))),
    "text": lambda path: path.write_text("not a checkpoint"),
    "NULs": lambda path: path.write_bytes(bytes(size_of(path))),
    "longer": lambda path: os.truncate(path, size_of(path) + 1_000_000),
    "flipped bits": flip,
    "directory": in_place(lambda path: (path / "sub").mkdir(parents=True)),
    "pipe": in_place(os.mkfifo),
    "link to itself": in_place(lambda path: path.symlink_to(path.name)),
}


def load_newest(checkpoints: Checkpoints) -> Array | None:
    return next(checkpoints.newest_first(max_state_bytes(values())), None)


class TestCheckpoints:
    def save(self, directory: Path, steps: list[int]) -> Checkpoints:
        checkpoints = Checkpoints(directory, num_kept=2)
        for step in steps:
            position = replace(POSITION, total_steps=step)
            checkpoints.save(pack(values(step), position), position)
        return checkpoints

    def test_newest_checkpoints_are_kept(self, tmp_path: Path) -> None:
        self.save(tmp_path, [10, 20, 30, 40, 50])
        kept = sorted(path.name for path in tmp_path.glob("*.npz"))
        assert kept == ["step-00000040.npz", "step-00000050.npz"]

    @pytest.mark.fault(52)
    def test_half_written_checkpoint_is_ignored(self, tmp_path: Path) -> None:
        checkpoints = self.save(tmp_path, [10])
        (tmp_path / ".part-step-00000020.npz").write_bytes(b"half")
        assert step_of(load_newest(checkpoints)) == 10


ME = RankSpec(0, "host", 10, Runtime(), None, None, 0, 100)


class StateStep:
    """Stands in for a step: what the checkpointer needs of it is the state."""

    def __init__(self) -> None:
        self.values = values()

    @property
    def fill(self) -> int:
        """The number that the state is full of."""
        assert all((value == self.values[1]).all() for value in self.values)
        return int(self.values[1])

    def save(self, path: Path) -> Path:
        path.write_text(str(self.fill))
        return path


class Run:
    """A run's files, as one process after another finds them."""

    def __init__(self, directory: Path) -> None:
        self.output, self.memory = directory / "run", directory / "memory"
        self.memory.mkdir()
        self.output.mkdir()
        self.spec = RunSpec(
            "run", "", "", Recipe(), (ME,), None, None, str(self.output), str(self.memory / "step")
        )

    def start(self) -> tuple[Checkpointer, Any]:
        """Start rank 0 anew. Return its checkpointer and its step."""
        step: Any = StateStep()
        return Checkpointer(self.spec, Reporter(ME), step, samples=OWN, save_trained=step.save), step

    def train(self, steps: list[int], *, checkpoints: tuple[int, ...] = ()) -> None:
        """Save the state after `steps` to the step file, after those in `checkpoints` also to disk."""
        checkpointer, step = self.start()
        for number in steps:
            step.values = values(number)
            position = replace(POSITION, total_steps=number)
            checkpointer.write_step_file(position)
            if number in checkpoints:
                checkpointer.checkpoint(position)

    def reboot(self) -> None:
        """Take away what is in memory."""
        shutil.rmtree(self.memory)
        self.memory.mkdir()

    def checkpoint(self, number: int) -> Path:
        return self.output / "checkpoints" / f"step-{number:08d}.npz"

    def assert_continues_after(self, number: int) -> None:
        checkpointer, step = self.start()
        assert checkpointer.position == replace(POSITION, total_steps=number)
        assert step.fill == number


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_later_one_of_step_file_and_checkpoint_is_used(run: Run) -> None:
    """Also a step file that csdctl has kept, and a checkpoint of a time without step files."""
    run.train([10, 11, 12], checkpoints=(10,))
    run.assert_continues_after(12)
    (run.memory / "step").rename(run.output / KEPT_STEP_FILE)
    run.assert_continues_after(12)
    later = replace(POSITION, total_steps=20)
    Checkpoints(run.output / "checkpoints").save(pack(values(20), later), later)
    run.assert_continues_after(20)


@pytest.mark.fault(53)
@pytest.mark.parametrize("damage", DAMAGES)
def test_newest_intact_state_is_used_and_what_is_damaged_is_named(
    run: Run, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    """The step file first, kept in the run or in memory. Then one checkpoint after the other. Then none."""
    run.train([10, 11, 20, 21], checkpoints=(10, 20))
    files = [run.memory / "step", run.output / KEPT_STEP_FILE, *map(run.checkpoint, (20, 10))]
    shutil.copy(files[0], files[1])
    capfd.readouterr()
    for number, path in enumerate(files):
        DAMAGES[damage](path)
        if number < 3:
            run.assert_continues_after((21, 20, 10)[number])
            said = capfd.readouterr().out
            assert [str(file) in said for file in files] == [at <= number for at in range(4)]
            assert said.count("the newest intact state is used") >= number + 1
    with pytest.raises(
        WorkerError, match="no checkpoint of this run can be used: they are damaged"
    ) as raised:
        run.start()
    assert all(str(path) in raised.value.message for path in files)
    assert "start a new run" in raised.value.remedy


def test_run_of_a_rebooted_host_continues_from_the_newest_checkpoint_or_not_at_all(run: Run) -> None:
    run.train([10, 20, 25], checkpoints=(10, 20))
    run.reboot()
    run.assert_continues_after(20)
    any_step: Any = StateStep()
    with pytest.raises(WorkerError, match="no checkpoint of this run can be used: .*cannot be read"):
        Checkpointer(run.spec, Reporter(ME), any_step, samples=OWN[:1], save_trained=any_step.save)
    shutil.rmtree(run.output / "checkpoints")
    (run.output / "checkpoints").write_text("a file")
    with pytest.raises(WorkerError, match=f"{run.output}/checkpoints cannot be read: Not a directory"):
        run.start()


def test_checkpoint_with_the_state_of_an_earlier_step_is_named(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.train([10, 20, 25], checkpoints=(10, 20))
    run.reboot()
    shutil.copy(run.checkpoint(10), run.checkpoint(20))
    run.assert_continues_after(10)
    assert f"{run.checkpoint(20)} has the state of an earlier step" in capfd.readouterr().out


@pytest.mark.fault(53)
def test_state_of_another_run_is_not_used(run: Run) -> None:
    """An earlier version has stored no run."""
    for number, run_id in ((10, ""), (20, "run"), (30, "another")):
        position = replace(POSITION, total_steps=number, run_id=run_id)
        Checkpoints(run.output / "checkpoints").save(pack(values(number), position), position)
    for number in (20, 10):
        assert run.start()[1].fill == number
        run.checkpoint(number).unlink()
    with pytest.raises(JobError, match="they are damaged: the saved state is of run another"):
        run.start()


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("checkpoints", lambda checkpointer: checkpointer.checkpoint(replace(POSITION, total_steps=11))),
        (LAST_MODEL, lambda checkpointer: checkpointer.save_model(LAST_MODEL)),
    ],
)
def test_state_or_model_that_has_no_place_is_named_with_the_way_to_continue(
    run: Run, name: str, save: Callable[[Checkpointer], object]
) -> None:
    """The state of the step before is kept, and the run continues from it."""
    run.train([10], checkpoints=(10,))
    checkpointer, step = run.start()
    step.values = values(11)
    checkpointer._can_write = False
    with full_disk(1), pytest.raises(WorkerError, match=f"cannot write {run.output}/{name}[^:]*: ") as raised:
        save(checkpointer)
    assert f"csdctl train --resume {run.spec.run_id}" in raised.value.remedy
    run.assert_continues_after(10)


@pytest.mark.fault(25)
def test_checkpoint_that_has_no_place_is_said_once_until_there_is_place(run: Run) -> None:
    """Training goes on from the state in memory."""
    step: Any = StateStep()
    said: list[str] = []
    checkpointer = Checkpointer(
        run.spec, Reporter(ME, said.append), step, samples=OWN, save_trained=step.save
    )
    checkpointer.write_step_file(POSITION)  # in memory, where there is space

    for number in (11, 12, 13, 14, 15):
        step.values = values(number)
        with nullcontext() if number == 13 else full_disk(1):
            checkpointer.checkpoint(replace(POSITION, total_steps=number))
    events = [event_from_line(line) for line in said]
    assert [type(event) for event in events] == [Warned, CheckpointSaved, Warned]
    assert f"no checkpoint: cannot write {run.output}/checkpoints" in said[0]
    run.assert_continues_after(15)


class Clock:
    """The time, which passes when a step file is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost_s: float) -> None:
        self.now_s, self.written = 1000.0, []
        write = StepFile.write

        def slow_write(file: StepFile, state: Any, position: Any) -> None:
            write(file, state, position)
            self.now_s += cost_s
            self.written.append(position.total_steps)

        monkeypatch.setattr(StepFile, "write", slow_write)
        monkeypatch.setattr(checkpointer, "time", SimpleNamespace(monotonic=lambda: self.now_s))


@pytest.mark.parametrize(("has_others", "written"), [(True, [1, 2, 3, 4]), (False, [1, 4])])
def test_rank_alone_writes_its_step_file_for_a_hundredth_of_the_time_at_most(
    run: Run, monkeypatch: pytest.MonkeyPatch, written: list[int], *, has_others: bool
) -> None:
    clock = Clock(monkeypatch, cost_s=1.0)
    checkpointer, _ = run.start()
    for number in (1, 2, 3, 4):
        checkpointer.after_step(replace(POSITION, step=0, total_steps=number), has_others=has_others)
        clock.now_s += 40.0
    assert clock.written == written


def test_interval_of_checkpoints_begins_again_with_each(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, cost_s=0.0)
    run.spec = replace(run.spec, checkpoint_interval_s=100.0, num_checkpoints=9)
    checkpointer, _ = run.start()
    for number in range(10, 19):
        checkpointer.checkpoint_if_due(replace(POSITION, total_steps=number))
        clock.now_s += 60.0
    kept = [number for number in range(10, 19) if run.checkpoint(number).exists()]
    assert kept == [12, 14, 16, 18]


def test_run_without_checkpoints_keeps_none(run: Run) -> None:
    run.spec = replace(run.spec, num_checkpoints=0)
    run.train([10, 11], checkpoints=(10, 11))
    run.start()[0].save_last_good()
    assert not list(run.output.iterdir())
    run.assert_continues_after(11)


def test_step_file_that_others_could_have_written_is_not_used(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.train([10, 20], checkpoints=(10,))
    (run.memory / "step").chmod(0o666)
    run.assert_continues_after(10)
    assert "the step file is not used" in capfd.readouterr().out
