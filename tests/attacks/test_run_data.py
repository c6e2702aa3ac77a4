"""Prepared data that was swapped, and runs whose files were edited, on an emulated host and one node.

Every swap keeps size and mtime; the next `csdctl train` must not train on it.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.running import csdctl
from tests.emulated.training import hash_at_the_end
from tests.unit.worker.ingest.sources.encoded_images import colours, png

pytestmark = [pytest.mark.first(1), pytest.mark.emulated, pytest.mark.attack(17)]

TRAIN = ("train", "--batch-size", "8", "--collective", "star", "--skip-doctor")
JOB = """\
model: model.py:build
data:
  public: {path: public}
  private: {path: ~/private}
recipe: {epochs: 2, learning_rate: 0.05}
"""
MODEL = """\
import keras


def build():
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential(layers)
"""


def fill(root: Path, num_images: int) -> None:
    for folder in ("ant", "bee", "cat"):
        (root / folder).mkdir(parents=True)
        for number in range(num_images):
            (root / folder / f"{number}.png").write_bytes(png(colours(8, 8, seed=number)))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with a running fleet, prepared data, and one run that has ended after three steps."""
    directory = tmp_path_factory.mktemp("data")
    assert csdctl(directory, "emulate", "up", "--nodes", "1", "--cpu", "1").returncode == 0
    (directory / "job.yaml").write_text(JOB)
    (directory / "model.py").write_text(MODEL)
    fill(directory / "public", 60)
    fill(home(directory) / "private", 10)
    assert csdctl(directory, "prepare").returncode == 0
    done = csdctl(directory, *TRAIN, "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    yield directory
    csdctl(directory, "emulate", "down")


def home(project: Path) -> Path:
    return project / ".csdctl/emulated/nodes/csd0/home"


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


def swap(path: Path) -> None:
    """Put other samples or labels into a file, with its size and mtime as before."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[128:] = bytes(len(content) - 128)
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_error(done: "subprocess.CompletedProcess[str]", exit_code: int, *words: str) -> None:
    assert done.returncode == exit_code, done.stderr[-3000:]
    message = done.stderr.rpartition("error:")[2].replace("\n", " ")
    assert "bug in csdctl" not in done.stderr
    for word in words:
        assert word in message, message


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "name"),
    [("csd0", "images.npy"), pytest.param("host", "labels.npy", marks=pytest.mark.thorough)],
)
def test_swapped_data_is_not_trained_on_until_it_is_prepared_again(
    project: Path, machine: str, name: str
) -> None:
    [directory] = ((home(project) if machine == "csd0" else project) / ".csdctl" / "data").iterdir()
    path = directory / name
    before = sha256_of(path)
    swap(path)
    found = sha256_of(path)
    done = csdctl(project, *TRAIN)
    assert_error(
        done, 1, f"{machine}:", f".csdctl/data/{directory.name}/{name}", before, found, "csdctl prepare"
    )
    assert "epoch 1/2" not in done.stderr + done.stdout
    assert csdctl(project, "prepare").returncode == 0
    assert sha256_of(path) == before


@pytest.mark.thorough
def test_swapped_data_with_its_own_description_is_refused_by_the_host(project: Path) -> None:
    [directory] = (home(project) / ".csdctl" / "data").iterdir()
    swap(directory / "images.npy")
    edit_json(
        directory / "dataset.json",
        lambda info: info.update(images_sha256=sha256_of(directory / "images.npy")),
    )
    assert_error(csdctl(project, *TRAIN), 2, "csd0", "described differently", "csdctl prepare")
    shutil.rmtree(directory)
    assert csdctl(project, "prepare").returncode == 0


@pytest.mark.thorough
def test_description_that_names_another_directory_is_not_followed(project: Path) -> None:
    [directory] = (project / ".csdctl" / "data").iterdir()
    others = project / "others"
    shutil.copytree(directory, others)
    swap(others / "images.npy")
    edit_json(
        directory / "dataset.json",
        lambda info: info.update(path="others", images_sha256=sha256_of(others / "images.npy")),
    )
    done = csdctl(project, *TRAIN, "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    assert json.loads((directory / "dataset.json").read_text())["path"] == f".csdctl/data/{directory.name}"


@pytest.mark.thorough
def test_swapped_shard_and_model_are_made_again(project: Path) -> None:
    """They are also compared on the node, where the name of a file begins with its hash."""
    [shard] = (project / ".csdctl" / "shards").glob("*.images.npy")
    [weights] = (project / ".csdctl" / "models").glob("*/weights.npz")
    before = sha256_of(shard), sha256_of(weights)
    swap(shard)
    swap(weights)
    done = csdctl(project, *TRAIN, "--max-steps", "3")
    assert done.returncode == 0, done.stderr
    assert (sha256_of(shard), sha256_of(weights)) == before
    runs = sorted((project / ".csdctl" / "runs").iterdir())
    assert hash_at_the_end(runs[-1]) == hash_at_the_end(first_run(project))


@pytest.mark.thorough
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
    done = csdctl(project, *TRAIN[:1], *TRAIN[3:], "--resume", run.name)
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "a file of the user"
    assert not (project.parent / "escaped").exists()
    assert (run / "model.keras").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "edit", "problem"),
    [
        ("spec.json", lambda spec: spec.update(num_checkpoints=-1), "`num_checkpoints` is -1"),
        (
            "manifest.json",
            lambda manifest: manifest["placed"][1].update(public_stop=10**9),
            "placed: ",
        ),
    ],
)
def test_edited_run_is_not_resumed(
    project: Path, run: Path, file: str, edit: Callable[[dict[str, Any]], object], problem: str
) -> None:
    edit_json(run / file, edit)
    done = csdctl(project, *TRAIN[:1], *TRAIN[3:], "--resume", run.name)
    assert_error(done, 2, file, problem, "start a new run")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["manifest.json", "checkpoints"])
def test_link_in_a_run_is_not_followed(project: Path, run: Path, name: str) -> None:
    (run / name).rename(run / "aside")
    (run / name).symlink_to(run / "aside")
    for command in (["report", run.name], [*TRAIN[:1], *TRAIN[3:], "--resume", run.name]):
        assert_error(csdctl(project, *command), 2, f"{name} is a symbolic link")


@pytest.mark.thorough
def test_edited_ledger_is_refused(project: Path) -> None:
    ledger = project / ".csdctl" / "ledger.jsonl"
    before = ledger.read_text()
    entry = json.loads(before.splitlines()[0])
    for line in ('{"time": 1}', "not JSON", json.dumps(entry | {"kind": "gossip"})):
        ledger.write_text(before + line + "\n")
        assert_error(csdctl(project, "report", "--privacy"), 2, "ledger")
    ledger.write_text(before)
