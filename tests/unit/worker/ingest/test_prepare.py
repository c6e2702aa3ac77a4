"""Every format of data, as real files, prepared or looked at; errors never name a file below the root."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from csdctl.worker.ingest.prepare import MAX_BYTES, MAX_PICTURES, look, prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol import datasets as datasets
from csdctl.worker.protocol.datasets import DataLook, ImageRule, PrepareSpec, TableSchema
from csdctl.worker.protocol.json_codec import from_json, to_json
from tests.full_disk import full_disk
from tests.unit.worker.ingest.prepared_data import SECRET, arrays_of, refusal, spec_below
from tests.unit.worker.ingest.sources.encoded_images import bmp, colours, flat

GREY = np.arange(6 * 4 * 5).reshape(6, 4, 5).astype(np.uint8)
COLOUR = np.arange(6 * 4 * 5 * 3).reshape(6, 4, 5, 3).astype(np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)
NPZ = f"{SECRET}.npz"


def write_npy(root: Path, images: np.ndarray = COLOUR, labels: np.ndarray = LABELS) -> None:
    np.save(root / "images.npy", images, allow_pickle=True)
    np.save(root / "labels.npy", labels, allow_pickle=True)


def write_npz(root: Path, **arrays: Any) -> None:
    np.savez_compressed(root / NPZ, **arrays)


def renew(path: Path) -> None:
    """Put a copy in its place: another inode."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def write_folders(root: Path, value: int) -> None:
    for name in ("cat", "dog"):
        (root / name).mkdir()
        (root / name / "a.bmp").write_bytes(bmp(flat(1, 1, value, value, value)))


def grey(value: int) -> np.ndarray:
    return np.full((6, 4), value, np.uint8)


SAME_SIZE: dict[str, Callable[[Path, int], Any]] = {
    "npz": lambda root, value: np.savez(root / NPZ, x=grey(value), y=LABELS),
    "npy": lambda root, value: write_npy(root, grey(value)),
    "table": lambda root, value: (root / "t.csv").write_text(f"a,y\n{value},0\n"),
    "class folders": write_folders,
}
"""What writes data of which the largest value is this one."""


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    return spec_below(tmp_path)


class TestFormats:
    @pytest.mark.parametrize(("images", "labels", "source"), [("x", "y", ""), ("images", "labels", NPZ)])
    def test_npz_file_or_directory_with_one(
        self, root: Path, spec: PrepareSpec, images: str, labels: str, source: str
    ) -> None:
        write_npz(root, **{images: COLOUR, labels: LABELS.astype(np.int64), "more": LABELS})
        info = prepare(replace(spec, source=str(root / source)))
        assert Path(info.path).parent == Path(spec.store)
        assert np.array_equal(arrays_of(info)[0], COLOUR)
        assert (arrays_of(info)[1].tolist(), arrays_of(info)[1].dtype) == (LABELS.tolist(), np.int32)

    def test_npy_pair_is_used_in_place_if_its_shape_is_right(self, root: Path, spec: PrepareSpec) -> None:
        write_npy(root, images=GREY)
        info = prepare(spec)
        assert info.path == str(root)
        assert [path.name for path in Path(spec.store).rglob("*") if path.is_file()] == ["dataset.json"]
        assert np.array_equal(arrays_of(info)[0], GREY)
        info = prepare(replace(spec, inputs={"": (4, 5, 1)}))
        assert info.sample_shape == (4, 5, 1)
        assert arrays_of(info)[0].shape == (6, 4, 5, 1)
        assert np.load(root / "images.npy").shape == (6, 4, 5)

    @pytest.mark.parametrize("inputs", [{}, {"": (4, 5)}, {"": (4, 5, 3)}, {"a": (4, 5, 1)}])
    def test_time_series_keep_their_shape(
        self, root: Path, spec: PrepareSpec, inputs: dict[str, tuple[int, ...]]
    ) -> None:
        series = np.arange(6 * 4 * 5, dtype=np.float32).reshape(6, 4, 5)
        write_npz(root, x=series, y=LABELS)
        assert np.array_equal(arrays_of(prepare(replace(spec, inputs=inputs)))[0], series)

    @pytest.mark.parametrize("samples", [np.array([[0.1], [0.2]]), np.eye(2) > 0, np.ones((2, 1), ">f4")])
    def test_other_numbers_become_float32(self, root: Path, spec: PrepareSpec, samples: np.ndarray) -> None:
        write_npz(root.parent, x=samples, y=LABELS[:2])
        write_npy(root, samples, LABELS[:2])
        for source in (root, root.parent / NPZ):
            info = prepare(replace(spec, source=str(source)))
            assert (info.dtype, arrays_of(info)[0].dtype) == ("float32", np.float32)
            assert np.array_equal(arrays_of(info)[0], samples.astype(np.float32))

    def test_indices_keep_their_type_and_their_largest_is_known(self, root: Path, spec: PrepareSpec) -> None:
        write_npz(root, x=np.array([[3, 70_000], [1, 2]]), y=LABELS[:2])
        info = prepare(spec)
        assert (info.dtype, info.max_values) == ("int64", {"": 70_000})
        write_npy(root, np.array([[3, 8], [1, 2]]), LABELS[:2])
        assert prepare(spec).max_values == {"": 8}

    def test_npz_with_weights_and_several_outputs(self, root: Path, spec: PrepareSpec) -> None:
        weights = np.linspace(0, 1, 6)
        write_npz(root, x=COLOUR, y=LABELS, sample_weight=weights)
        info = prepare(replace(spec, classes=tuple("abcdefghij")))
        assert info.label_dtype == '[["label", "int32", []], ["sample_weight", "float32", []]]'
        assert (info.max_label, info.max_labels, info.class_counts["b"]) == (9, {"label": 9}, 2)
        labels = arrays_of(info)[1]
        assert labels["label"].tolist() == LABELS.tolist()
        assert np.array_equal(labels["sample_weight"], weights.astype(np.float32))
        write_npz(root, u=COLOUR, v=GREY, b=weights, a=LABELS, sample_weight=weights)
        info = prepare(replace(spec, outputs=("a", "b")))
        assert list(info.inputs) == ["u", "v"]
        assert info.labels == {"a": ("int32", ()), "b": ("float32", ()), "sample_weight": ("float32", ())}
        write_npz(root, x=COLOUR, y=np.ones((6, 2)), sample_weight=np.ones((6, 2)))
        assert prepare(spec).labels == {"label": ("float32", (2,)), "sample_weight": ("float32", (2,))}

    def test_names_of_the_model_come_before_x_and_y(self, root: Path, spec: PrepareSpec) -> None:
        meta = np.zeros((6, 2), np.float32)
        write_npz(root, images=COLOUR, meta=meta, labels=LABELS, x=GREY)
        info = prepare(replace(spec, inputs={"images": COLOUR.shape[1:], "meta": (2,)}))
        assert info.inputs == {"images": ("uint8", COLOUR.shape[1:]), "meta": ("float32", (2,))}
        assert (info.labels, info.max_label) == ({"": ("int32", ())}, 9)
        write_npz(root, x=COLOUR, y=LABELS, z=meta)
        info = prepare(replace(spec, inputs={"": COLOUR.shape[1:]}, outputs=("y", "z")))
        assert info.inputs == {"": ("uint8", COLOUR.shape[1:])}
        assert info.labels == {"y": ("int32", ()), "z": ("float32", (2,))}

    def test_weights_under_another_name_are_refused(self, root: Path, spec: PrepareSpec) -> None:
        write_npz(root, x=COLOUR, y=LABELS, sample_weights=np.ones(6))
        remedy = refusal(spec, "has weights in an array whose name is not sample_weight")
        assert remedy == "rename the array to sample_weight, or remove it"

    def test_data_follows_the_public_data(self, root: Path, spec: PrepareSpec) -> None:
        write_npy(root)
        weighted = {"label": ("float32", ()), "sample_weight": ("float32", (2,))}
        labels = arrays_of(prepare(replace(spec, labels=weighted)))[1]
        assert (labels["sample_weight"].tolist(), labels["label"].dtype) == ([[1, 1]] * 6, np.float32)


class TestRepeatedCalls:
    def test_second_call_writes_nothing(self, root: Path, spec: PrepareSpec) -> None:
        write_npy(root)
        first = prepare(spec)
        before = {path: path.stat().st_mtime_ns for path in Path(spec.store).rglob("*")}
        assert prepare(spec) == first
        assert {path: path.stat().st_mtime_ns for path in Path(spec.store).rglob("*")} == before

    def test_changed_or_moved_source_gets_another_fingerprint(self, root: Path, spec: PrepareSpec) -> None:
        write_npz(root, x=GREY, y=LABELS)
        first = prepare(spec)
        write_npz(root, x=GREY, y=LABELS[::-1])
        os.utime(root / NPZ, (1, 1))
        second = prepare(spec)
        assert arrays_of(second)[1].tolist() == LABELS[::-1].tolist()
        assert arrays_of(first)[1].tolist() == LABELS.tolist()
        third = prepare(replace(spec, source=str(root.rename(root.parent / "other"))))
        assert len({info.fingerprint for info in (first, second, third)}) == 3

    @pytest.mark.parametrize("write", SAME_SIZE.values(), ids=SAME_SIZE)
    def test_file_in_place_of_another_of_the_same_size_and_time_is_new_data(
        self, root: Path, spec: PrepareSpec, write: Callable[[Path, int], None]
    ) -> None:
        spec = replace(spec, picture=ImageRule((1, 1, 3)), table=TableSchema(("y",)), names_classes=True)
        found = []
        for value in (1, 2, 1):  # as `rsync -t` does: another inode, the same size, the same time
            shutil.rmtree(root)
            root.mkdir()
            write(root, value)
            for path in root.rglob("*"):
                os.utime(path, (1, 1))
            found.append(prepare(spec))
            assert int(arrays_of(found[-1])[0].max()) == value
        assert found[0].fingerprint == found[2].fingerprint != found[1].fingerprint

    def test_only_changed_files_are_read_and_changed_content_is_prepared(
        self, root: Path, spec: PrepareSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(root.parent)
        Path(".csdctl").mkdir()
        write_folders(root, 1)
        spec = replace(spec, picture=ImageRule((1, 1, 3)), names_classes=True)
        first = prepare(spec)
        with patch("csdctl.worker.ingest.sources.source.open_regular", side_effect=AssertionError):
            assert prepare(spec) == first
        with patch("csdctl.worker.ingest.prepare.ClassFolders", side_effect=AssertionError):
            for change in (lambda path: path.touch(), lambda path: path.chmod(0o600), renew):
                change(next(root.rglob("*.bmp")))
                assert prepare(spec) == first

    def test_data_that_changes_while_it_is_read_is_not_kept(self, root: Path, spec: PrepareSpec) -> None:
        write_npz(root, x=GREY, y=LABELS)
        with pytest.raises(WorkerError, match="was changed while it was read"):
            prepare(spec, on_progress=lambda progress: write_npz(root, x=GREY + 1, y=LABELS))
        assert list(Path(spec.store).iterdir()) == []
        assert arrays_of(prepare(spec))[0].max() == GREY.max() + 1


def garble(path: Path, start: int, stop: int) -> None:
    content = bytearray(path.read_bytes())
    content[start:stop] = b"\xff" * (stop - start)
    path.write_bytes(content)


def cut(path: Path, stop: int) -> None:
    path.write_bytes(path.read_bytes()[:stop])


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "truncated npy": lambda root: (write_npy(root), cut(root / "images.npy", -1)),
    "pickled npz": lambda root: write_npz(root, x=np.array([{}] * 6, dtype=object), y=LABELS),
    "pickled npy": lambda root: write_npy(root, labels=np.array([{"a": 1}] * 6, dtype=object)),
    "number in npz": lambda root: write_npz(root, x=np.array(1), y=np.array(2)),
    "garbled npz": lambda root: (
        write_npz(root, x=np.random.default_rng(0).random((50, 9)), y=np.arange(50)),
        garble(root / NPZ, 200, 900),
    ),
}
UNFIT: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{name: (write, "data at .*data cannot be read") for name, write in UNREADABLE.items()},
    "no labels": (lambda root: np.save(root / "images.npy", COLOUR), "lacks one of images.npy"),
    "empty": (lambda root: write_npy(root, COLOUR[:0], LABELS[:0]), "is empty"),
    "mismatched": (lambda root: write_npy(root, labels=LABELS[:4]), "6 samples but 4 labels"),
    "text": (lambda root: write_npy(root, labels=np.array(list("abcdef"))), "is not numeric: uint8 and <U1"),
    "picture": (lambda root: (root / f"{SECRET}.jpg").write_bytes(b"jpeg"), "not in a supported format"),
    "nothing": (lambda root: None, "is empty"),
}


@pytest.mark.parametrize(("write", "message"), UNFIT.values(), ids=UNFIT)
def test_misfit_is_refused(root: Path, spec: PrepareSpec, write: Callable[[Path], Any], message: str) -> None:
    write(root)
    with full_disk(1 << 24), pytest.raises(WorkerError, match=message) as raised:  # nothing is reserved
        prepare(spec)
    assert raised.value.exit_code == 2
    text = f"{raised.value.message} {raised.value.remedy}".replace(str(root), "")
    assert not any(part in text for part in (SECRET, "images-", "/"))
    assert not Path(spec.store).exists() or list(Path(spec.store).iterdir()) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [("~/not/here", "there is no data at ~/not/here"), (f"/{'a' * 300}", "cannot be read: File name")],
)
def test_path_without_data_is_named_as_written(tmp_path: Path, source: str, message: str) -> None:
    refusal(PrepareSpec(source, str(tmp_path / "store")), message)


def test_data_that_is_a_pipe_is_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.npz")
    spec = PrepareSpec(str(tmp_path / "train.npz"), str(tmp_path / "store"))
    refusal(spec, "train.npz is neither a file nor a directory")


def test_private_data_that_is_missing_may_come_back(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="there is no data") as raised:
        prepare(PrepareSpec("~/not/here", str(tmp_path / "store"), is_private=True))
    assert raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("is_private", "found"), [(False, "; it has x_train, y_train$"), (True, r"labels\)$")]
)
def test_names_in_an_npz_are_listed(root: Path, spec: PrepareSpec, is_private: bool, found: str) -> None:
    write_npz(root, x_train=COLOUR, y_train=LABELS)
    remedy = refusal(replace(spec, is_private=is_private), f"has no arrays x and y .*{found}")
    assert "FILE.py:NAME" in remedy


def test_full_disk_is_reported_and_leaves_no_files(root: Path, spec: PrepareSpec) -> None:
    write_npy(root, images=np.zeros((6, 64, 64), np.uint8))
    with full_disk(10_000), pytest.raises(WorkerError, match="cannot be written: (?!None)") as raised:
        prepare(replace(spec, inputs={"": (64, 64, 1)}))
    assert raised.value.remedy == "free disk space"
    assert list(Path(spec.store).iterdir()) == []


def look_at(path: Path, label: str = "", dropped: tuple[str, ...] = (), **settings: Any) -> DataLook:
    spec = PrepareSpec(str(path), "never used", ImageRule((8, 8, 3)), names_classes=True, **settings)
    found = look(datasets.LookSpec(spec, label, dropped))
    assert from_json(DataLook, to_json(found)) == found
    return found


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
        for name in ("cat", "dog"):
            (tmp_path / name).mkdir()
        for number in range(2 * MAX_PICTURES):
            path = tmp_path / ("cat" if number % 3 else "dog") / f"{number:04d}.bmp"
            path.write_bytes(bmp(colours(4 + number % 5, 6)))
        (tmp_path / "cat" / "0000.bmp").write_bytes(b"BM damaged")
        found = look_at(tmp_path)
        assert found.pictures == datasets.PictureSizes(("bmp",), (4, 6), (8, 6))
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


@pytest.fixture(params=["copied", "in place"])
def copied_or_in_place(request: pytest.FixtureRequest, tmp_path: Path) -> PrepareSpec:
    """Data that is copied, because the model takes an axis of channels, or used where it is."""
    shape = (20, 4, 4) if request.param == "copied" else (20, 4, 4, 1)
    spec = spec_below(tmp_path, inputs={"": (4, 4, 1)})
    np.save(f"{spec.source}/images.npy", np.arange(320, dtype=np.float32).reshape(shape))
    np.save(f"{spec.source}/labels.npy", np.arange(20) % 3)
    return spec


def edit(**values: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit(path="/etc"),
        edit(fingerprint="0" * 32),
        edit(images_sha256=""),
        edit(unknown=1),
        edit(num_samples=15),
        lambda path: path.write_text(path.read_text().replace('"num_samples":20', '"num_samples":15')),
        lambda path: path.write_text("[" * 100_000),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    ],
)
def test_edited_description_is_renewed(
    copied_or_in_place: PrepareSpec, change: Callable[[Path], None]
) -> None:
    spec = copied_or_in_place
    info = prepare(spec)
    description = Path(spec.store, info.fingerprint, "dataset.json")
    change(description)
    assert prepare(spec) == info
    assert json.loads(description.read_text())["path"] == info.path
