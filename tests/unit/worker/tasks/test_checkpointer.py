"""What rank 0 goes on from when its process, csdctl or the machine has ended, without TensorFlow."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from csdctl.worker.tasks import checkpointer as module
from csdctl.worker.tasks.checkpointer import (
    KEPT_STEP_FILE,
    LAST_MODEL,
    Checkpointer,
    Checkpoints,
    StepFile,
)
from csdctl.worker.tasks.progress import Reporter, pack
from tests.unit.worker.tasks.test_state import OWN, POSITION, variables

ME = RankSpec(0, "host", 10, Runtime(), None, None, 0, 100)


class StateStep:
    """Stands in for a step: what the checkpointer needs of it is the state and a model that can be saved."""

    def __init__(self) -> None:
        self.state = variables()
        self.model = self

    @property
    def fill(self) -> int:
        """The number that the state is full of."""
        assert all((np.asarray(one.value) == self.state[1].value).all() for one in self.state)
        return int(self.state[1].value)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        yield

    def save(self, path: Path) -> None:
        path.write_text(str(self.fill))


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
        """Start rank 0 anew; return its checkpointer and its step."""
        step: Any = StateStep()
        return Checkpointer(self.spec, Reporter(ME), step, OWN), step

    def train(self, steps: list[int], *, checkpoints: tuple[int, ...] = ()) -> None:
        """Save the state after `steps` to the step file, after those in `checkpoints` also to disk."""
        checkpointer, step = self.start()
        for number in steps:
            step.state = variables(number)
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
    Checkpoints(run.output / "checkpoints").save(pack(variables(20), later), later)
    run.assert_continues_after(20)


def test_state_is_kept_in_memory_after_every_step(run: Run) -> None:
    checkpointer, step = run.start()
    for number in (11, 12, 13):
        step.state = variables(number)
        checkpointer.after_step(replace(POSITION, total_steps=number), has_others=True)
        run.assert_continues_after(number)
        assert not run.checkpoint(number).exists()


def test_run_of_a_rebooted_host_continues_from_the_newest_checkpoint_or_not_at_all(run: Run) -> None:
    run.train([10, 20, 25], checkpoints=(10, 20))
    run.reboot()
    run.assert_continues_after(20)
    any_step: Any = StateStep()
    with pytest.raises(WorkerError, match="no checkpoint of this run can be used: .*cannot be read"):
        Checkpointer(run.spec, Reporter(ME), any_step, OWN[:1])
    for number in (10, 20):
        run.checkpoint(number).write_bytes(b"damaged")
    with pytest.raises(WorkerError, match="no checkpoint of this run can be used: they are damaged"):
        run.start()


def test_last_good_model_is_that_of_the_newest_checkpoint_if_there_is_one(run: Run) -> None:
    checkpointer, step = run.start()
    checkpointer.save_last_good()
    assert not list(run.output.iterdir())
    for number in (10, 20):
        step.state = variables(number)
        checkpointer.checkpoint(replace(POSITION, total_steps=number))
    step.state = variables(30)
    checkpointer.save_last_good()
    assert (run.output / LAST_MODEL).read_text() == "20"


def test_model_is_saved_with_the_averaged_weights(run: Run) -> None:
    """For the time of saving only: training goes on with its own."""
    checkpointer, step = run.start()

    @contextlib.contextmanager
    def averaged_weights() -> Iterator[None]:
        trained, step.state = step.state, variables(77)
        yield
        step.state = trained

    step.averaged_weights = averaged_weights
    assert Path(checkpointer.save_model(LAST_MODEL)).read_text() == "77"
    assert step.fill == 0
    assert [path.name for path in run.output.iterdir()] == [LAST_MODEL]


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
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))


@pytest.mark.parametrize(("has_others", "written"), [(True, [1, 2, 3, 4]), (False, [1, 4])])
def test_rank_alone_writes_its_step_file_for_a_hundredth_of_the_time_at_most(
    run: Run, monkeypatch: pytest.MonkeyPatch, written: list[int], *, has_others: bool
) -> None:
    clock = Clock(monkeypatch, cost_s=1.0)
    found, _ = run.start()
    for number in (1, 2, 3, 4):
        found.after_step(replace(POSITION, step=0, total_steps=number), has_others=has_others)
        clock.now_s += 40.0
    assert clock.written == written


def test_interval_of_checkpoints_begins_again_with_each(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, cost_s=0.0)
    run.spec = replace(run.spec, checkpoint_interval_s=100.0, num_checkpoints=9)
    found, _ = run.start()
    for number in range(10, 19):
        found.after_step(replace(POSITION, total_steps=number), has_others=True)
        clock.now_s += 60.0
    kept = [number for number in range(10, 19) if run.checkpoint(number).exists()]
    assert kept == [12, 14, 16, 18]


def test_run_without_checkpoints_keeps_none(run: Run) -> None:
    run.spec = replace(run.spec, num_checkpoints=0)
    run.train([10, 11], checkpoints=(10, 11))
    assert not list(run.output.iterdir())
    run.assert_continues_after(11)


def test_step_file_that_others_could_have_written_is_not_used(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.train([10, 20], checkpoints=(10,))
    (run.memory / "step").chmod(0o666)
    run.assert_continues_after(10)
    assert "the step file is not used" in capfd.readouterr().out
