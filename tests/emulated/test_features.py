"""Training by features on an emulated host and two nodes, compared with the frozen model in every step."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.job.model import load_job
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from tests.emulated.running import csdctl
from tests.emulated.training import events_of, kill_rank, nothing_is_left, start_training, wait_for_epochs
from tests.patience import communicate

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES = 96
JOB = """\
model: model.py:build
data:
  public: {path: public.npz}
  private: {path: ~/private.npz}
  validation: {path: validation.npz}
recipe: {epochs: 2, learning_rate: %s, optimizer: adam}
"""
MODEL = """\
import keras
from keras import layers


def build(first=None):
    base = keras.Sequential([
        keras.Input((12, 12, 3)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.GlobalAveragePooling2D(),
    ], name="base")
    base.trainable = False
    inputs = keras.Input((12, 12, 3))
    pictures = first(inputs) if first else inputs
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(base(pictures)))


def build_random():
    return build(layers.RandomFlip())


def build_trained():
    model = build()
    model.get_layer("base").trainable = True
    return model
"""
AUGMENT = """\
def darken(samples, labels, rng):
    return (samples * rng.random()).astype(samples.dtype), labels
"""


def write(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, NUM_SAMPLES)
    pictures = generator.integers(0, 120, (NUM_SAMPLES, 12, 12, 3)) + 40 * labels[:, None, None, None]
    np.savez(path, x=pictures.astype(np.uint8), y=labels)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("features")
    assert csdctl(directory, "emulate", "up", "--nodes", "2", "--cpu", "1").returncode == 0
    (directory / "job.yaml").write_text(JOB % 0.01)
    (directory / "faster.yaml").write_text(JOB % 0.02)
    (directory / "model.py").write_text(MODEL)
    for name in ("random", "trained"):
        (directory / f"{name}.yaml").write_text((JOB % 0.01).replace(":build", f":build_{name}"))
    nodes = directory / ".csdctl" / "emulated" / "nodes"
    places = (directory / "public", directory / "validation")
    for number, path in enumerate((*places, *(nodes / f"csd{n}" / "home" / "private" for n in range(2)))):
        write(path.with_suffix(".npz"), number)
    yield directory
    csdctl(directory, "emulate", "down")


def train(project: Path, *arguments: str) -> dict[str, Any]:
    """Return the report of a training that must succeed."""
    done = csdctl(project, "train", *arguments, "--batch-size", "8", "--skip-doctor", "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    report["features"] = json.loads(Path(project, report["path"], "manifest.json").read_text()).get(
        "features"
    )
    return report


def weights_of(project: Path, report: dict[str, Any]) -> list[Any]:
    """Return the weights of the saved model, read in a process of its own, then its outputs on data."""
    program = (
        "import sys, keras, numpy as np\n"
        "model = keras.models.load_model(sys.argv[1])\n"
        "data = np.load('validation.npz')['x'] / np.float32(255)\n"
        "np.savez(sys.argv[2], *model.get_weights(), model.predict(data, verbose=0))\n"
    )
    output = project / "weights.npz"
    command = [sys.executable, "-c", program, f"{report['path']}/model.keras", str(output)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    with np.load(output) as arrays:
        return [arrays[name] for name in arrays.files]


@pytest.fixture(scope="module")
def by_features(project: Path) -> dict[str, Any]:
    return train(project, "--strategy", "features")


def test_features_train_the_same_model(project: Path, by_features: dict[str, Any]) -> None:
    whole = train(project)
    assert by_features["samples"] == whole["samples"] == 2 * 3 * NUM_SAMPLES
    assert by_features["validation_accuracy"] == pytest.approx(whole["validation_accuracy"])
    expected, found = weights_of(project, whole), weights_of(project, by_features)
    assert len(found) == len(expected) == 9
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert by_features["features"]["num_computed"] == 4 * NUM_SAMPLES


def test_features_of_all_samples_are_found_again(project: Path, by_features: dict[str, Any]) -> None:
    found = csdctl(project, "extract", "faster.yaml", "--batch-size", "8", "--json")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert (document["num_samples"], document["num_computed"]) == (4 * NUM_SAMPLES, 0)
    assert (document["layer"], document["shape"]) == ("base", [8])
    # Another learning rate finds the features of all samples.
    again = train(project, "faster.yaml", "--strategy", "features")
    assert again["features"]["num_computed"] == 0


def test_host_trains_alone_on_features_of_all_public_samples(project: Path) -> None:
    """The plan says so; the model is that of one rank with the whole batch."""
    text = (JOB % 0.01).replace("  private: {path: ~/private.npz}\n", "")
    # The host has the features of the other tests' public and validation samples.
    for number, name in enumerate(("public.npz", "validation.npz")):
        write(project / f"alone-{name}", 10 + number)
        text = text.replace(name, f"alone-{name}")
    (project / "public.yaml").write_text(text)
    job = load_job(project / "public.yaml")
    ranks = [RankPlan(node=name, batch_size=8, threads=1) for name in ("host", "csd0", "csd1")]
    plan = Plan(
        job="public",
        job_fingerprint=job.fingerprint(),
        method="fit",
        strategy="features",
        ranks=ranks,
        trains_on_host=True,
    )
    save_plan(project / "public-plan.yaml", plan)
    save_plan(
        project / "alone-plan.yaml", plan.for_host_alone().model_copy(update={"strategy": "data-parallel"})
    )

    def run(name: str, *arguments: str) -> tuple[dict[str, Any], str]:
        done = csdctl(project, "train", f"{name}.yaml", *arguments, "--skip-doctor", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), " ".join(done.stderr.split())

    report, said = run("public", "--plan", "public-plan.yaml")
    assert "of features of public samples fetched from 2 nodes" in said
    assert [rank["node"] for rank in report["ranks"]] == ["host"]
    assert report["samples"] == 2 * NUM_SAMPLES
    manifest = json.loads(Path(project, report["path"], "manifest.json").read_text())
    assert manifest["features"]["num_computed"] == 2 * NUM_SAMPLES
    ledger = [json.loads(line) for line in (project / ".csdctl" / "ledger.jsonl").read_text().splitlines()]
    features = [flow for flow in ledger if flow["kind"] == "features of public samples"]
    assert {(flow["sender"], flow["receiver"]) for flow in features} == {("csd0", "host"), ("csd1", "host")}
    found = weights_of(project, report)
    whole, _ = run("public", "--plan", "alone-plan.yaml", "--exclude", "csd*")
    for one, other in zip(weights_of(project, whole), found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)

    (project / "public2.yaml").write_text(text.replace("0.01", "0.02"))
    other = load_job(project / "public2.yaml")
    save_plan(
        project / "plan2.yaml",
        plan.model_copy(update={"job": other.name, "job_fingerprint": other.fingerprint()}),
    )
    again, said = run("public2", "--plan", "plan2.yaml", "--max-steps", "3")
    assert "features of all 96 public samples are on the host" in said
    manifest = json.loads(Path(project, again["path"], "manifest.json").read_text())
    assert manifest["features"]["num_computed"] == 0
    resumed, _ = run("public2", "--resume", Path(again["path"]).name, "--max-steps", "7")
    assert [rank["node"] for rank in resumed["ranks"]] == ["host"]
    assert resumed["samples"] == (3 + 7) * 24


def test_views_are_features_of_augmented_samples(project: Path) -> None:
    (project / "changes.py").write_text(AUGMENT)
    text = (JOB % 0.01).replace("validation:", "augment: changes.py:darken\n  validation:")
    (project / "views.yaml").write_text(text.replace("epochs: 2", "epochs: 3, views: 2"))
    report = train(project, "views.yaml", "--strategy", "features")
    # Two views of public and private samples, and the validation samples as they are.
    assert report["features"]["num_computed"] == (2 * 3 + 1) * NUM_SAMPLES
    assert report["samples"] == 3 * 3 * NUM_SAMPLES
    again = csdctl(project, "extract", "views.yaml", "--batch-size", "8")
    assert "; 0 computed in" in again.stdout, again.stderr
    (project / "none.yaml").write_text(text)
    refused = csdctl(project, "extract", "none.yaml", "--batch-size", "8")
    assert refused.returncode == 2
    assert "set recipe.views to the number of augmented copies" in " ".join(refused.stderr.split())


def test_verify_compares_features_and_head(project: Path, by_features: dict[str, Any]) -> None:
    assert by_features["features"]["num_computed"]
    done = csdctl(project, "verify", "--strategy", "features", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["by_parts"] <= 1e-5
    assert set(document["ranks"]) == {"host", "csd0", "csd1"}
    assert {node: found["difference"] for node, found in document["features"].items()} == {
        "host": 0,
        "csd0": 0,
        "csd1": 0,
    }
    assert sum(found["num_rows"] for found in document["features"].values()) >= 3 * NUM_SAMPLES


def test_verify_compares_features_of_litert_with_those_of_keras(project: Path) -> None:
    done = csdctl(project, "verify", "--strategy", "features", "--feature-engine", "litert", "--json")
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)["ranks"]
    assert ranks["host"]["difference"] == 0
    assert max(ranks[node]["difference"] for node in ("csd0", "csd1")) > 0, "computed with Keras, too"


def test_features_in_16_bits_are_computed_anew(project: Path, by_features: dict[str, Any]) -> None:
    report = train(project, "--strategy", "features", "--feature-precision", "float16")
    assert report["features"]["num_computed"] == 4 * NUM_SAMPLES
    assert report["validation_loss"] != by_features["validation_loss"]
    assert report["validation_loss"] == pytest.approx(by_features["validation_loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("random.yaml", "draws random numbers, or changes its state, before its first trainable layer"),
        ("trained.yaml", "has no frozen layers at its beginning"),
    ],
)
def test_model_without_a_frozen_beginning_is_refused(project: Path, job: str, reason: str) -> None:
    done = csdctl(project, "train", job, "--strategy", "features", "--batch-size", "8", "--skip-doctor")
    assert done.returncode == 2
    assert reason in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_lost_node_leaves_its_public_samples_and_the_stopped_run_resumes(project: Path) -> None:
    (project / "long.yaml").write_text((JOB % 0.01).replace("epochs: 2", "epochs: 100000"))
    arguments = ("long.yaml", "--strategy", "features", "--max-steps", "1000000")
    process, run = start_training(project, *arguments, until="EpochEnd")
    kill_rank("csd1")(project, run)
    wait_for_epochs(process, run, 2, 4)  # an epoch has the samples that csd1 left
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, project)
    assert "csd1 is lost" in output
    assert nothing_is_left(project, run)
    last = [event for event in events_of(run, "EpochEnd") if event["rank"] == 0][-1]
    assert last["global_samples"] == 2 * NUM_SAMPLES, last  # all public ones, and the private ones of csd0
    steps = max(event["step"] for event in events_of(run, "CheckpointSaved"))
    joined = next(event for event in events_of(run, "Joined") if event["generation"] == 2)
    assert steps > joined["step"]
    resumed = csdctl(
        project, "train", "long.yaml", "--resume", run.name, "--skip-doctor", "--max-steps", str(steps + 50)
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "; 0 computed in" in resumed.stdout, resumed.stdout
