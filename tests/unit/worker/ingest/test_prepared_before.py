"""Data that was prepared before: it is described as it was, or prepared again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareSpec
from tests.unit.worker.ingest.prepared_data import sha256, spec_below, swap


@pytest.fixture(params=["copied", "in place"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> PrepareSpec:
    """Data that is copied, because the model takes an axis of channels, or used where it is."""
    shape = (20, 4, 4) if request.param == "copied" else (20, 4, 4, 1)
    spec = spec_below(tmp_path, inputs={"": (4, 4, 1)})
    np.save(f"{spec.source}/images.npy", np.arange(320, dtype=np.float32).reshape(shape))
    np.save(f"{spec.source}/labels.npy", np.arange(20) % 3)
    return spec


def files_of(info: DatasetInfo) -> list[Path]:
    return [Path(info.path, name) for name in ("images.npy", "labels.npy")]


def hashes_of(info: DatasetInfo) -> list[str]:
    return list(map(sha256, files_of(info)))


def description_of(spec: PrepareSpec, info: DatasetInfo) -> Path:
    return Path(spec.store, info.fingerprint, "dataset.json")


def test_swapped_file_is_noticed_when_the_data_is_checked(spec: PrepareSpec) -> None:
    info = prepare(spec)
    for path in files_of(info):
        swap(path)
        assert prepare(spec) == info  # whoever reads it compares the hashes
        again = prepare(replace(spec, is_checked=True))
        assert [again.images_sha256, again.labels_sha256] == hashes_of(again)
        is_copied = info.path.startswith(spec.store)
        assert (again == info) is is_copied  # a copy is made again; there is no other source in place
        info = again


def edit(**values: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "change",
    [
        edit(path="/etc"),
        edit(fingerprint="0" * 32),
        edit(images_sha256=""),
        edit(unknown=1),
        lambda path: path.write_text("[" * 100_000),
        to_device,
    ],
)
def test_description_that_was_edited_is_written_again(
    spec: PrepareSpec, change: Callable[[Path], None]
) -> None:
    info = prepare(spec)
    change(description_of(spec, info))
    assert prepare(spec) == info
    assert json.loads(description_of(spec, info).read_text())["path"] == info.path
