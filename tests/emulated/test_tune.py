"""Tuning on an emulated host and two nodes: probes, collectives, trials, and saved measurements."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.emulated.running import document, emulated, succeed
from tests.emulated.small_jobs import save_arrays, small_job

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

LIMIT = 256
STANNIS = ("--method=stannis", "--batch-sizes=4,16", "--probe-seconds=0.1", "--exclude=csd1")
JOB = small_job("epochs: 1, learning_rate: 0.01, optimizer: sgd", data=("public",))
MODEL = """\
import keras
from keras import layers


def build():
    hidden = [layers.Conv2D(32, 3, activation="relu", padding="same") for _ in range(3)]
    output = [layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((16, 16, 1)), *hidden, *output])
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("tune"), 2, {"job.yaml": JOB, "model.py": MODEL}) as directory:
        save_arrays(directory / "public", 4000, 16, 16, 1, num_classes=10)
        yield directory


def tune(directory: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    done = succeed(directory, "tune", *arguments, "--json")
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def first(project: Path) -> tuple[dict[str, Any], str]:
    return tune(project, f"--max-global-batch={LIMIT}", "--probe-seconds=0.1")


def test_plan_respects_its_limit_and_reports_its_prediction(
    project: Path, first: tuple[dict[str, Any], str]
) -> None:
    plan, stderr = first
    assert 3 <= plan["global_batch"] <= LIMIT
    predicted = plan["predicted"]
    assert predicted["is_confirmed"]
    assert plan["predicted_samples_per_s"] == predicted["samples_per_s"] > 0
    shares = [predicted[f"{what}_share"] for what in ("compute", "imbalance", "communication")]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    assert "trying the plan" in stderr
    assert stderr.count("starting TensorFlow on 3 machines") == 1
    host, *nodes = plan["ranks"]
    assert [rank["node"] for rank in (host, *nodes)] == ["host", "csd0", "csd1"]
    assert 0 < plan["num_probes"] <= 16, "at most eight of each class"
    stored = (project / ".csdctl" / "measurements.jsonl").read_text().splitlines()
    values = [line["value"] for line in map(json.loads, stored) if line["kind"] == "probe"]
    factors = {value["node"]: value["factor"] for value in values}
    assert factors.keys() == {"host", "csd0", "csd1"}, "the machines of a class were compared"
    sizes = {node["node"]: node["batch_size"] for node in nodes}
    assert (sizes["csd0"] == sizes["csd1"]) == (factors["csd0"] == factors["csd1"]), (sizes, factors)
    assert "samples/s" in succeed(project, "forecast").stdout


def test_second_tune_probes_nothing_and_confirms_with_one_trial(
    project: Path, first: tuple[dict[str, Any], str]
) -> None:
    plan, stderr = tune(project, f"--max-global-batch={LIMIT}")
    assert plan["num_probes"] == 0, stderr
    assert stderr.count("trying the plan") == 1
    assert "timing sums" not in stderr


def test_fresh_tune_without_the_host_plans_an_exact_global_batch_which_is_trained(
    project: Path, first: tuple[dict[str, Any], str]
) -> None:
    options = ("--no-host", "--global-batch=100", "--fresh", "--probe-seconds=0.1")
    plan, stderr = tune(project, *options)
    assert plan["num_probes"] > 0
    assert "timing sums" in stderr
    assert plan["global_batch"] == 100
    assert plan["ranks"][0]["batch_size"] == 0
    summary = document(project, "train", "--skip-doctor")
    assert (summary["state"], summary["samples"], summary["identical_weights"]) == ("completed", 4000, True)
    assert summary["steps"] == 40
    assert summary["predicted_samples_per_s"] == plan["predicted_samples_per_s"]


def test_plan_is_a_file_that_the_user_can_edit(project: Path, first: tuple[dict[str, Any], str]) -> None:
    path = project / ".csdctl" / "plans" / "job.yaml"
    content = yaml.safe_load(path.read_text())
    for rank in content["ranks"]:
        rank["batch_size"] = 7
    path.write_text(yaml.safe_dump(content))
    report = document(project, "train", "--max-steps", "2", "--skip-doctor")
    assert report["samples"] == 2 * 21


def test_algorithm_1_can_be_chosen_by_name(project: Path) -> None:
    plan, stderr = tune(project, *STANNIS)
    assert plan["method"] == "stannis"
    assert plan["method_arguments"] == {"batch_sizes": [4, 16], "C": 2.0, "E": 20.0}
    assert "confirming the chosen batch sizes" in stderr
