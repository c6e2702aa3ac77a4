"""Models with several inputs or user metrics, trained on an emulated host and node."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from csdctl.job.model import load_job
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from tests.emulated.running import csdctl

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES = 96
JOB = """\
model: model.py:build
data:
  public: {path: public.npz}
  private: {path: ~/private.npz}
  validation: {path: validation.npz}
recipe:
  epochs: 2
  learning_rate: 0.05
  loss: mean_squared_error
  metrics: [mean_absolute_error, "model.py:far_off"]
"""
MODEL = """\
import keras
from keras import layers, ops


def build():
    picture = keras.Input((6, 6, 1), name="picture")
    weather = keras.Input((3,), name="weather")
    both = layers.Concatenate()([layers.Flatten()(picture), weather])
    return keras.Model([picture, weather], layers.Dense(1)(layers.Dense(8, activation="relu")(both)))


def build_random():
    picture = keras.Input((6, 6, 1), name="picture")
    weather = keras.Input((3,), name="weather")
    turned = layers.RandomRotation(0.2)(picture)
    both = layers.Concatenate()([layers.Flatten()(turned), weather])
    hidden = layers.Dense(8, activation="relu", dtype="mixed_bfloat16")(both)
    dropped = layers.Dropout(0.5, dtype="mixed_bfloat16", name="drops")(hidden)
    return keras.Model([picture, weather], layers.Dense(1, dtype="float32")(dropped))


def far_off(labels, predictions):
    return ops.cast(ops.abs(labels - predictions) > 0.25, "float32")
"""


def write(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    picture = generator.integers(0, 256, (NUM_SAMPLES, 6, 6, 1), np.uint8)
    weather = generator.random((NUM_SAMPLES, 3), np.float32)
    labels = picture.mean((1, 2, 3)) / 255 + weather.sum(1)
    np.savez(path, picture=picture, weather=weather, y=labels.astype(np.float32)[:, np.newaxis])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("models")
    assert csdctl(directory, "emulate", "up", "--nodes", "1", "--cpu", "1").returncode == 0
    (directory / "job.yaml").write_text(JOB)
    (directory / "model.py").write_text(MODEL)
    home = directory / ".csdctl" / "emulated" / "nodes" / "csd0" / "home"
    for number, path in enumerate((directory / "public", directory / "validation", home / "private")):
        write(path.with_suffix(".npz"), number)
    yield directory
    csdctl(directory, "emulate", "down")


def test_model_with_two_inputs_trains_and_own_metric_is_evaluated(project: Path) -> None:
    done = csdctl(project, "train", "--batch-size", "8", "--skip-doctor", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["state"] == "done"
    assert lines[-1]["samples"] == 2 * 2 * NUM_SAMPLES
    ends = [line for line in lines if line.get("event") == "EpochEnd" and line["rank"] == 0]
    assert set(ends[-1]["metrics"]) == {"mean_absolute_error", "far_off"}
    found = ends[-1]["validation_metrics"]
    assert set(found) == {"mean_absolute_error", "far_off"}
    assert 0 <= found["far_off"] <= 1
    # The saved model gives the same values in a separate process.
    program = (
        "import sys, keras, numpy as np\n"
        "model = keras.models.load_model(sys.argv[1], compile=False)\n"
        "data = np.load('validation.npz')\n"
        "found = model.predict([data['picture'] / np.float32(255), data['weather']], verbose=0)\n"
        "print(float(np.abs(found - data['y']).mean()), float((np.abs(found - data['y']) > 0.25).mean()))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, f"{lines[-1]['path']}/model.keras"],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    mean_error, far_off = map(float, output.stdout.split()[-2:])
    assert mean_error == pytest.approx(found["mean_absolute_error"], rel=1e-4)
    assert far_off == pytest.approx(found["far_off"])


def test_run_that_is_complete_is_not_started_again(project: Path) -> None:
    done = csdctl(project, "train", "--resume", "latest", "--skip-doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert "is complete: nothing to resume" in done.stderr
    assert json.loads(done.stdout)["state"] == "done"


def test_verify_compares_random_layers_in_16_bits_with_the_random_states_of_every_rank(project: Path) -> None:
    (project / "random.yaml").write_text(JOB.replace(":build", ":build_random"))
    done = csdctl(project, "verify", "random.yaml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["dtype"], found["compared_in"]) == ("bfloat16", "float32")
    assert found["is_equal"]
    assert found["ranks"]["csd0"]["difference"] <= 8 * found["ranks"]["csd0"]["spread"]
    assert found["one_batch"] is None
    assert len(found["not_one_batch"]) == 1
    assert found["not_one_batch"][0].startswith("random numbers in ")
    assert "drops" in found["not_one_batch"][0]
    assert "random_rotation" in found["not_one_batch"][0]


@pytest.mark.thorough
def test_verify_compares_a_model_with_two_inputs(project: Path) -> None:
    """The other model has the same inputs."""
    done = csdctl(project, "verify", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["by_parts"] <= 1e-5


def test_verify_refuses_a_plan_with_one_rank(project: Path) -> None:
    job = load_job(project / "job.yaml")
    ranks = [RankPlan(node="host", batch_size=8, threads=1)]
    plan = Plan(
        job="job",
        job_fingerprint=job.fingerprint(),
        method="equal",
        emulated=True,
        left_out=["csd0"],
        ranks=ranks,
    )
    save_plan(project / "alone.yaml", plan)
    done = csdctl(project, "verify", "--plan", "alone.yaml")
    assert done.returncode == 2, done.stderr
    assert "the plan has one rank (host), which would be compared with itself" in done.stderr


def test_data_without_an_input_of_the_model_is_refused(project: Path) -> None:
    with np.load(project / "validation.npz") as whole:
        np.savez(project / "half.npz", picture=whole["picture"], y=whole["y"])
    (project / "half.yaml").write_text(JOB.replace("validation.npz", "half.npz"))
    done = csdctl(project, "prepare", "half.yaml")
    assert done.returncode == 2, done.stderr
    assert "takes picture, weather, the validation data has picture" in done.stderr


def test_missing_metric_is_refused(project: Path) -> None:
    (project / "metric.yaml").write_text(JOB.replace("far_off", "missing"))
    done = csdctl(project, "prepare", "metric.yaml")
    assert done.returncode == 2, done.stderr
    assert "has no function 'missing'" in done.stderr
