"""Prepared data: nobody reads what may not be read where it comes from, and nobody else writes it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from csdctl.shipping.store import pack_worker, store_bytes
from csdctl.transport.commands import build_worker_command
from csdctl.worker.protocol.datasets import PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from tests.attacks.other_user import give, mode_of, needs_root

pytestmark = [pytest.mark.attack(7), pytest.mark.first(1)]


def prepare(directory: Path, umask: int = 0o022, **changes: object) -> Path:
    """Prepare `directory`/data with a real worker; return the data set."""
    worker = store_bytes(pack_worker(), ".pyz", directory)
    settings = {"source": "data", "store": ".csdctl/data", "inputs": {"": (4, 4, 1)}, **changes}
    spec = PrepareSpec(**settings)  # type: ignore[arg-type]
    done = subprocess.run(
        build_worker_command(sys.executable, worker.path, ["prepare"]),
        cwd=directory,
        env={**os.environ, "HOME": str(directory)},
        umask=umask,
        input=to_json(spec) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = done.stdout.splitlines()[-1]
    return directory / json.loads(answer[answer.index("{") :])["path"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    np.save(data / "images.npy", np.zeros((6, 4, 4), np.uint8))
    np.save(data / "labels.npy", np.zeros(6, np.int32))
    for path in data.iterdir():
        path.chmod(0o600)
    return tmp_path


def modes(dataset: Path) -> set[str]:
    return {oct(mode_of(path)) for path in (dataset, dataset.parent, *dataset.rglob("*"))}


@pytest.mark.first(2)
@pytest.mark.parametrize("is_private", [True, False])
def test_data_that_is_not_shared_is_private_even_where_its_source_is_readable(
    project: Path, *, is_private: bool
) -> None:
    (project / "data").chmod(0o755)
    for path in (project / "data").iterdir():
        path.chmod(0o644)
    assert modes(prepare(project, 0, is_private=is_private)) == {"0o700", "0o600"}


@pytest.mark.parametrize("name", [".", "labels.npy"])
def test_data_that_others_could_change_is_prepared_again(project: Path, name: str) -> None:
    dataset = prepare(project)
    (dataset / "labels.npy").write_bytes((dataset / "labels.npy").read_bytes()[:-4] + b"\1\0\0\0")
    (dataset / name).chmod(0o777)
    assert prepare(project) == dataset
    assert np.load(dataset / "labels.npy").tolist() == [0] * 6
    assert modes(dataset) == {"0o700", "0o600"}


@pytest.mark.parametrize(
    ("directory", "file", "expected"),
    [(0o755, 0o644, (0o755, 0o644)), (0o755, 0o640, (0o750, 0o640)), (0o711, 0o644, (0o700, 0o600))],
)
def test_shared_data_is_never_wider_than_its_source(
    project: Path, directory: int, file: int, expected: tuple[int, int]
) -> None:
    (project / "data").chmod(directory)
    (project / "data" / "labels.npy").chmod(0o644)
    (project / "data" / "images.npy").chmod(file)
    dataset = prepare(project, store=str(project / ".csdctl-data"), is_shared=True)
    assert (mode_of(dataset), mode_of(dataset / "images.npy")) == expected
    (project / "data" / "labels.npy").chmod(0o600)
    prepare(project, store=str(project / ".csdctl-data"), is_shared=True)
    assert (mode_of(dataset), mode_of(dataset / "images.npy")) == (0o700, 0o600)


def part_of(project: Path) -> Path:
    """The directory of data that an interrupted call has not finished."""
    place = hashlib.sha256(os.fsencode((project / "data").resolve())).hexdigest()[:32]
    return project / ".csdctl" / "data" / f".part-{place}"


@needs_root
@pytest.mark.first(2)
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared store", "unfinished data"])
def test_directory_of_a_neighbour_is_refused(project: Path, *, is_shared: bool) -> None:
    place = project / "store" if is_shared else part_of(project)
    place.mkdir(parents=True)
    give(place)
    with pytest.raises(AssertionError, match="belongs to another user"):
        prepare(project, **({"store": str(place), "is_shared": True} if is_shared else {}))


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_unfinished_data_is_not_written_through_a_link(project: Path, mode: int) -> None:
    (project / "victim").write_text("precious")
    part_of(project).mkdir(parents=True)
    (part_of(project) / "images.npy").symlink_to(project / "victim")
    part_of(project).chmod(mode)
    if mode == 0o777:  # others could have filled it: it is removed, and begun again
        assert modes(prepare(project)) == {"0o700", "0o600"}
    else:
        with pytest.raises(AssertionError, match="cannot be written"):
            prepare(project)
    assert (project / "victim").read_text() == "precious"
