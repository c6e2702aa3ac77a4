"""`csdctl train` on an emulated fleet, over SSH and MPI, while the worker of one node is not csdctl's."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from csdctl.runs.capped_log import MAX_LOG_BYTES
from tests.emulated.running import csdctl
from tests.emulated.training import events_of, nothing_is_left

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

JOB = """\
model: model.py:build
data:
  public: {path: public.npz}
recipe: {epochs: 1000, learning_rate: 0.01, loss: mean_squared_error}
"""
MODEL = """\
import keras


def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
"""
WRAPPER = """\
#!/bin/sh
for word; do
    if [ "$word" = rank ]; then exec {python} {worker} {attack} {python} "$@"; fi
done
exec {python} "$@"
"""
HOSTILE = "csd1"
BLAMING = "@csdctl " + json.dumps({"event": "Failed", "rank": 2, "node": "csd0", "message": "disk full"})
BOMB = "@csdctl " + "[" * 100_000


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fleet of two nodes; the Python of csd1 starts a hostile worker in place of a rank."""
    project = tmp_path_factory.mktemp("hostile")
    (project / "job.yaml").write_text(JOB)
    (project / "model.py").write_text(MODEL)
    samples = np.random.default_rng(0).random((6000, 2), np.float32)
    np.savez(project / "public.npz", x=samples, y=samples[:, :1])
    up = csdctl(project, "emulate", "up", "--nodes", "2", "--cpu", "1")
    assert up.returncode == 0, up.stderr
    fleet = yaml.safe_load((project / "fleet.yaml").read_text())
    wrapper = project / "python"
    worker, attack = Path(__file__).with_name("hostile_worker.py"), project / "attack.json"
    wrapper.write_text(WRAPPER.format(python=sys.executable, worker=worker, attack=attack))
    wrapper.chmod(0o755)
    for node in fleet["nodes"]:
        if node["name"] == HOSTILE:
            node["python"] = str(wrapper)
    (project / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    done = csdctl(project, "discover")
    yield project
    csdctl(project, "emulate", "down")
    assert done.returncode == 0, done.stderr


def train(project: Path, after: int, *lines: tuple[str, int], max_steps: int) -> tuple[int, str, Path]:
    """Return the exit code, what was printed, and the run."""
    (project / "attack.json").write_text(json.dumps({"after": after, "lines": lines}))
    options = ("--batch-size", "20", "--max-steps", str(max_steps), "--skip-doctor", "--collective", "star")
    done = csdctl(project, "train", *options)
    run = max((project / ".csdctl/runs").iterdir())
    return done.returncode, done.stdout + done.stderr, run


@pytest.mark.thorough
@pytest.mark.parametrize(
    "line", [pytest.param(BLAMING, id="blames another node"), pytest.param(BOMB, id="depth bomb")]
)
def test_invalid_event_before_training_ends_the_run_and_names_the_node(project: Path, line: str) -> None:
    code, shown, run = train(project, 0, (line, 1), max_steps=10)
    assert code == 1, shown
    assert "error: csd1: sent an invalid event: " in shown
    assert "bug" not in shown
    assert "Traceback" not in shown
    assert nothing_is_left(project, run)


@pytest.mark.attack(9)
@pytest.mark.attack(12)
def test_node_that_floods_its_log_and_blames_another_is_lost_alone(project: Path) -> None:
    code, shown, run = train(project, 1, ("x" * 1000, 18_000), (BLAMING, 1), max_steps=2000)
    assert code == 0, shown
    assert {event["node"] for event in events_of(run, "NodeLost")} == {HOSTILE}
    why = events_of(run, "NodeLost")[0]["message"]
    assert "Failed: expected rank 2 on csd1, received rank 2 on 'csd0'" in why
    assert not events_of(run, "Failed")
    log = (run / "logs" / "rank-2.log").read_bytes()
    assert log.count("… further output of csd1 is dropped after 16 MiB\n".encode()) == 1
    assert len(log) < MAX_LOG_BYTES + 200
    report = csdctl(project, "report", "--json")
    assert report.returncode == 0, report.stderr
    document = json.loads(report.stdout)
    assert (document["state"], document["num_unreadable"]) == ("done", 0)
    assert document["lost_nodes"] == [HOSTILE]
    assert nothing_is_left(project, run)
