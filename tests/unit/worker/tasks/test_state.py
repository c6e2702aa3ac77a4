"""The state of a training, saved and restored, also after its writer died while writing."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.schedule import OwnSamples, begin_epoch
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.tasks.position import CallbackState, EpochTotals, Position, pack, unpack
from csdctl.worker.tasks.state_files import Checkpoints, StepFile

SEGMENT = begin_epoch([OwnSamples(5, 95), OwnSamples(20, 80)], {0: 10, 1: 7})
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
    assert unpack(pack(variables(7), POSITION), into) == POSITION
    assert all(np.array_equal(one.value, its.value) for one, its in zip(into, variables(7), strict=True))
    assert [np.asarray(one.value).dtype for one in into] == [np.float32, np.int64, np.float32]


def test_state_of_another_model_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"expected \d+ for this model"):
        unpack(pack(variables(), POSITION), variables()[:2])


def test_step_file_returns_the_latest_state(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "state", variables())
    for step in range(1, 6):
        file.write(variables(step), replace(POSITION, total_steps=step))
    packed = StepFile.read(tmp_path / "state")
    assert packed is not None
    into = variables()
    assert unpack(packed, into).total_steps == 5
    assert into[1].value == 5


def test_missing_or_empty_step_file_has_no_state(tmp_path: Path) -> None:
    assert StepFile.read(tmp_path / "none") is None
    StepFile(tmp_path / "new", variables())
    assert StepFile.read(tmp_path / "new") is None


WRITER = """
import sys
from pathlib import Path
from dataclasses import replace
from tests.unit.worker.tasks.test_state import POSITION, StepFile, variables
file = StepFile(Path(sys.argv[1]), variables())
step = 0
while True:
    step += 1
    file.write(variables(step), replace(POSITION, total_steps=step))
    if step == 50:
        print("writing", flush=True)
"""


def test_writer_killed_at_any_moment_leaves_a_complete_state(tmp_path: Path) -> None:
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "state")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        assert process.stdout
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        packed = StepFile.read(tmp_path / "state")
        assert packed is not None
        into = variables()
        step = unpack(packed, into).total_steps
        assert step >= 49
        assert all((np.asarray(one.value) == step).all() for one in into)


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
        state = checkpoints.newest()
        assert state is not None
        assert unpack(state, variables()).total_steps == 10

    @pytest.mark.fault(52)
    def test_half_written_checkpoint_is_ignored(self, tmp_path: Path) -> None:
        checkpoints = self.save(tmp_path, [10])
        (tmp_path / ".part-step-00000020.npz").write_bytes(b"half")
        state = checkpoints.newest()
        assert state is not None
        assert unpack(state, variables()).total_steps == 10

    def test_without_checkpoints_there_is_no_state(self, tmp_path: Path) -> None:
        assert Checkpoints(tmp_path / "none").newest() is None
