"""Prepared data that was swapped, and runs whose files were edited, on an emulated host and one node.

Every swap keeps size and mtime; the next `csdctl train` must not train on it.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.running import emulated, home_of, refuse, state_of, succeed
from tests.emulated.small_jobs import dense_model, small_job
from tests.emulated.training import hash_at_the_end
from tests.unit.worker.ingest.prepared_data import sha256, swap
from tests.unit.worker.ingest.sources.encoded_images import colours, png

pytestmark = [pytest.mark.emulated, pytest.mark.thorough, pytest.mark.attack(17)]

TRAIN = ("train", "--batch-size", "8", "--skip-doctor")
RESUME = ("train", "--skip-doctor", "--resume")
JOB = small_job("epochs: 2, learning_rate: 0.05")
MODEL = dense_model(8, 8, 3)


def fill(root: Path, num_images: int) -> None:
    for folder in ("ant", "bee", "cat"):
        (root / folder).mkdir(parents=True)
        for number in range(num_images):
            (root / folder / f"{number}.png").write_bytes(png(colours(8, 8, seed=number)))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with a running fleet, prepared data, and one run that has ended after three steps."""
    with emulated(tmp_path_factory.mktemp("data"), 1, {"job.yaml": JOB, "model.py": MODEL}) as directory:
        fill(directory / "public", 60)
        fill(home_of(directory, "csd0") / "private", 10)
        succeed(directory, "prepare")
        succeed(directory, *TRAIN, "--max-steps", "3")
        yield directory


def first_run(project: Path) -> Path:
    return min((project / ".csdctl" / "runs").iterdir())


@pytest.fixture
def run(project: Path) -> Iterator[Path]:
    """A copy of the run, which the test may change."""
    copy = project / ".csdctl" / "runs" / "99991231-235959-000000"
    shutil.copytree(first_run(project), copy, symlinks=True)
    edit_json(copy / "spec.json", lambda spec: spec.update(run_id=copy.name))
    yield copy
    shutil.rmtree(copy)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_swapped_data_is_not_trained_on_until_it_is_prepared_again(project: Path) -> None:
    [directory] = (state_of(project, "csd0") / ".csdctl" / "data").iterdir()
    path = directory / "images.npy"
    before = sha256(path)
    swap(path)
    said = refuse(project, *TRAIN, code=1)
    for words in (
        "csd0:",
        f".csdctl/data/{directory.name}/images.npy",
        before,
        sha256(path),
        "csdctl prepare",
    ):
        assert words in said
    assert "epoch 1/2" not in said
    succeed(project, "prepare")
    assert sha256(path) == before


def test_swapped_data_with_its_own_description_is_refused_by_the_host(project: Path) -> None:
    [directory] = (state_of(project, "csd0") / ".csdctl" / "data").iterdir()
    swap(directory / "images.npy")
    swapped = sha256(directory / "images.npy")
    edit_json(directory / "dataset.json", lambda info: info.update(images_sha256=swapped))
    said = refuse(project, *TRAIN)
    for words in ("csd0", "has another description", "csdctl prepare"):
        assert words in said
    shutil.rmtree(directory)
    succeed(project, "prepare")


def test_swapped_shard_and_model_are_made_again(project: Path) -> None:
    """They are also compared on the node, where the name of a file begins with its hash."""
    [shard] = (project / ".csdctl" / "shards").glob("*.images.npy")
    [weights] = (project / ".csdctl" / "models").glob("*/weights.npz")
    before = sha256(shard), sha256(weights)
    swap(shard)
    swap(weights)
    succeed(project, *TRAIN, "--max-steps", "3")
    assert (sha256(shard), sha256(weights)) == before
    runs = sorted((project / ".csdctl" / "runs").iterdir())
    assert hash_at_the_end(runs[-1]) == hash_at_the_end(first_run(project))


def test_resumed_run_follows_no_path_of_its_files(project: Path, run: Path) -> None:
    victim = project / "victim"
    victim.write_text("a file of the user")
    edit_json(
        run / "spec.json",
        lambda spec: spec.update(
            step_file=str(victim),
            output_directory="../escaped",
            architecture="/etc/passwd",
            weights="/etc/passwd",
            public={"images": "/etc/passwd", "labels": "/etc/passwd"},
        ),
    )
    succeed(project, *RESUME, run.name)
    assert victim.read_text() == "a file of the user"
    assert not (project.parent / "escaped").exists()
    assert (run / "model.keras").exists()
