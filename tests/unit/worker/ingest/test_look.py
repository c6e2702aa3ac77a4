"""A look at data: as `prepare` would read it, but only some samples, and nothing is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.ingest.prepare import MAX_BYTES, MAX_PICTURES, look
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import (
    DataLook,
    ImageRule,
    LookSpec,
    PictureSizes,
    PrepareSpec,
    TableSchema,
)
from csdctl.worker.protocol.json_codec import from_json, to_json
from tests.unit.worker.ingest.sources.encoded_images import bmp, colours


def look_at(path: Path, label: str = "", dropped: tuple[str, ...] = (), **settings: Any) -> DataLook:
    spec = PrepareSpec(str(path), "never used", ImageRule((8, 8, 3)), names_classes=True, **settings)
    found = look(LookSpec(spec, label, dropped))
    assert from_json(DataLook, to_json(found)) == found
    return found


def write_bmp(path: Path, height: int, width: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bmp(colours(height, width)))


class TestLook:
    def test_small_arrays_are_read_whole(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.zeros((6, 4, 5), np.uint8), y=np.arange(6))
        found = look_at(tmp_path / "a.npz")
        assert (found.format, found.num_samples, found.is_whole) == ("npz", 6, True)
        assert (found.info.sample_shape, found.info.dtype, found.info.max_label) == ((4, 5), "uint8", 5)

    def test_large_arrays_are_read_in_part_and_nothing_is_kept(self, tmp_path: Path) -> None:
        num_samples = 3 * MAX_BYTES // 4096
        np.save(tmp_path / "images.npy", np.broadcast_to(np.uint8(1), (num_samples, 4096)))
        np.save(tmp_path / "labels.npy", np.zeros(num_samples, np.int64))
        before = sorted(tmp_path.iterdir())
        found = look_at(tmp_path)
        assert (found.num_samples, found.is_whole) == (num_samples, False)
        assert found.info.num_samples < num_samples
        assert sorted(tmp_path.iterdir()) == before

    def test_pictures_of_all_classes_are_looked_at(self, tmp_path: Path) -> None:
        for number in range(2 * MAX_PICTURES):
            write_bmp(tmp_path / ("cat" if number % 3 else "dog") / f"{number:04d}.bmp", 4 + number % 5, 6)
        (tmp_path / "cat" / "0000.bmp").write_bytes(b"BM damaged")
        found = look_at(tmp_path)
        assert found.pictures == PictureSizes(("bmp",), (4, 6), (8, 6))
        assert sum(found.class_counts.values()) == found.num_samples == 2 * MAX_PICTURES + 1
        assert found.info.class_counts["dog"] > 100
        assert found.info.num_skipped == {"undecodable": 1}
        assert not found.is_whole

    def test_column_called_as_a_label_is_taken(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,Target,b\n1,0,2\n3,1,4\n")
        found = look_at(tmp_path / "t.csv")
        assert found.table == TableSchema(("Target",))
        assert (found.info.sample_shape, found.info.max_label) == ((2,), 1)

    def test_unclear_label_is_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,b,c\n1,0,x\n")
        with pytest.raises(WorkerError, match=r"which column of .* is the label\? It has a, b, c") as caught:
            look_at(tmp_path / "t.csv")
        assert (caught.value.exit_code, caught.value.remedy) == (2, "name it: --label COLUMN")
        assert look_at(tmp_path / "t.csv", "b", ("c",)).info.sample_shape == (1,)
