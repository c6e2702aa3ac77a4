"""The Python interface in a user's script, on an emulated fleet: own layer, own data, the run's results."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated.running import csdctl

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(420)]
PROGRAM = Path(__file__).parent / "api_program.py"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A job directory beside the fleet that the script uses."""
    done = csdctl(tmp_path, "emulate", "up", "--nodes", "1", "--cpu", "1")
    assert done.returncode == 0, done.stderr
    yield tmp_path
    csdctl(tmp_path, "emulate", "down")


def test_script_trains_a_model_with_an_own_layer_and_reads_its_results(directory: Path) -> None:
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, PROGRAM, directory], capture_output=True, text=True, env=quiet, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "code for the nodes: own_layers.py" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert (result["state"], result["nodes"]) == ("done", ["host", "csd0"])
    history = result["history"]
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert [len(values) for values in history.values()] == [3] * 4
    assert history["loss"][-1] < history["loss"][0]
    # Keras' own evaluation of the saved model is what the run has reported.
    assert result["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-4)
    assert result["accuracy"] == pytest.approx(history["val_accuracy"][-1])
