"""What a rank computes on, where TensorFlow sees no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csdctl.worker.protocol.events import Failed, event_from_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime


def run(program: str, *arguments: str, **environment: str) -> Any:
    """Return what a program prints as JSON, or else its error."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr


LOADED = """
import json, os, sys
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.protocol.run_spec import Runtime
tf, _ = load_backend(Runtime(device=sys.argv[1]))
print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), float(tf.reduce_sum(tf.ones(3)))]))
"""


@pytest.mark.parametrize(("device", "visible"), [("cpu", "-1"), ("auto", "7")])
def test_cpu_hides_all_gpus_and_auto_leaves_the_choice_to_the_machine(device: str, visible: str) -> None:
    assert run(LOADED, device, CUDA_VISIBLE_DEVICES="7") == [visible, 3.0]


def test_rank_that_must_have_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    rank = RankSpec(0, "csd0", 4, Runtime(device="gpu"), None, None, 0, 0)
    spec = RunSpec("a-run", "a", "w", Recipe(), (rank,), None, None, str(tmp_path))
    (tmp_path / "spec.json").write_text(to_json(spec))
    command = [sys.executable, "-m", "csdctl.worker", "rank", "--spec", "spec.json", "--rank", "0"]
    orders, held_open = os.pipe()  # a rank whose orders end leaves at once
    done = subprocess.run(command, cwd=tmp_path, stdin=orders, stdout=subprocess.PIPE, text=True, check=False)
    os.close(orders)
    os.close(held_open)
    events = [event for line in done.stdout.splitlines() if (event := event_from_line(line))]
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (failed.node, failed.exit_code, done.returncode) == ("csd0", 1, 1)
    assert "CUDA, sees no GPU; the fleet file has `device: gpu`" in failed.message
    assert "nvidia-smi" in failed.remedy
    assert "tensorflow[and-cuda]" in failed.remedy


SETTINGS = {"floatx": "float64", "epsilon": 0.01, "image_data_format": "channels_first"}
KERAS = """
import json, sys
from pathlib import Path
from csdctl.worker.compute.backend import keras_settings, load_backend, load_settings
load_backend()
defaults = keras_settings()
load_settings(Path(sys.argv[1]))
print(json.dumps([defaults, keras_settings(), sys.modules["keras.src.backend.config"].keras_home()]))
"""


def test_rank_ignores_keras_json_and_the_host_reads_it(tmp_path: Path) -> None:
    home, job = tmp_path / "home", tmp_path / "job"
    (home / ".keras").mkdir(parents=True)
    job.mkdir()
    (home / ".keras" / "keras.json").write_text(json.dumps(SETTINGS | {"backend": "torch"}))
    before = (home / ".keras" / "keras.json").read_bytes()
    defaults, of_host, place = run(KERAS, str(job), HOME=str(home))
    assert defaults == {"floatx": "float32", "epsilon": 1e-7, "image_data_format": "channels_last"}
    assert (of_host, place) == (SETTINGS, str(home / ".keras"))
    (job / "keras.json").write_text(json.dumps({"epsilon": 0.5}))
    assert run(KERAS, str(job), HOME=str(home))[1] == defaults | {"epsilon": 0.5}
    assert (home / ".keras" / "keras.json").read_bytes() == before


@pytest.mark.parametrize("content", ['{"floatx": "float12"}', '{"epsilon": "x"}', "[]", "{"])
def test_damaged_keras_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "keras.json").write_text(content)
    assert f"{tmp_path}/keras.json cannot be used" in run(KERAS, str(tmp_path))
