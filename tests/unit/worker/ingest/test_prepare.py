"""Every format of data, as real files; errors never name a file below the root."""

import gzip
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.arrays import open_arrays
from csdctl.worker.ingest.prepare import prepare as prepare_spec
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json

GREY = np.arange(6 * 4 * 5).reshape(6, 4, 5).astype(np.uint8)
COLOUR = np.arange(6 * 4 * 5 * 3).reshape(6, 4, 5, 3).astype(np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)
SECRET = "patient-4711"


def prepare(source: str, store: str, **settings: Any) -> DatasetInfo:
    return prepare_spec(PrepareSpec(source, store, **settings))


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4) for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx_pair(root: Path, suffix: str = "", pack: Callable[[bytes], bytes] = bytes) -> None:
    (root / f"{SECRET}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(GREY)))
    (root / f"{SECRET}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(LABELS)))


def write_npy(root: Path, images: np.ndarray = COLOUR, labels: np.ndarray = LABELS) -> None:
    np.save(root / "images.npy", images, allow_pickle=True)
    np.save(root / "labels.npy", labels, allow_pickle=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def arrays_of(info: DatasetInfo) -> tuple[np.ndarray, np.ndarray]:
    return open_arrays(f"{info.path}/images.npy", f"{info.path}/labels.npy")


class TestFormats:
    @pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress)])
    def test_pair_of_idx_files(
        self, root: Path, store: Path, suffix: str, pack: Callable[[bytes], bytes]
    ) -> None:
        write_idx_pair(root, suffix, pack)
        info = prepare(str(root), str(store))
        images, labels = arrays_of(info)
        assert np.array_equal(images, GREY)
        assert labels.tolist() == LABELS.tolist()
        assert (info.num_samples, info.sample_shape, info.dtype) == (6, (4, 5), "uint8")
        assert (info.label_shape, info.max_label) == ((), 9)

    @pytest.mark.parametrize(("images", "labels"), [("x", "y"), ("images", "labels")])
    @pytest.mark.parametrize("is_in_directory", [True, False])
    def test_npz_file_or_directory_with_one(
        self, root: Path, store: Path, images: str, labels: str, is_in_directory: bool
    ) -> None:
        file = root / f"{SECRET}.npz"
        np.savez(file, **{images: COLOUR, labels: LABELS, "more": LABELS})
        info = prepare(str(root if is_in_directory else file), str(store))
        assert Path(info.path).parent == store
        assert np.array_equal(arrays_of(info)[0], COLOUR)
        assert arrays_of(info)[1].tolist() == LABELS.tolist()

    def test_npy_pair_of_the_right_shape_is_used_in_place(self, root: Path, store: Path) -> None:
        write_npy(root)
        info = prepare(str(root), str(store))
        assert info.path == str(root)
        assert [path.name for path in store.rglob("*") if path.is_file()] == ["dataset.json"]
        assert np.array_equal(arrays_of(info)[0], COLOUR)

    def test_grayscale_images_get_a_channel_if_the_model_takes_one(self, root: Path, store: Path) -> None:
        write_npy(root, images=GREY)
        info = prepare(str(root), str(store), inputs={"": (4, 5, 1)})
        assert info.sample_shape == (4, 5, 1)
        assert arrays_of(info)[0].shape == (6, 4, 5, 1)
        assert np.load(root / "images.npy").shape == (6, 4, 5)

    @pytest.mark.parametrize("inputs", [{}, {"": (100, 1)}, {"": (4, 5)}, {"": (4, 5, 3)}, {"a": (4, 5, 1)}])
    @pytest.mark.parametrize("shape", [(6, 100, 1), (6, 4, 5)])
    def test_time_series_keep_their_shape(
        self, root: Path, store: Path, inputs: dict[str, tuple[int, ...]], shape: tuple[int, ...]
    ) -> None:
        series = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        write_npy(root, images=series)
        np.savez(root.parent / "a.npz", x=series, y=LABELS)
        for source in (root, root.parent / "a.npz"):
            info = prepare(str(source), str(store), inputs=inputs)
            assert info.sample_shape == shape[1:]
            assert np.array_equal(arrays_of(info)[0], series)

    def test_wide_floats_and_truth_values_become_float32_as_in_fit(self, root: Path, store: Path) -> None:
        for samples in (np.array([[0.1], [0.2]]), np.array([[True], [False]]), np.ones((2, 1), ">f4")):
            np.savez(root / "a.npz", x=samples, y=LABELS[:2])
            info = prepare(str(root), str(store))
            assert (info.dtype, arrays_of(info)[0].dtype) == ("float32", np.float32)
            assert np.array_equal(arrays_of(info)[0], samples.astype(np.float32))
            write_npy(root, samples, LABELS[:2])
            assert prepare(str(root), str(store)).dtype == "float32"
            (root / "images.npy").unlink()
            (root / "labels.npy").unlink()

    def test_indices_keep_their_type_and_their_largest_is_known(self, root: Path, store: Path) -> None:
        np.savez(root / "a.npz", x=np.array([[3, 70_000], [1, 2]]), y=LABELS[:2])
        info = prepare(str(root), str(store))
        assert (info.dtype, info.max_values) == ("int64", {"": 70_000})
        write_npy(root, np.array([[3, 8], [1, 2]]), LABELS[:2])
        assert prepare(str(root), str(store)).max_values == {"": 8}

    def test_npz_with_weights_and_several_outputs(self, root: Path, store: Path) -> None:
        weights = np.linspace(0, 1, 6)
        np.savez(root / "a.npz", x=COLOUR, y=LABELS, sample_weight=weights)
        info = prepare(str(root), str(store), classes=tuple("abcdefghij"))
        assert info.label_dtype == '[["label", "int32", []], ["sample_weight", "float32", []]]'
        assert (info.max_label, info.max_labels, info.class_counts["b"]) == (9, {"label": 9}, 2)
        labels = arrays_of(info)[1]
        assert labels["label"].tolist() == LABELS.tolist()
        assert np.array_equal(labels["sample_weight"], weights.astype(np.float32))
        np.savez(root / "a.npz", u=COLOUR, v=GREY, b=weights, a=LABELS, sample_weight=weights)
        info = prepare(str(root), str(store), outputs=("a", "b"))
        assert list(info.inputs) == ["u", "v"]
        assert info.labels == {"a": ("int32", ()), "b": ("float32", ()), "sample_weight": ("float32", ())}
        np.savez(root / "a.npz", x=COLOUR, y=LABELS, sample_weight=np.ones((6, 2)))
        with pytest.raises(WorkerError, match=r"sample_weight of the .npz at .* has shape \(6, 2\)"):
            prepare(str(root), str(store))

    def test_data_follows_the_public_data(self, root: Path, store: Path) -> None:
        weighted = {"label": ("float32", ()), "sample_weight": ("float32", ())}
        for write in (write_npy, write_idx_pair):
            write(root)
            info = prepare(str(root), str(store), labels=weighted)
            labels = arrays_of(info)[1]
            assert (labels["sample_weight"].tolist(), labels["label"].dtype) == ([1] * 6, np.float32)
            for file in root.iterdir():
                file.unlink()

    def test_rows_of_numbers_are_unchanged(self, root: Path, store: Path) -> None:
        write_npy(root, images=np.ones((6, 12), np.float32), labels=np.ones((6, 2), np.float32))
        info = prepare(str(root), str(store))
        assert (info.sample_shape, info.label_shape, info.max_label) == ((12,), (2,), -1)

    def test_wide_labels_are_stored_as_int32(self, root: Path, store: Path) -> None:
        np.savez(root / "a.npz", x=COLOUR, y=LABELS.astype(np.int64))
        assert arrays_of(prepare(str(root), str(store)))[1].dtype == np.int32

    def test_store_may_be_relative(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_idx_pair(root)
        monkeypatch.chdir(tmp_path)
        info = prepare("data", ".csdctl/data")
        assert info.path == f".csdctl/data/{info.fingerprint}"


class TestRepeatedCalls:
    def test_second_call_writes_nothing(self, root: Path, store: Path) -> None:
        write_idx_pair(root)
        first = prepare(str(root), str(store))

        def times() -> dict[Path, int]:
            return {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]}

        before = times()
        assert prepare(str(root), str(store)) == first
        assert times() == before

    def test_changed_source_gets_another_fingerprint(self, root: Path, store: Path) -> None:
        write_idx_pair(root)
        first = prepare(str(root), str(store))
        labels = root / f"{SECRET}-labels-idx1-ubyte"
        labels.write_bytes(idx(LABELS[::-1]))
        os.utime(labels, (1, 1))
        second = prepare(str(root), str(store))
        assert second.fingerprint != first.fingerprint
        assert arrays_of(second)[1].tolist() == LABELS[::-1].tolist()
        assert arrays_of(first)[1].tolist() == LABELS.tolist()

    def test_moved_source_gets_another_fingerprint(self, root: Path, store: Path, tmp_path: Path) -> None:
        write_npy(root)
        other = tmp_path / "other"
        root_info = prepare(str(root), str(store))
        root.rename(other)
        assert prepare(str(other), str(store)).fingerprint != root_info.fingerprint

    def test_failed_call_leaves_no_files(self, root: Path, store: Path) -> None:
        write_npy(root, labels=LABELS[:2])
        with pytest.raises(WorkerError):
            prepare(str(root), str(store))
        assert not store.exists() or list(store.iterdir()) == []


def truncated_idx(root: Path) -> None:
    write_idx_pair(root)
    path = root / f"{SECRET}-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])


def idx_of_4_bytes(root: Path) -> None:
    write_idx_pair(root)
    (root / f"{SECRET}-images-idx3-ubyte").write_bytes(b"\0\0\x08")


def idx_of_floats(root: Path) -> None:
    write_idx_pair(root)
    (root / f"{SECRET}-labels-idx1-ubyte").write_bytes(b"\0\0\x0d\x01" + bytes(28))


def truncated_gzip(root: Path) -> None:
    write_idx_pair(root, ".gz", lambda content: gzip.compress(content)[:-12])


def garbled_gzip(root: Path) -> None:
    write_idx_pair(root, ".gz", lambda content: gzip.compress(content)[:10] + b"\xff" * 40)


def not_gzip(root: Path) -> None:
    write_idx_pair(root, ".gz", lambda content: b"<html>" + content)


def truncated_npy(root: Path) -> None:
    write_npy(root)
    (root / "images.npy").write_bytes((root / "images.npy").read_bytes()[:-1])


def empty_npy_file(root: Path) -> None:
    write_npy(root)
    (root / "labels.npy").write_bytes(b"")


def npy_without_labels(root: Path) -> None:
    write_npy(root)
    (root / "labels.npy").unlink()


def pickled_npy(root: Path) -> None:
    write_npy(root, labels=np.array([{"a": 1}] * 6, dtype=object))


def one_number(root: Path) -> None:
    write_npy(root, labels=np.array(3))


def truncated_npz(root: Path) -> None:
    np.savez(root / f"{SECRET}.npz", x=COLOUR, y=LABELS)
    path = root / f"{SECRET}.npz"
    path.write_bytes(path.read_bytes()[:200])


def garbled_npz(root: Path) -> None:
    path = root / f"{SECRET}.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random((50, 9)), y=np.arange(50))
    content = bytearray(path.read_bytes())
    content[200:900] = b"\xff" * 700
    path.write_bytes(content)


def pickled_npz(root: Path) -> None:
    np.savez(root / f"{SECRET}.npz", x=np.array([{}] * 6, dtype=object), y=LABELS, allow_pickle=True)


def one_number_npz(root: Path) -> None:
    np.savez(root / f"{SECRET}.npz", x=np.array(1), y=np.array(2))


UNREADABLE = [
    truncated_idx,
    idx_of_4_bytes,
    idx_of_floats,
    truncated_gzip,
    garbled_gzip,
    not_gzip,
    truncated_npy,
    empty_npy_file,
    pickled_npy,
    one_number,
    truncated_npz,
    garbled_npz,
    pickled_npz,
]


def names_no_file(error: WorkerError, root: Path) -> bool:
    text = f"{error.message} {error.remedy}".replace(str(root), "")
    return SECRET not in text and "images-" not in text and "/" not in text


class TestProblems:
    def test_images_without_labels_are_reported(self, root: Path, store: Path) -> None:
        npy_without_labels(root)
        with pytest.raises(WorkerError, match=r"lacks one of images\.npy and labels\.npy") as raised:
            prepare(str(root), str(store))
        assert raised.value.exit_code == 2

    @pytest.mark.parametrize("write", UNREADABLE, ids=lambda write: write.__name__)
    def test_damaged_data_is_bad_input(self, root: Path, store: Path, write: Callable[[Path], None]) -> None:
        write(root)
        with pytest.raises(WorkerError, match=f"data at {root} cannot be read") as raised:
            prepare(str(root), str(store))
        assert raised.value.exit_code == 2
        assert names_no_file(raised.value, root)

    @pytest.mark.parametrize(
        ("write", "message"),
        [
            (lambda root: write_npy(root, COLOUR[:0], LABELS[:0]), "is empty"),
            (lambda root: write_npy(root, labels=LABELS[:4]), "6 samples but 4 labels"),
            (lambda root: write_npy(root, labels=np.array(list("abcdef"))), "is not numeric: uint8 and <U1"),
            (lambda root: np.savez(root / f"{SECRET}.npz", a=COLOUR, b=LABELS), "no arrays x and y"),
            (one_number_npz, "single number, not an array of samples"),
            (lambda root: (root / f"{SECRET}.csv").write_text("a,b\n1,2\n"), "job does not describe them"),
            (lambda root: (root / f"{SECRET}.jpg").write_bytes(b"jpeg"), "not in a supported format"),
            (lambda root: None, "is empty"),
            (lambda root: [write_idx_pair(root), write_idx_pair(root, ".gz")], "not in a supported format"),
        ],
        ids=[
            "empty",
            "mismatched",
            "text",
            "other names",
            "one number",
            "table",
            "pictures",
            "nothing",
            "two pairs",
        ],
    )
    def test_unfit_data_is_bad_input(
        self, root: Path, store: Path, write: Callable[[Path], object], message: str
    ) -> None:
        write(root)
        with pytest.raises(WorkerError, match=message) as raised:
            prepare(str(root), str(store))
        assert raised.value.exit_code == 2
        assert names_no_file(raised.value, root)

    def test_missing_data_is_bad_input_and_its_path_is_named_as_written(self, store: Path) -> None:
        with pytest.raises(WorkerError, match="there is no data at ~/not/here") as raised:
            prepare("~/not/here", str(store))
        assert raised.value.exit_code == 2

    def test_path_that_no_file_system_can_have_is_reported(self, root: Path, store: Path) -> None:
        with pytest.raises(WorkerError, match="cannot be read: File name too long") as raised:
            prepare(f"{root}/{'a' * 300}", str(store))
        assert raised.value.exit_code == 2

    def test_file_of_another_format_is_bad_input(self, root: Path, store: Path) -> None:
        (root / "a.tsv").write_text("1,2\n")
        with pytest.raises(WorkerError, match="not in a supported format"):
            prepare(str(root / "a.tsv"), str(store))

    def test_full_disk_is_reported_and_leaves_no_files(self, root: Path, store: Path) -> None:
        images = np.zeros((6, 64, 64), np.uint8)
        write_npy(root, images=images)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(WorkerError, match="prepared data cannot be written: (?!None)") as raised:
                prepare(str(root), str(store), inputs={"": (64, 64, 1)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert raised.value.remedy == "free disk space"
        assert list(store.iterdir()) == []

    def test_command_prints_one_line_and_returns_2(self, root: Path, store: Path) -> None:
        truncated_idx(root)
        command = [sys.executable, "-m", "csdctl.worker", "prepare"]
        request = to_json(PrepareSpec(str(root), str(store))) + "\n"
        done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == ""
        *progress, error = done.stdout.splitlines()
        assert error.startswith("@csdctl-error {")
        assert all(line.startswith("@csdctl-progress {") for line in progress)
        assert SECRET not in done.stdout
