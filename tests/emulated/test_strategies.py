"""One job by each strategy, on an emulated host and two nodes: the same samples and the same model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from csdctl.job.model import load_job
from csdctl.runs.directory import has_model
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from tests.emulated.running import document, emulated, home_of, succeed
from tests.emulated.small_jobs import ALL_DATA, small_job
from tests.emulated.training import events_of, find_breaks, stop_without_csd1

pytestmark = pytest.mark.emulated

NUM_SAMPLES = 96
FEATURES = ("--strategy", "features")
SPLIT = ("--strategy", "split", "--cut", "cut")
STRATEGIES = {"data-parallel": (), "features": FEATURES, "split": SPLIT}
RUN = ("--batch-size", "8", "--no-rebalance")
ALONE = ("--exclude", "csd1")
JOB = small_job("epochs: 2, learning_rate: 0.01, optimizer: adam", ".npz", data=ALL_DATA).replace(
    "private.npz", "private.npz, activations: may-leave"
)
MODEL = """\
import keras
from keras import layers


def build(trainable=False):
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, activation="relu", trainable=trainable)(inputs)
    x = layers.BatchNormalization(trainable=trainable, name="cut")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(x))


def build_trained():
    return build(trainable=True)
"""
AUGMENT = """\
def darken(samples, labels, rng):
    return (samples * rng.random()).astype(samples.dtype), labels
"""
ACTIVATION_BYTES = 2 * NUM_SAMPLES * (8 * 100 * 4 + 4)
"""Bytes of a node in two epochs: 8 × 10 × 10 activations in float32 and a label for each sample."""


def write(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, NUM_SAMPLES)
    pictures = generator.integers(0, 120, (NUM_SAMPLES, 12, 12, 3)) + 40 * labels[:, None, None, None]
    np.savez(path, x=pictures.astype(np.uint8), y=labels)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    trained = JOB.replace(":build", ":build_trained")
    files = {"model.py": MODEL, "job.yaml": JOB, "trained.yaml": trained, "changes.py": AUGMENT}
    files["long.yaml"] = trained.replace("epochs: 2", "epochs: 100000")
    files["frozen.yaml"] = JOB.replace("epochs: 2", "epochs: 100000")
    with emulated(tmp_path_factory.mktemp("strategies"), 2, files) as directory:
        places = [directory / "public.npz", directory / "validation.npz"]
        places += [home_of(directory, node) / "private.npz" for node in ("csd0", "csd1")]
        for number, path in enumerate(places):
            write(path, number)
        yield directory


def train(project: Path, *arguments: str) -> dict[str, Any]:
    """Return the report of a training that must succeed, and how many features were computed for it."""
    report = document(project, "train", *arguments, "--skip-doctor")
    manifest = json.loads(Path(project, report["path"], "manifest.json").read_text())
    return report | {"num_computed": (manifest.get("features") or {}).get("num_computed")}


def assert_same_weights(project: Path, *reports: dict[str, Any], rtol: float, atol: float) -> None:
    """Compare the models that runs saved, as Keras reads them in a process of its own."""
    program = (
        "import sys, keras, numpy as np\n"
        "for number, path in enumerate(sys.argv[1:]):\n"
        "    np.savez(f'weights{number}.npz', *keras.models.load_model(path).get_weights())\n"
    )
    models = [f"{report['path']}/model.keras" for report in reports]
    for path, report in zip(models, reports, strict=True):
        assert has_model(project / path, report["weights_hash"])
        assert not has_model(project / path, "of others")
    subprocess.run([sys.executable, "-c", program, *models], cwd=project, check=True, capture_output=True)
    first, *others = (np.load(project / f"weights{number}.npz") for number in range(len(models)))
    for weights in others:
        assert len(weights.files) == len(first.files) == 8
        for name in first.files:
            np.testing.assert_allclose(weights[name], first[name], rtol=rtol, atol=atol)


def sent_in(project: Path, report: dict[str, Any]) -> dict[tuple[str, str, str], int]:
    """Return the bytes that a run sent, by sender, receiver and kind."""
    flows = document(project, "report", report["run_id"], "--privacy")["of_run"]
    return {(flow["sender"], flow["receiver"], flow["kind"]): flow["num_bytes"] for flow in flows}


def test_every_strategy_trains_the_same_model_and_sends_what_it_says(project: Path) -> None:
    reports = {name: train(project, *options, *RUN, *ALONE) for name, options in STRATEGIES.items()}
    assert_same_weights(project, *reports.values(), rtol=1e-3, atol=1e-5)
    for report in reports.values():
        assert report["samples"] == 2 * 2 * NUM_SAMPLES
        accuracy = reports["data-parallel"]["validation_accuracy"]
        assert report["validation_accuracy"] == pytest.approx(accuracy, abs=0.02)
    features = sent_in(project, reports["features"])
    assert features
    assert not [kind for sender, _, kind in features if sender == "csd0" and "features" in kind]
    assert reports["features"]["num_computed"] == 3 * NUM_SAMPLES
    assert sent_in(project, reports["split"])["csd0", "host", "activations"] == ACTIVATION_BYTES


@pytest.mark.thorough
def test_layers_before_the_cut_are_trained_as_in_whole_models(project: Path) -> None:
    undivided = train(project, "trained.yaml", *RUN)
    split = train(project, "trained.yaml", *RUN, *SPLIT, "--micro-batches", "1")
    assert split["samples"] == undivided["samples"] == 2 * 3 * NUM_SAMPLES
    assert_same_weights(project, undivided, split, rtol=1e-3, atol=1e-4)
    assert sent_in(project, split)["csd1", "host", "activations"] == ACTIVATION_BYTES
    verified = document(project, "verify", "trained.yaml", *SPLIT)
    assert all(rank["difference"] <= 1e-5 for rank in verified["ranks"].values())


@pytest.mark.thorough
@pytest.mark.parametrize(("job", "options"), [("long.yaml", SPLIT), ("frozen.yaml", FEATURES)])
def test_run_survives_a_lost_node_and_resumes(project: Path, job: str, options: tuple[str, ...]) -> None:
    run = stop_without_csd1(project, job, *options)
    if options == FEATURES:  # all public samples, and the private ones of csd0
        last = [event for event in events_of(run, "EpochEnd") if event["rank"] == 0][-1]
        assert last["global_samples"] == 2 * NUM_SAMPLES, last
    steps = max(event["step"] for event in events_of(run, "CheckpointSaved"))
    assert steps > find_breaks(run)[0]["step"]
    resume = ("train", job, "--resume", run.name, "--skip-doctor", "--max-steps", str(steps + 20))
    assert ("; 0 computed in" in succeed(project, *resume).stdout) == (options == FEATURES)


@pytest.mark.thorough
def test_host_trains_alone_on_features_of_all_public_samples(project: Path) -> None:
    """The plan says so; the model is that of one rank with the whole batch."""
    text = JOB.replace("  private: {path: ~/private.npz, activations: may-leave}\n", "")
    # The host has the features of the other tests' public and validation samples.
    for number, name in enumerate(("public.npz", "validation.npz")):
        write(project / f"alone-{name}", 10 + number)
        text = text.replace(name, f"alone-{name}")
    (project / "public.yaml").write_text(text)
    plan = Plan(
        job="public",
        job_fingerprint=load_job(project / "public.yaml").fingerprint(),
        method="fit",
        strategy="features",
        ranks=[RankPlan(node=name, batch_size=8, threads=1) for name in ("host", "csd0", "csd1")],
        trains_on_host=True,
    )
    save_plan(project / "public-plan.yaml", plan)
    whole = plan.for_host_alone().model_copy(update={"strategy": "data-parallel"})
    save_plan(project / "alone-plan.yaml", whole)

    report = train(project, "public.yaml", "--plan", "public-plan.yaml")
    assert [rank["node"] for rank in report["ranks"]] == ["host"]
    assert report["samples"] == report["num_computed"] == 2 * NUM_SAMPLES
    ledger = [json.loads(line) for line in (project / ".csdctl" / "ledger.jsonl").read_text().splitlines()]
    features = [flow for flow in ledger if flow["kind"] == "features of public samples"]
    assert {(flow["sender"], flow["receiver"]) for flow in features} == {("csd0", "host"), ("csd1", "host")}
    by_model = train(project, "public.yaml", "--plan", "alone-plan.yaml", "--exclude", "csd*")
    assert_same_weights(project, by_model, report, rtol=1e-4, atol=1e-6)

    again = train(project, "public.yaml", "--plan", "public-plan.yaml", "--max-steps", "3")
    assert again["num_computed"] == 0
    resumed = train(project, "public.yaml", "--resume", Path(again["path"]).name, "--max-steps", "7")
    assert resumed["samples"] == 7 * 24  # --max-steps counts those before the run was resumed


@pytest.mark.thorough
def test_views_are_features_of_augmented_samples_and_verified(project: Path) -> None:
    train(project, *FEATURES, *RUN)
    text = JOB.replace("validation:", "augment: changes.py:darken\n  validation:")
    (project / "views.yaml").write_text(text.replace("epochs: 2", "epochs: 3, views: 2"))
    report = train(project, "views.yaml", *FEATURES, *RUN)
    # Two views of public and private samples; validation samples have none, and their features are there.
    assert report["num_computed"] == 2 * 3 * NUM_SAMPLES
    assert report["samples"] == 3 * 3 * NUM_SAMPLES
    assert train(project, "views.yaml", *FEATURES, *RUN)["num_computed"] == 0
    verified = document(project, "verify", *FEATURES)
    assert set(verified["ranks"]) == {"host", "csd0", "csd1"}
    assert all(rank["difference"] <= 1e-5 for rank in verified["ranks"].values())


@pytest.mark.thorough
@pytest.mark.parametrize(("job", "options"), [("job.yaml", FEATURES), ("trained.yaml", SPLIT)])
def test_plan_for_a_strategy_was_tried_and_is_followed(
    project: Path, job: str, options: tuple[str, ...]
) -> None:
    quick = ("--probe-seconds", "0.1", "--max-global-batch", "24")
    printed = document(project, "tune", job, *quick, *options)
    plan = yaml.safe_load(Path(printed["path"]).read_text())
    data_parallel, chosen = plan["strategies"][0], plan["strategies"][-1]
    assert data_parallel["strategy"] == "data-parallel"
    assert chosen["strategy"] == plan["strategy"] == options[1]
    assert data_parallel["is_confirmed"]
    for forecast in (data_parallel, chosen):
        low, high = forecast["first_run_s_range"]
        assert 0 < low < forecast["first_run_s"] < high
    assert sum(rank["batch_size"] for rank in plan["ranks"]) <= 24
    report = train(project, job)
    assert report["samples"] == 2 * 3 * NUM_SAMPLES
    if options == SPLIT:
        assert (plan["cut"], chosen["cut"], chosen["is_confirmed"]) == ("cut", "cut", True)
        assert "activations" in {kind for _, _, kind in sent_in(project, report)}
    else:
        assert 0 < chosen["next_run_s"] < chosen["first_run_s"]
        assert report["num_computed"] is not None
