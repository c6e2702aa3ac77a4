"""A rank that reads private data and fails: only events leave the machine, without samples in them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.protocol.events import Failed, event_from_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from tests.unit.worker.compute.built_models import carry, keras
from tests.unit.worker.ingest.prepared_data import slice_of

CANARY = 987_654
"""A label that no output of the model is for: TensorFlow names the labels of such a batch."""


def run_rank(tmp_path: Path, *, is_private: bool) -> tuple[Failed, str]:
    """Run a rank whose labels its model has no output for. Return its failure, and all that it printed."""
    layers = [keras().Input((4,)), keras().layers.Dense(3, activation="softmax")]
    files = carry(keras().Sequential(layers), tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((8, 4), np.float32))
    np.save(tmp_path / "labels.npy", np.full(8, CANARY, np.int32))
    part = slice_of(tmp_path)
    data = (part, None, 8, 0) if is_private else (None, part, 0, 8)
    rank = RankSpec(0, "csd0", 4, Runtime(1), *data)
    spec = RunSpec("a-run", *files, Recipe(), (rank,), None, None, str(tmp_path))
    (tmp_path / "spec.json").write_text(to_json(spec))
    orders, held_open = os.pipe()  # a rank whose orders end leaves at once
    done = subprocess.run(
        [sys.executable, "-m", "csdctl.worker", "rank", "--spec", "spec.json", "--rank", "0"],
        cwd=tmp_path,
        stdin=orders,
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(orders)
    os.close(held_open)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    events = [event for line in done.stdout.splitlines() if (event := event_from_line(line))]
    return next(event for event in events if isinstance(event, Failed)), output


@pytest.mark.first(1)
@pytest.mark.parametrize("is_private", [True, False])
def test_only_the_type_of_an_unforeseen_error_leaves_a_rank_with_private_data(
    tmp_path: Path, *, is_private: bool
) -> None:
    failed, output = run_rank(tmp_path, is_private=is_private)
    log = tmp_path / ".csdctl/logs/a-run-rank-0.log"
    if not is_private:
        assert str(CANARY) in output  # otherwise this test would show nothing
        assert not log.exists()
        return
    assert str(CANARY) not in output
    assert failed.message.startswith("TensorFlowError; its message")
    assert failed.remedy == "see .csdctl/logs/a-run-rank-0.log on that node"
    assert str(CANARY) in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


def test_rank_whose_log_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / ".csdctl").mkdir()
    (tmp_path / ".csdctl" / "logs").touch()
    failed, output = run_rank(tmp_path, is_private=True)
    assert (failed.message, failed.remedy) == (
        "cannot access .csdctl/logs: file exists",
        "move away what is in its place",
    )
    assert str(CANARY) not in output
