"""Sample data written to the data paths of a job, on the host and on a node (a local directory)."""

from pathlib import Path

import numpy as np
import pytest

from csdctl.errors import InputError
from csdctl.workflows.data.sample_parts import ARRAYS, SampleArrays
from csdctl.workflows.data.sample_placement import RECORD, _place_on_host

SAMPLES = SampleArrays(np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([1, 2], dtype=np.uint8))
SAME: dict[str, object] = {"sample": "fashion-mnist", "seed": 7}


def test_interrupted_placement_is_completed_by_the_next(tmp_path: Path) -> None:
    directory = tmp_path / "public"
    for name in (*ARRAYS, ""):
        if name:
            _place_on_host(directory, SAMPLES, SAME)
            (directory / name).unlink()
        _place_on_host(directory, SAMPLES, SAME)
        assert np.array_equal(np.load(directory / "images.npy"), SAMPLES.images)
        assert np.load(directory / "labels.npy").dtype == np.int32
        assert {path.name for path in directory.iterdir()} == {*ARRAYS, RECORD}


def test_other_data_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "images.npy").write_bytes(b"precious")
    with pytest.raises(InputError, match="contains other data"):
        _place_on_host(tmp_path, SAMPLES, SAME)
    _place_on_host(tmp_path / "new", SAMPLES, SAME)
    with pytest.raises(InputError, match="contains other data"):
        _place_on_host(tmp_path / "new", SAMPLES, {**SAME, "seed": 8})
    assert (tmp_path / "images.npy").read_bytes() == b"precious"
