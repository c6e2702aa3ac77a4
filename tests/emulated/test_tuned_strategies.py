"""The plan names the strategy, and training follows it; on an emulated host and two nodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.emulated.running import csdctl
from tests.emulated.test_features import JOB, MODEL, write

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

QUICK = ("--no-explore", "--probe-seconds", "0.1", "--max-global-batch", "24")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("strategies")
    assert csdctl(directory, "emulate", "up", "--nodes", "2", "--cpu", "1").returncode == 0
    job = JOB % "0.01"
    (directory / "job.yaml").write_text(job)
    (directory / "trained.yaml").write_text(
        job.replace("build", "build_trained").replace("private.npz}", "private.npz, activations: may-leave}")
    )
    (directory / "model.py").write_text(MODEL)
    nodes = directory / ".csdctl" / "emulated" / "nodes"
    places = (directory / "public", directory / "validation")
    for number, path in enumerate((*places, *(nodes / f"csd{n}" / "home" / "private" for n in range(2)))):
        write(path.with_suffix(".npz"), number)
    yield directory
    csdctl(directory, "emulate", "down")


def tune(project: Path, job: str, *arguments: str) -> dict[str, Any]:
    """Return the plan in the file, which is what was printed."""
    done = csdctl(project, "tune", job, *QUICK, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    plan: dict[str, Any] = yaml.safe_load(Path(printed["path"]).read_text())
    assert printed["strategies"][0]["strategy"] == plan["strategies"][0]["strategy"] == "data-parallel"
    return plan


def train(project: Path, job: str, *arguments: str) -> dict[str, Any]:
    done = csdctl(project, "train", job, "--skip-doctor", "--no-rebalance", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_plan_for_features_is_followed(project: Path) -> None:
    plan = tune(project, "job.yaml", "--strategy", "features")
    assert (plan["strategy"], plan.get("cut", "")) == ("features", "")
    whole, features = plan["strategies"]
    assert features["strategy"] == "features"
    assert 0 < features["next_run_s"] < features["first_run_s"]
    assert whole["is_confirmed"]
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
    assert split["node_memory_bytes"] > 100 << 20
    assert train(project, "trained.yaml")["samples"] == 2 * 3 * 96
    report = csdctl(project, "report", "--privacy", "--json")
    kinds = {flow["kind"] for flow in json.loads(report.stdout)["of_run"]}
    assert "activations" in kinds


@pytest.mark.parametrize(
    ("arguments", "reason", "remedy"),
    [
        (("job.yaml", "--strategy", "split"), "sends activations and labels of private samples", "may-leave"),
        (("trained.yaml", "--strategy", "features"), "it has no frozen layers at its beginning", "trainable"),
        (("trained.yaml", "--strategy", "split", "--cut", "no"), "cannot be cut behind 'no'", "--cut"),
        (("job.yaml", "--strategy", "sideways"), "unknown --strategy 'sideways'", "data-parallel"),
        (("job.yaml", "--cut", "base"), "--strategy auto does not", "--strategy split"),
        (("job.yaml", "--strategy", "features", "--no-host"), "a host that trains", "--no-host"),
    ],
)
def test_strategy_that_is_not_possible_is_refused(
    project: Path, arguments: tuple[str, ...], reason: str, remedy: str
) -> None:
    done = csdctl(project, "tune", *QUICK, *arguments)
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stderr.split())
    assert reason in said
    assert remedy in said
    assert "Traceback" not in said
