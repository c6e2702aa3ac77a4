"""`data.augment` and the imports of a job's own code, over SSH and MPI on an emulated host and two nodes."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulated.running import csdctl

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

JOB = """\
model: model.py:build
code: [turning.py]
data:
  public: {path: public}
  private: {path: ~/private}
  augment: augment.py:flip
recipe: {epochs: 2, learning_rate: 0.02, seed: 3}
"""
MODEL = """\
import keras


def build():
    layers = [keras.Input((32, 32, 3)), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
"""
AUGMENT = """\
import turning


def flip(samples, labels, rng):
    return turning.turn(samples, rng), labels


def fail_on_a_node(samples, labels, rng):
    import os
    if "CSDCTL_EMULATED_NODE" in os.environ:
        raise ValueError(f"secret {samples}")
    return samples, labels


def mix(samples, labels, rng):
    return (samples + samples[::-1]) / 2, labels
"""
TURNING = """\
def turn(samples, rng):
    turned = rng.random(len(samples)) < 0.5
    samples[turned] = samples[turned, :, ::-1]
    return samples
"""
ALONE = ("--exclude", "csd1")
"""Where a second node proves nothing more."""
TRAIN = ("train", "--batch-size", "8", "--skip-doctor", "--no-rebalance", "--collective", "star", "--json")


def save_samples(directory: Path, count: int) -> None:
    generator = np.random.default_rng(count)
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "images.npy", generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
    np.save(directory / "labels.npy", (np.arange(count) % 3).astype(np.int32))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("augment")
    assert csdctl(directory, "emulate", "up", "--nodes", "2", "--cpu", "1").returncode == 0
    files = {"job.yaml": JOB, "model.py": MODEL, "augment.py": AUGMENT, "turning.py": TURNING}
    for name, text in files.items():
        (directory / name).write_text(text)
    save_samples(directory / "public", 40)
    for number, node in enumerate(("csd0", "csd1")):
        save_samples(directory / ".csdctl/emulated/nodes" / node / "home/private", 12 + number)
    yield directory
    csdctl(directory, "emulate", "down")


def write_job(project: Path, name: str, **changes: str) -> str:
    """Write a copy of job.yaml with another function, or other lines; return its name."""
    text = (project / "job.yaml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (project / name).write_text(text)
    return name


def train(project: Path) -> tuple[list[float], dict[str, Any]]:
    """Return the loss of each epoch, and the report at the end."""
    done = csdctl(project, *TRAIN, *ALONE)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ends = [line for line in lines if line.get("event") == "EpochEnd" and line["rank"] == 0]
    return [end["loss"] for end in ends], lines[-1]


def test_function_is_tried_once_and_sent_without_the_model(project: Path) -> None:
    done = csdctl(project, "prepare")
    assert done.returncode == 0, done.stderr
    assert "code for the nodes: augment.py, turning.py (2 files, " in done.stdout
    assert "augment.py:flip, tried on 8 public samples" in done.stdout
    assert "tried on" not in csdctl(project, "prepare").stdout


def test_run_repeats_its_augmentation(project: Path) -> None:
    runs = [train(project) for _ in range(2)]
    assert all(report["identical_weights"] for _, report in runs)
    assert all(report["samples"] == 2 * (40 + 12) for _, report in runs)
    losses = [loss for loss, _ in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_verify_includes_the_augmentation_of_every_rank(project: Path) -> None:
    done = csdctl(project, "verify", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_equal"]
    assert all(rank["difference"] <= 8 * rank["spread"] for rank in found["ranks"].values())
    assert found["not_one_batch"] == ["augmentation by augment.py:flip"]


def test_function_that_returns_other_samples_is_refused_in_prepare(project: Path) -> None:
    done = csdctl(project, "prepare", write_job(project, "mix.yaml", **{"py:flip": "py:mix"}))
    assert done.returncode == 2, done.stderr
    assert "augment.py:mix returned samples of type float64, expected uint8" in done.stderr
    assert "Traceback" not in done.stderr


def test_failure_on_a_node_is_named_and_its_message_stays_there(project: Path) -> None:
    job = write_job(project, "fails.yaml", **{"py:flip": "py:fail_on_a_node"})
    done = csdctl(project, *TRAIN, job, *ALONE)
    assert done.returncode == 2, done.stderr
    assert re.search(r"csd0: augment.py:fail_on_a_node fails: ValueError", done.stderr)
    assert "secret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def on_host_alone(project: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of csdctl in which the host's Python alone finds the module `rare_module`."""
    (tmp_path / "rare_module.py").write_text("")
    before = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{before}" if before else str(tmp_path)}


def test_module_that_nodes_lack_is_named_before_anything_is_sent(
    project: Path, on_host_alone: dict[str, str]
) -> None:
    (project / "rare.py").write_text("def flip(*all):\n    import rare_module\n    return all[:2]\n")
    job = write_job(project, "rare.yaml", **{"augment.py:flip": "rare.py:flip"})
    for arguments in (("prepare", job), (*TRAIN, job), ("deploy", job)):
        done = csdctl(project, *arguments, environment=on_host_alone)
        assert done.returncode in (1, 2), done.stderr
        shown = done.stdout + done.stderr
        for node in ("csd0", "csd1"):
            assert re.search(
                rf"({node}\b[^:\n]*|csd\[0-1\]): has no rare_module, which rare.py imports", shown
            )
        assert "-m pip install rare_module" in shown
        assert "Traceback" not in done.stderr
    done = csdctl(project, "prepare", job)
    assert done.returncode == 2
    assert "host: has no rare_module, which rare.py imports" in done.stderr


def test_doctor_names_the_machines_that_lack_a_module(project: Path, on_host_alone: dict[str, str]) -> None:
    (project / "rare.py").write_text("import rare_module\n\ndef flip(*all):\n    return all[:2]\n")
    job = write_job(project, "rare.yaml", **{"augment.py:flip": "rare.py:flip"})
    done = csdctl(project, "doctor", "--job", job, "--json", environment=on_host_alone)
    assert done.returncode == 1, done.stderr
    checks = {
        check["machine"]: check for check in json.loads(done.stdout)["checks"] if check["check"] == "imports"
    }
    assert {name: check["status"] for name, check in checks.items()} == {
        "host": "ok",
        "csd0": "fail",
        "csd1": "fail",
    }
    assert checks["csd0"]["found"] == "has no rare_module, which rare.py imports"
    assert "-m pip install rare_module" in checks["csd0"]["remedy"]
    # job.yaml is read without being named; its own modules are sent.
    document = json.loads(csdctl(project, "doctor", "--json").stdout)
    assert {check["status"] for check in document["checks"] if check["check"] == "imports"} == {"ok"}
