"""Models with several inputs or user metrics, trained on an emulated host and node."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.running import document, emulated, home_of, succeed
from tests.emulated.small_jobs import ALL_DATA, small_job

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES = 96
JOB = small_job(
    "epochs: 2, learning_rate: 0.05, loss: mean_squared_error, "
    'metrics: [mean_absolute_error, "model.py:far_off"]',
    ".npz",
    data=ALL_DATA,
)
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
    with emulated(tmp_path_factory.mktemp("models"), 1, {"job.yaml": JOB, "model.py": MODEL}) as directory:
        home = home_of(directory, "csd0")
        for number, path in enumerate((directory / "public", directory / "validation", home / "private")):
            write(path.with_suffix(".npz"), number)
        yield directory


def test_model_with_two_inputs_trains_and_own_metric_is_evaluated(project: Path) -> None:
    done = succeed(project, "train", "--batch-size", "8", "--skip-doctor", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["state"] == "completed"
    assert lines[-1]["samples"] == 2 * 2 * NUM_SAMPLES
    ends = [line for line in lines if line.get("event") == "EpochEnd" and line["rank"] == 0]
    assert set(ends[-1]["metrics"]) == {"mean_absolute_error", "far_off"}
    metrics = ends[-1]["validation_metrics"]
    assert set(metrics) == {"mean_absolute_error", "far_off"}
    assert 0 <= metrics["far_off"] <= 1
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
    assert mean_error == pytest.approx(metrics["mean_absolute_error"], rel=1e-4)
    assert far_off == pytest.approx(metrics["far_off"])

    again = succeed(project, "train", "--resume", "latest", "--skip-doctor")
    assert "is complete: nothing to resume" in again.stdout + again.stderr


def test_verify_compares_random_layers_in_16_bits_with_the_random_states_of_every_rank(project: Path) -> None:
    (project / "random.yaml").write_text(JOB.replace(":build", ":build_random"))
    verified = document(project, "verify", "random.yaml")
    assert (verified["dtype"], verified["compared_in"]) == ("bfloat16", "float32")
    assert verified["is_equal"]
    assert verified["ranks"]["csd0"]["difference"] <= 8 * verified["ranks"]["csd0"]["spread"]
    assert verified["one_batch"] is None
    assert len(verified["not_one_batch"]) == 1
    assert verified["not_one_batch"][0].startswith("random numbers in ")
    assert "drops" in verified["not_one_batch"][0]
    assert "random_rotation" in verified["not_one_batch"][0]
