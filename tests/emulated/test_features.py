"""Training by features, and plans that name a strategy, on an emulated host and two nodes."""

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
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from tests.emulated.running import document, emulated, home_of, refuse, succeed
from tests.emulated.small_jobs import ALL_DATA, frozen_model, small_job
from tests.emulated.training import events_of, find_breaks, stop_without_csd1

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES = 96
JOB = small_job("epochs: 2, learning_rate: %s, optimizer: adam", ".npz", data=ALL_DATA)
MODEL = frozen_model(12, 'Conv2D(8, 3, activation="relu")', "BatchNormalization()")
LEAVING = "private.npz, activations: may-leave}"
QUICK = ("--probe-seconds", "0.1", "--max-global-batch", "24")
AUGMENT = """\
def darken(samples, labels, rng):
    return (samples * rng.random()).astype(samples.dtype), labels
"""


def write(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, NUM_SAMPLES)
    pictures = generator.integers(0, 120, (NUM_SAMPLES, 12, 12, 3)) + 40 * labels[:, None, None, None]
    np.savez(path, x=pictures.astype(np.uint8), y=labels)


def write_all(directory: Path) -> None:
    """Write public, validation and private samples for a host and two nodes."""
    places = [directory / "public.npz", directory / "validation.npz"]
    places += [home_of(directory, node) / "private.npz" for node in ("csd0", "csd1")]
    for number, path in enumerate(places):
        write(path, number)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    job = JOB % 0.01
    trained = job.replace("build", "build_trained").replace("private.npz}", LEAVING)
    files = {"job.yaml": job, "tuned.yaml": job, "trained.yaml": trained, "faster.yaml": JOB % 0.02}
    files["model.py"] = MODEL
    with emulated(tmp_path_factory.mktemp("features"), 2, files) as directory:
        write_all(directory)
        yield directory


def train(project: Path, *arguments: str) -> dict[str, Any]:
    """Return the report of a training that must succeed, and what its manifest says about features."""
    report = document(project, "train", *arguments, "--skip-doctor")
    manifest = json.loads(Path(project, report["path"], "manifest.json").read_text())
    return report | {"features": manifest.get("features")}


def weights_of(project: Path, *reports: dict[str, Any]) -> list[list[Any]]:
    """Return the weights of the models that runs saved, as Keras reads them in a process of its own."""
    program = (
        "import sys, keras, numpy as np\n"
        "for number, path in enumerate(sys.argv[1:]):\n"
        "    np.savez(f'weights{number}.npz', *keras.models.load_model(path).get_weights())\n"
    )
    models = [f"{report['path']}/model.keras" for report in reports]
    subprocess.run([sys.executable, "-c", program, *models], cwd=project, check=True, capture_output=True)
    weights = []
    for number in range(len(models)):
        with np.load(project / f"weights{number}.npz") as arrays:
            weights.append([arrays[name] for name in arrays.files])
    return weights


@pytest.fixture(scope="module")
def by_features(project: Path) -> dict[str, Any]:
    return train(project, "--strategy", "features", "--batch-size", "8")


def test_features_of_all_samples_are_found_again(project: Path, by_features: dict[str, Any]) -> None:
    assert by_features["features"]["num_computed"] == 4 * NUM_SAMPLES
    again = train(project, "faster.yaml", "--strategy", "features", "--batch-size", "8")
    assert (again["features"]["layer"], again["features"]["num_computed"]) == ("base", 0)


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

    report = train(project, "public.yaml", "--plan", "public-plan.yaml")
    assert [rank["node"] for rank in report["ranks"]] == ["host"]
    assert report["samples"] == 2 * NUM_SAMPLES
    assert report["features"]["num_computed"] == 2 * NUM_SAMPLES
    ledger = [json.loads(line) for line in (project / ".csdctl" / "ledger.jsonl").read_text().splitlines()]
    features = [flow for flow in ledger if flow["kind"] == "features of public samples"]
    assert {(flow["sender"], flow["receiver"]) for flow in features} == {("csd0", "host"), ("csd1", "host")}
    by_model = train(project, "public.yaml", "--plan", "alone-plan.yaml", "--exclude", "csd*")
    for expected, array in zip(*weights_of(project, by_model, report), strict=True):
        np.testing.assert_allclose(expected, array, rtol=1e-4, atol=1e-6)

    (project / "public2.yaml").write_text(text.replace("0.01", "0.02"))
    faster = load_job(project / "public2.yaml")
    changes = {"job": faster.name, "job_fingerprint": faster.fingerprint()}
    save_plan(project / "plan2.yaml", plan.model_copy(update=changes))
    again = train(project, "public2.yaml", "--plan", "plan2.yaml", "--max-steps", "3")
    assert again["features"]["num_computed"] == 0
    resumed = train(project, "public2.yaml", "--resume", Path(again["path"]).name, "--max-steps", "7")
    assert [rank["node"] for rank in resumed["ranks"]] == ["host"]
    assert resumed["samples"] == 7 * 24  # --max-steps counts those before the run was resumed


def test_views_are_features_of_augmented_samples(project: Path, by_features: dict[str, Any]) -> None:
    (project / "changes.py").write_text(AUGMENT)
    text = (JOB % 0.01).replace("validation:", "augment: changes.py:darken\n  validation:")
    (project / "views.yaml").write_text(text.replace("epochs: 2", "epochs: 3, views: 2"))
    report = train(project, "views.yaml", "--strategy", "features", "--batch-size", "8")
    # Two views of public and private samples; validation samples have none, and their features are there.
    assert by_features["features"]["num_computed"] == 4 * NUM_SAMPLES
    assert report["features"]["num_computed"] == 2 * 3 * NUM_SAMPLES
    assert report["samples"] == 3 * 3 * NUM_SAMPLES
    again = train(project, "views.yaml", "--strategy", "features", "--batch-size", "8")
    assert again["features"]["num_computed"] == 0


def test_verify_compares_features_and_head(project: Path, by_features: dict[str, Any]) -> None:
    verified = document(project, "verify", "--strategy", "features")
    assert set(verified["ranks"]) == {"host", "csd0", "csd1"}
    assert by_features["features"]["num_computed"]
    assert all(rank["difference"] <= 1e-5 for rank in verified["ranks"].values())
    assert {of_node["difference"] for of_node in verified["features"].values()} == {0}
    assert sum(of_node["num_rows"] for of_node in verified["features"].values()) >= 3 * NUM_SAMPLES


def test_lost_node_leaves_its_public_samples_and_the_stopped_run_resumes(project: Path) -> None:
    (project / "long.yaml").write_text((JOB % 0.01).replace("epochs: 2", "epochs: 100000"))
    run = stop_without_csd1(project, "long.yaml", "--strategy", "features")
    last = [event for event in events_of(run, "EpochEnd") if event["rank"] == 0][-1]
    assert last["global_samples"] == 2 * NUM_SAMPLES, last  # all public ones, and the private ones of csd0
    steps = max(event["step"] for event in events_of(run, "CheckpointSaved"))
    assert steps > find_breaks(run)[0]["step"]
    resumed = succeed(
        project, "train", "long.yaml", "--resume", run.name, "--skip-doctor", "--max-steps", str(steps + 50)
    )
    assert "; 0 computed in" in resumed.stdout, resumed.stdout


def tune(project: Path, job: str, *arguments: str) -> dict[str, Any]:
    """Return the plan in the file, which is what was printed."""
    printed = document(project, "tune", job, *QUICK, *arguments)
    plan: dict[str, Any] = yaml.safe_load(Path(printed["path"]).read_text())
    assert printed["strategies"][0]["strategy"] == plan["strategies"][0]["strategy"] == "data-parallel"
    return plan


def test_plan_for_features_is_followed(project: Path) -> None:
    plan = tune(project, "tuned.yaml", "--strategy", "features")
    assert (plan["strategy"], plan.get("cut", "")) == ("features", "")
    data_parallel, features = plan["strategies"]
    assert features["strategy"] == "features"
    assert 0 < features["next_run_s"] < features["first_run_s"]
    assert data_parallel["is_confirmed"]
    for forecast in (data_parallel, features):
        low, high = forecast["first_run_s_range"]
        assert 0 < low < forecast["first_run_s"] < high
    assert train(project, "tuned.yaml")["features"]["layer"] == "base"


def test_plan_for_a_split_was_tried_and_is_followed(project: Path) -> None:
    plan = tune(project, "trained.yaml", "--strategy", "split", "--cut", "base")
    assert (plan["strategy"], plan["cut"]) == ("split", "base")
    assert plan["predicted"]["is_confirmed"]
    assert sum(rank["batch_size"] for rank in plan["ranks"]) <= 24
    *_, split = plan["strategies"]
    assert split["cut"] == "base"
    assert split["is_confirmed"]
    assert train(project, "trained.yaml")["samples"] == 2 * 3 * NUM_SAMPLES
    flows = document(project, "report", "--privacy")["of_run"]
    assert "activations" in {flow["kind"] for flow in flows}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("tuned.yaml", "--strategy", "split"), "sends activations and labels of private samples"),
        (("tuned.yaml", "--strategy", "features", "--no-host"), "a host that trains"),
    ],
)
def test_strategy_that_is_not_possible_is_refused(
    project: Path, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in refuse(project, "tune", *QUICK, *arguments)
