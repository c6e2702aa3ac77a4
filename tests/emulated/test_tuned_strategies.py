"""The plan names the strategy, and training follows it; on an emulated host and two nodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.emulated.running import document, emulated, refuse
from tests.emulated.test_features import JOB, MODEL, write_all

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

LEAVING = "private.npz, activations: may-leave}"
QUICK = ("--probe-seconds", "0.1", "--max-global-batch", "24")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    job = JOB % "0.01"
    trained = job.replace("build", "build_trained").replace("private.npz}", LEAVING)
    files = {"job.yaml": job, "trained.yaml": trained, "model.py": MODEL}
    with emulated(tmp_path_factory.mktemp("strategies"), 2, files) as directory:
        write_all(directory)
        yield directory


def tune(project: Path, job: str, *arguments: str) -> dict[str, Any]:
    """Return the plan in the file, which is what was printed."""
    printed = document(project, "tune", job, *QUICK, *arguments)
    plan: dict[str, Any] = yaml.safe_load(Path(printed["path"]).read_text())
    assert printed["strategies"][0]["strategy"] == plan["strategies"][0]["strategy"] == "data-parallel"
    return plan


def train(project: Path, job: str) -> dict[str, Any]:
    return document(project, "train", job, "--skip-doctor", "--no-rebalance")


def test_plan_for_features_is_followed(project: Path) -> None:
    plan = tune(project, "job.yaml", "--strategy", "features")
    assert (plan["strategy"], plan.get("cut", "")) == ("features", "")
    whole, features = plan["strategies"]
    assert features["strategy"] == "features"
    assert 0 < features["next_run_s"] < features["first_run_s"]
    assert whole["is_confirmed"]
    for one in (whole, features):
        low, high = one["first_run_s_range"]
        assert 0 < low < one["first_run_s"] < high
    report = train(project, "job.yaml")
    manifest = json.loads((project / report["path"] / "manifest.json").read_text())
    assert manifest["features"]["num_computed"] == 4 * 96


def test_plan_for_a_split_was_tried_and_is_followed(project: Path) -> None:
    plan = tune(project, "trained.yaml", "--strategy", "split", "--cut", "base")
    assert (plan["strategy"], plan["cut"]) == ("split", "base")
    assert plan["predicted"]["is_confirmed"]
    assert sum(rank["batch_size"] for rank in plan["ranks"]) <= 24
    *_, split = plan["strategies"]
    assert split["cut"] == "base"
    assert split["is_confirmed"]
    assert train(project, "trained.yaml")["samples"] == 2 * 3 * 96
    flows = document(project, "report", "--privacy")["of_run"]
    assert "activations" in {flow["kind"] for flow in flows}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("job.yaml", "--strategy", "split"), "sends activations and labels of private samples"),
        (("trained.yaml", "--strategy", "features"), "it has no frozen first layers"),
        (("trained.yaml", "--strategy", "split", "--cut", "no"), "cannot be cut after 'no'"),
        (("job.yaml", "--strategy", "features", "--no-host"), "a host that trains"),
    ],
)
def test_strategy_that_is_not_possible_is_refused(
    project: Path, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in refuse(project, "tune", *QUICK, *arguments)
