"""The state of a training, saved and restored, also after its writer died while writing."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.schedule import OwnSamples, Span, begin_epoch
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.tasks import checkpointer
from csdctl.worker.tasks.checkpointer import Checkpoints, StepFile
from csdctl.worker.tasks.progress import (
    CallbackState,
    EpochTotals,
    Position,
    hash_state,
    max_state_bytes,
    pack,
    unpack,
)
from tests.unit.worker.process.test_files import note_calls

OWN = [OwnSamples(5, 95), OwnSamples(20, 80)]
SEGMENT = begin_epoch(OWN, {0: 10, 1: 7})
POSITION = Position(
    2, 3, 45, SEGMENT, {"0": 10, "1": 7}, EpochTotals(3, 51, 4.5, (0.5,)), CallbackState(1.5, 1)
)


@dataclass
class Variable:
    """A variable as the state uses it."""

    value: Any

    def assign(self, value: Any) -> None:
        self.value = value


def variables(fill: float = 0.0) -> list[Any]:
    return [
        Variable(np.full((3, 4), fill, np.float32)),
        Variable(np.int64(fill)),
        Variable(np.full(5000, fill, np.float32)),
    ]


def test_state_is_restored_bit_by_bit() -> None:
    into = variables()
    assert unpack(pack(variables(7), POSITION), into, OWN) == POSITION
    assert all(np.array_equal(one.value, its.value) for one, its in zip(into, variables(7), strict=True))
    assert [np.asarray(one.value).dtype for one in into] == [np.float32, np.int64, np.float32]


def test_state_of_another_model_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"expected \d+ for this model"):
        unpack(pack(variables(), POSITION), variables()[:2], OWN)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([np.zeros((4, 3), np.float32), np.int64(0)], id="other shape"),
        pytest.param([np.zeros((3, 4), np.int32), np.int64(0)], id="other type"),
    ],
)
def test_state_of_the_same_size_and_another_form_is_refused(others: list[Any]) -> None:
    packed = pack(variables()[:2], POSITION)
    into = [Variable(array) for array in others]
    with pytest.raises(WorkerError, match="shapes and types"):
        unpack(packed, into, OWN)


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
def test_impossible_position_is_refused_before_any_variable_changes(name: str) -> None:
    into = variables()
    with pytest.raises(WorkerError, match="saved state cannot be read"):
        unpack(pack(variables(7), IMPOSSIBLE[name]), into, OWN)
    assert all((np.asarray(one.value) == 0).all() for one in into)


def test_hash_of_a_state_depends_on_variables_and_position() -> None:
    positions = [replace(POSITION, total_steps=steps) for steps in (8, 9)]
    hashes = {hash_state(variables(fill), position) for fill in (1, 2) for position in positions}
    assert len(hashes) == 4
    assert hash_state(variables(1), POSITION) == hash_state(variables(1), POSITION)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def write_steps(path: Path, *steps: int) -> StepFile:
    """Write a state after each step, full of the number of the step."""
    file = StepFile(path, variables())
    file.read()
    for step in steps:
        file.write(variables(step), replace(POSITION, total_steps=step))
    return file


def step_of(packed: Array | None) -> int:
    """Return the steps of a state, which is full of this number."""
    assert packed is not None
    into = variables()
    steps = unpack(packed, into, OWN).total_steps
    assert all((np.asarray(one.value) == steps).all() for one in into)
    return steps


def read_step(path: Path) -> int:
    return step_of(StepFile(path, variables()).read())


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

    def write_half(variables: Any, position: Position, out: Array) -> Array:
        out[: len(out) // 2] = 7
        raise InterruptedError

    for steps in ((45, 46), (47,)):
        write_steps(path, *steps)
        started_again = write_steps(path)
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer, "pack", write_half)
            with pytest.raises(InterruptedError):
                started_again.write(variables(), POSITION)
        assert read_step(path) == steps[-1]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("place", [12, 17, StepFile._MARK.size + 60])
def test_half_of_a_step_file_that_is_damaged_is_left_out(path: Path, half: int, place: int) -> None:
    """In its mark, size or checksum; or in what the checksum covers."""
    write_steps(path, 45, 46)
    content = bytearray(path.read_bytes())
    content[half * (len(content) // 2) + place] ^= 0x80
    path.write_bytes(content)
    assert read_step(path) == (46 if half == 0 else 45)


WRITER = """
import sys
from pathlib import Path
from tests.unit.worker.tasks.test_state import write_steps
write_steps(Path(sys.argv[1]), *range(45, 95))
print("writing", flush=True)
write_steps(Path(sys.argv[1]), *range(95, 1_000_000))
"""


def test_writer_killed_at_any_moment_leaves_a_complete_state(path: Path) -> None:
    for _ in range(5):
        path.unlink(missing_ok=True)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        ) as process:
            assert process.stdout
            assert process.stdout.readline() == b"writing\n"
            process.kill()
        assert read_step(path) >= 94


def load_newest(checkpoints: Checkpoints) -> Array | None:
    return next(checkpoints.newest_first(max_state_bytes(variables())), None)


class TestCheckpoints:
    def save(self, directory: Path, steps: list[int], best: int = 0) -> Checkpoints:
        checkpoints = Checkpoints(directory, num_kept=2)
        for step in steps:
            position = replace(POSITION, total_steps=step)
            checkpoints.save(pack(variables(step), position), position, is_best=step == best)
        return checkpoints

    def test_newest_checkpoints_and_the_best_are_kept(self, tmp_path: Path) -> None:
        self.save(tmp_path, [10, 20, 30, 40, 50], best=20)
        kept = sorted(path.name for path in tmp_path.glob("*.npz"))
        assert kept == ["step-00000020.npz", "step-00000040.npz", "step-00000050.npz"]

    def test_checkpoint_is_on_the_disk_before_it_has_its_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also on a disk that orders nothing: the file is synced, renamed, then the directory is synced."""
        calls = note_calls(monkeypatch)
        self.save(tmp_path, [10])
        assert calls == [
            ("fsync", ".step-00000010.npz.new"),
            ("replace", "step-00000010.npz"),
            ("fsync", tmp_path.name),
        ]
        assert os.listdir(tmp_path) == ["step-00000010.npz"]

    @pytest.mark.fault(53)
    @pytest.mark.parametrize("damage", ["cut", "empty", "wrong byte", "text"])
    def test_damaged_checkpoint_is_skipped_for_the_one_before(self, tmp_path: Path, damage: str) -> None:
        checkpoints = self.save(tmp_path, [10, 20])
        newest = tmp_path / "step-00000020.npz"
        content = newest.read_bytes()
        middle = len(content) // 2
        newest.write_bytes(
            {
                "cut": content[:middle],
                "empty": b"",
                "wrong byte": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                "text": b"not a checkpoint",
            }[damage]
        )
        assert step_of(load_newest(checkpoints)) == 10

    @pytest.mark.fault(52)
    def test_half_written_checkpoint_is_ignored(self, tmp_path: Path) -> None:
        checkpoints = self.save(tmp_path, [10])
        (tmp_path / ".part-step-00000020.npz").write_bytes(b"half")
        assert step_of(load_newest(checkpoints)) == 10

    def test_without_checkpoints_there_is_no_state(self, tmp_path: Path) -> None:
        assert load_newest(Checkpoints(tmp_path / "none")) is None
        assert not Checkpoints(tmp_path / "none").exist()
