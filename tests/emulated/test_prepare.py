"""`csdctl prepare` on images over SSH, on an emulated host and two nodes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.running import csdctl, document, emulated, home_of, refuse, succeed
from tests.emulated.small_jobs import dense_model, small_job
from tests.unit.worker.ingest.sources.encoded_images import colours, gif, huge_png, jpeg, png

pytestmark = pytest.mark.emulated

CANARY = "canary-4711"

JOB = small_job("epochs: 1, learning_rate: 0.05")
MODEL = dense_model(8, 8, 3)
LOAD = """\
import pathlib

import numpy as np


def load(path):
    print([file.name for file in pathlib.Path(path).rglob("*")])
    for label in range(3):
        yield np.full((8, 8, 3), 7, np.uint8), label
"""


def fill(root: Path, *classes: str, name: str = "a") -> None:
    for label, folder in enumerate(classes):
        (root / folder / "deeper").mkdir(parents=True)
        (root / folder / f"{name}.png").write_bytes(png(colours(20, 30, seed=label)))
        (root / folder / "deeper" / f"{name}.jpg").write_bytes(jpeg(colours(16, 9)))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("prepare"), 2) as directory:
        yield directory


@pytest.fixture
def project(fleet: Path) -> Path:
    (fleet / "job.yaml").write_text(JOB)
    (fleet / "model.py").write_text(MODEL)
    for root in (fleet / "public", *(private(fleet, node) for node in ("csd0", "csd1"))):
        shutil.rmtree(root, ignore_errors=True)
    fill(fleet / "public", "ant", "bee", "cat")
    (fleet / "public" / "bee" / "b.gif").write_bytes(gif(np.zeros((4, 4), int)))
    fill(private(fleet, "csd0"), "cat", name=CANARY)
    fill(private(fleet, "csd1"), "ant", "bee", name=CANARY)
    return fleet


def private(directory: Path, node: str) -> Path:
    return home_of(directory, node) / "private"


def holds_no_canary(project: Path, *texts: str) -> bool:
    """Assert that neither output nor any file of the host names a private file."""
    nodes = project / ".csdctl" / "emulated" / "nodes"
    files = [path for path in project.rglob("*") if path.is_file() and nodes not in path.parents]
    return not any(CANARY in text for text in texts) and not any(
        CANARY.encode() in path.read_bytes() or CANARY in path.name for path in files
    )


def test_images_are_prepared_in_place_and_numbered_equally(project: Path) -> None:
    (private(project, "csd0") / "cat" / f"{CANARY}-bad.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 50)
    (private(project, "csd0") / "bee").mkdir()
    (private(project, "csd0") / "bee" / f"{CANARY}.png").write_bytes(huge_png(20_990, 29_700))
    done = csdctl(project, "prepare", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["public"]["class_counts"] == {"ant": 2, "bee": 3, "cat": 2}
    assert document["private"] == {
        "csd0": {
            "num_samples": 2,
            "num_skipped": {"too_large": 1, "undecodable": 1},
            "class_counts": {"ant": 0, "bee": 0, "cat": 2},
            "unusable_classes": ["bee"],
        },
        "csd1": {
            "num_samples": 4,
            "num_skipped": {},
            "class_counts": {"ant": 2, "bee": 2, "cat": 0},
            "unusable_classes": [],
        },
    }
    assert "csd0: 2 skipped (1 too large, 1 undecodable)" in done.stderr
    assert "csd0: no usable file in class bee" in done.stderr
    assert holds_no_canary(project, done.stdout, done.stderr)


@pytest.mark.fault(58)
def test_incompatible_data_on_a_node_is_refused_with_node_and_class(project: Path) -> None:
    (private(project, "csd0") / "wasp").mkdir()
    (private(project, "csd1") / "ant" / f"{CANARY}-link.png").symlink_to("/etc/hostname")
    said = refuse(project, "prepare")
    assert "csd0: data at ~/private has class wasp" in said
    assert "csd1: data at ~/private has a link that leads out of it" in said
    assert holds_no_canary(project, said)


@pytest.mark.thorough
def test_users_function_runs_on_the_node_and_cannot_reveal_its_data(project: Path) -> None:
    (project / "my_data.py").write_text(LOAD)
    (project / "job.yaml").write_text(JOB.replace("~/private}", "~/private, function: my_data.py:load}"))
    done = succeed(project, "prepare")
    assert "6 private samples on 2 nodes" in done.stdout
    (project / "my_data.py").write_text(LOAD.replace("print(", "raise ValueError("))
    said = refuse(project, "prepare")
    assert "csd0: the function load fails: ValueError" in said
    assert holds_no_canary(project, done.stdout, done.stderr, said)


@pytest.mark.thorough
def test_shared_public_data_is_not_sent(project: Path) -> None:
    job = JOB.replace("{path: public}", f"{{path: {project}/public, on: every-node}}")
    (project / "job.yaml").write_text(job)
    options = ("--batch-size", "2", "--exclude", "csd1", "--skip-doctor", "--no-rebalance")
    report = document(project, "train", *options)
    assert report["samples"] == 7 + 2
    assert report["ranks"][1]["num_public"] > 0
    entries = [json.loads(line) for line in (project / ".csdctl/ledger.jsonl").read_text().splitlines()]
    of_run = [entry for entry in entries if entry["run"] == report["run_id"]]
    assert {entry["kind"] for entry in of_run} >= {"gradient", "control"}
    assert "public samples" not in {entry["kind"] for entry in of_run}
    printed = csdctl(project, "report", "--privacy")
    assert "No private sample" in printed.stdout
    assert holds_no_canary(project, printed.stdout)
