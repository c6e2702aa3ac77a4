"""Several inputs, user metrics, augmentation and private noise, trained on an emulated host and two nodes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.reporting.privacy import compute_epsilon
from csdctl.worker.protocol.recipe import Noise
from tests.emulated.running import document, emulated, home_of, refuse, succeed
from tests.emulated.small_jobs import ALL_DATA, save_arrays, small_job

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES = 96
JOB = small_job(
    "epochs: 2, learning_rate: 0.05, loss: mean_squared_error, "
    'metrics: [mean_absolute_error, "model.py:far_off"]',
    ".npz",
    data=ALL_DATA,
)
AUGMENTED = JOB.replace("build", "build_random").replace("data:\n", "data:\n  augment: augment.py:flip\n")
NOISY = """\
model: model.py:build_normal
data:
  public: {path: pictures}
  private:
    path: ~/pictures
    unequal: repeat
    noise: {l2_norm_clip: 1.0, noise_multiplier: 12.0, delta: 1.0e-5}
recipe: {epochs: 2, learning_rate: 0.05}
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


def build_normal():
    stack = [keras.Input((8, 8, 1)), layers.Flatten(), layers.LayerNormalization()]
    return keras.Sequential([*stack, layers.Dense(3, activation="softmax")])


def far_off(labels, predictions):
    return ops.cast(ops.abs(labels - predictions) > 0.25, "float32")
"""
AUGMENT = """\
import turning


def flip(samples, labels, rng):
    return {**samples, "picture": turning.turn(samples["picture"], rng)}, labels


def fail_on_a_node(samples, labels, rng):
    import os
    if "CSDCTL_EMULATED_NODE" in os.environ:
        raise ValueError(f"secret {samples}")
    return samples, labels
"""
TURNING = """\
def turn(pictures, rng):
    turned = rng.random(len(pictures)) < 0.5
    pictures[turned] = pictures[turned, :, ::-1]
    return pictures
"""
TRAIN = ("train", "--batch-size", "8", "--skip-doctor", "--no-rebalance", "--json")
NUM_PRIVATE = {"csd0": 12, "csd1": 5}
PASSES = {"csd0": 1, "csd1": 3}
"""csd1 repeats its 5 pictures to get 12."""


def write(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    picture = generator.integers(0, 256, (NUM_SAMPLES, 6, 6, 1), np.uint8)
    weather = generator.random((NUM_SAMPLES, 3), np.float32)
    labels = picture.mean((1, 2, 3)) / 255 + weather.sum(1)
    np.savez(path, picture=picture, weather=weather, y=labels.astype(np.float32)[:, np.newaxis])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    augmented = AUGMENTED.replace("model:", "code: [turning.py]\nmodel:")
    files = {"job.yaml": JOB, "augmented.yaml": augmented, "noisy.yaml": NOISY, "model.py": MODEL}
    files |= {"fails.yaml": augmented.replace("py:flip", "py:fail_on_a_node")}
    files |= {"augment.py": AUGMENT, "turning.py": TURNING}
    with emulated(tmp_path_factory.mktemp("models"), 2, files) as directory:
        write(directory / "public.npz", 0)
        write(directory / "validation.npz", 1)
        save_arrays(directory / "pictures", 21, 8, 8, 1)
        for seed, (node, count) in enumerate(NUM_PRIVATE.items(), start=2):
            write(home_of(directory, node) / "private.npz", seed)
            save_arrays(home_of(directory, node) / "pictures", count, 8, 8, 1)
        yield directory


def train(project: Path, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what rank 0 says at the end of each epoch, and the report."""
    lines = [json.loads(line) for line in succeed(project, *TRAIN, *arguments).stdout.splitlines()]
    ends = [line for line in lines if line.get("event") == "EpochEnd" and line["rank"] == 0]
    assert lines[-1]["identical_weights"]
    return ends, lines[-1]


def test_model_with_two_inputs_trains_and_own_metric_is_evaluated(project: Path) -> None:
    ends, report = train(project)
    assert (report["state"], report["samples"]) == ("completed", 2 * 3 * NUM_SAMPLES)
    assert set(ends[-1]["metrics"]) == {"mean_absolute_error", "far_off"}
    # The saved model gives the same values in a separate process.
    program = (
        "import sys, keras, numpy as np\n"
        "model = keras.models.load_model(sys.argv[1], compile=False)\n"
        "data = np.load('validation.npz')\n"
        "found = model.predict([data['picture'] / np.float32(255), data['weather']], verbose=0)\n"
        "print(float(np.abs(found - data['y']).mean()), float((np.abs(found - data['y']) > 0.25).mean()))\n"
    )
    command = [sys.executable, "-c", program, f"{report['path']}/model.keras"]
    output = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    mean_error, far_off = map(float, output.split()[-2:])
    expected = {"mean_absolute_error": mean_error, "far_off": far_off}
    assert ends[-1]["validation_metrics"] == pytest.approx(expected, rel=1e-4)
    for is_whole in (True, False):
        again = succeed(project, "train", "--resume", "latest", "--skip-doctor")
        said = again.stdout + again.stderr
        assert "is complete: nothing to resume" in said
        assert ("not as csdctl wrote them: best.keras" in said) is not is_whole
        Path(report["path"], "best.keras").write_bytes(b"damaged")
    # A later run that is damaged is skipped, but where nothing else is left to resume, it is an error.
    later = shutil.copytree(report["path"], Path(report["path"]).with_name("later"))
    (later / "spec.json").unlink()
    assert f"error: {later}/spec.json" in refuse(project, "train", "--resume", "latest")
    shutil.rmtree(later)


def test_augmentation_and_random_layers_repeat_and_are_verified_with_the_states_of_every_rank(
    project: Path,
) -> None:
    prepared = succeed(project, "prepare", "augmented.yaml")
    assert "augment.py, turning.py" in prepared.stdout
    assert "augment.py:flip, tried on public samples" in prepared.stdout
    assert "tried on" not in succeed(project, "prepare", "augmented.yaml").stdout
    losses = [[end["loss"] for end in train(project, "augmented.yaml")[0]] for _ in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    verified = document(project, "verify", "augmented.yaml")
    assert (verified["dtype"], verified["compared_in"]) == ("bfloat16", "float32")
    assert verified["is_equal"]
    assert all(rank["difference"] <= 8 * verified["spread"] for rank in verified["ranks"].values())


def test_failure_on_a_node_is_named_and_its_message_stays_there(project: Path) -> None:
    said = refuse(project, *TRAIN, "fails.yaml", "--exclude", "csd1")
    assert "csd0: augment.py:fail_on_a_node fails: ValueError" in said
    assert "secret" not in said


def test_resumed_run_with_noise_reports_its_guarantee(project: Path) -> None:
    """A resumed run adds to what was released before, and keeps its noise."""
    options = ("noisy.yaml", "--skip-doctor")
    stopped = succeed(project, "train", *options, "--batch-size", "4", "--no-rebalance", "--max-steps", "2")
    assert "after 2 epochs, if nothing is lost, private samples of csd0: ε = " in stopped.stdout
    (project / "noisy.yaml").write_text(NOISY.replace("12.0", "13.0"))
    assert "data.private.noise" in refuse(project, "train", *options, "--resume", "latest")
    (project / "noisy.yaml").write_text(NOISY)
    done = succeed(project, "train", *options, "--resume", "latest", "--json")
    assert "released: private samples of csd1: ε = " in done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["state"], report["identical_weights"]) == ("completed", True)
    assert np.isfinite(report["loss"])
    privacy = document(project, "report", "--privacy")["privacy"]
    assert privacy == report["privacy"]
    num_epochs = 3  # the first is begun twice
    for node, row in zip(NUM_PRIVATE, privacy["nodes"], strict=True):
        epsilon = compute_epsilon(Noise(1.0, 12.0, 1e-5), num_epochs * PASSES[node])
        assert (row["node"], row["num_private"], row["epsilon"]) == (node, NUM_PRIVATE[node], epsilon)
        assert row["num_releases"] == num_epochs * PASSES[node]
    printed = " ".join(succeed(project, "report").stdout.split())
    assert f"{epsilon:.3g} at δ = 1e-05" in printed


def test_tuning_measures_private_nodes_with_noise_and_verify_reports_no_noise(project: Path) -> None:
    succeed(project, "tune", "noisy.yaml", "--exclude", "csd1", "--probe-seconds", "0.1")
    verified = succeed(project, "verify", "noisy.yaml", "--exclude", "csd1")
    assert "without clipping and noise" in verified.stderr + verified.stdout
