"""Sample data: real IDX files, small generated files, and Debian's package, downloaded with apt."""

import gzip
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from csdctl.errors import CsdctlError, InputError
from csdctl.workflows.data.sample_dataset import (
    FashionMnist,
    download_with_apt,
    fetch_fashion_mnist,
    load_fashion_mnist,
    read_idx,
    split_sample,
)
from csdctl.workflows.data.sample_sources import DatasetOrigin
from tests.needs import miss

NUM_TRAIN, NUM_TEST = 60_000, 10_000
IMAGES = "train-images-idx3-ubyte.gz"


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4) for size in array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), compresslevel=1))


def write_files(directory: Path, label: int = 3) -> Path:
    """Four files of the right shapes with black images, all of class `label`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, num_samples in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        write_idx(directory / f"{name}-images-idx3-ubyte.gz", np.zeros((num_samples, 28, 28)))
        write_idx(directory / f"{name}-labels-idx1-ubyte.gz", np.full(num_samples, label))
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def found_in(directory: Path, name: str = "elsewhere") -> DatasetOrigin:
    return DatasetOrigin(name, lambda _scratch, _say: directory)


def failing(name: str, message: str) -> DatasetOrigin:
    def fail(_scratch: Path, _say: Callable[[str], None]) -> Path:
        raise CsdctlError(message)

    return DatasetOrigin(name, fail)


class TestIdxFiles:
    def test_images_round_trip(self, tmp_path: Path) -> None:
        images = np.arange(2 * 3 * 4).reshape(2, 3, 4)
        write_idx(tmp_path / "a.gz", images)
        assert np.array_equal(read_idx(tmp_path / "a.gz", (2, 3, 4)), images)

    def test_another_number_of_samples_is_rejected_with_both_numbers(self, tmp_path: Path) -> None:
        write_idx(tmp_path / "a.gz", np.zeros((5, 2, 2)))
        with pytest.raises(InputError, match=r"a\.gz has shape \(5, 2, 2\), expected \(6, 2, 2\)"):
            read_idx(tmp_path / "a.gz", (6, 2, 2))

    def test_labels_are_rejected_where_images_are_expected(self, tmp_path: Path) -> None:
        write_idx(tmp_path / "a.gz", np.zeros(6))
        with pytest.raises(InputError, match="starts 00000801, expected 00000803"):
            read_idx(tmp_path / "a.gz", (6, 28, 28))

    def test_missing_data_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "a.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 4, 1, 2, 3])))
        with pytest.raises(InputError, match="has 3 bytes of data, expected 4"):
            read_idx(tmp_path / "a.gz", (4,))

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda content: content[: len(content) // 2], id="cut short"),
            pytest.param(lambda content: b"<html>" + content, id="not gzip"),
            pytest.param(lambda content: content[:-8] + b"\0" * 8, id="wrong checksum"),
            pytest.param(lambda content: b"", id="empty"),
        ],
    )
    def test_damaged_file_is_named(self, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
        write_idx(tmp_path / "a.gz", np.arange(100))
        (tmp_path / "a.gz").write_bytes(damage((tmp_path / "a.gz").read_bytes()))
        with pytest.raises(InputError, match=r"a\.gz"):
            read_idx(tmp_path / "a.gz", (100,))


class TestFetching:
    def test_arrays_have_the_shapes_and_types_of_the_docstring(self, files: Path) -> None:
        dataset = load_fashion_mnist(files)
        assert dataset.train_images.shape == (NUM_TRAIN, 28, 28, 1)
        assert dataset.test_images.shape == (NUM_TEST, 28, 28, 1)
        assert dataset.train_labels.shape == (NUM_TRAIN,)
        assert dataset.train_images.dtype == np.uint8
        assert dataset.test_labels.dtype == np.int64
        assert set(dataset.test_labels) == {3}

    def test_second_fetch_uses_no_source(self, files: Path, tmp_path: Path) -> None:
        messages: list[str] = []
        fetch_fashion_mnist(tmp_path, say=messages.append, sources=[found_in(files)])
        fetch_fashion_mnist(tmp_path, say=messages.append, sources=[])
        assert messages == []

    def test_damaged_cache_is_replaced_and_reported(self, files: Path, tmp_path: Path) -> None:
        messages: list[str] = []
        fetch_fashion_mnist(tmp_path, say=messages.append, sources=[found_in(files)])
        (tmp_path / IMAGES).write_bytes(b"half a file")
        fetch_fashion_mnist(tmp_path, say=messages.append, sources=[found_in(files)])
        assert len(messages) == 1
        assert str(tmp_path / IMAGES) in messages[0]
        assert (tmp_path / IMAGES).read_bytes() == (files / IMAGES).read_bytes()

    def test_damaged_source_is_skipped(self, files: Path, tmp_path: Path) -> None:
        damaged = shutil.copytree(files, tmp_path / "damaged")
        (damaged / IMAGES).write_bytes(b"half a file")
        messages: list[str] = []
        dataset = fetch_fashion_mnist(
            tmp_path / "cache", say=messages.append, sources=[found_in(damaged), found_in(files)]
        )
        assert len(dataset.train_labels) == NUM_TRAIN
        assert "trying other sources" in messages[0]

    def test_sources_are_tried_in_order(self, files: Path, tmp_path: Path) -> None:
        other = write_files(tmp_path / "other", label=7)
        dataset = fetch_fashion_mnist(
            tmp_path / "cache", say=print, sources=[failing("first", "no"), found_in(other), found_in(files)]
        )
        assert dataset.train_labels[0] == 7

    def test_error_lists_all_sources_and_a_remedy(self, tmp_path: Path) -> None:
        sources = [failing("apt-get download", "no network"), failing("Keras' download", "no network either")]
        with pytest.raises(CsdctlError) as raised:
            fetch_fashion_mnist(tmp_path, say=print, sources=sources)
        assert "the cache: " in raised.value.message
        assert "apt-get download: no network\n" in raised.value.message
        assert "Keras' download: no network either" in raised.value.message
        assert "dataset-fashion-mnist" in raised.value.remedy

    def test_unwritable_cache_is_not_an_error(self, files: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file where a directory should be")
        messages: list[str] = []
        fetch_fashion_mnist(tmp_path / "cache", say=messages.append, sources=[found_in(files)])
        assert "could not be cached" in messages[0]

    def test_machine_without_apt_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(CsdctlError, match="apt-get is not installed here"):
            download_with_apt(tmp_path, print)

    def test_tensorflow_is_not_imported(self) -> None:
        code = (
            "import sys, csdctl.workflows.data.sample_dataset; "
            "sys.exit(bool({'tensorflow', 'keras'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    @pytest.mark.needs("Debian's archive")
    def test_debian_package_is_downloaded_with_apt(self, tmp_path: Path) -> None:
        messages: list[str] = []
        try:
            directory = download_with_apt(tmp_path, messages.append)
        except CsdctlError as error:
            miss("Debian's archive", str(error))
        dataset = load_fashion_mnist(directory)
        assert np.bincount(dataset.train_labels).tolist() == [6000] * 10
        assert np.bincount(dataset.test_labels).tolist() == [1000] * 10
        assert "31 MB" in messages[0]


@pytest.fixture
def dataset() -> FashionMnist:
    """A numbered sample: the label of each identifies it."""
    images = np.arange(700).reshape(700, 1, 1, 1).astype(np.uint8)
    return FashionMnist(images, np.arange(700), images[:10], np.arange(10))


class TestSplit:
    def test_one_seventh_of_the_samples_is_private_and_split_evenly(self, dataset: FashionMnist) -> None:
        split = split_sample(dataset, num_nodes=4, seed=1)
        assert len(split.public) == 600
        assert [len(private) for private in split.private] == [25, 25, 25, 25]

    def test_private_parts_differ_by_one_sample_at_most(self, dataset: FashionMnist) -> None:
        split = split_sample(dataset, num_nodes=7, seed=1)
        assert sorted(len(private) for private in split.private) == [14] * 5 + [15] * 2

    def test_every_sample_is_in_exactly_one_part(self, dataset: FashionMnist) -> None:
        split = split_sample(dataset, num_nodes=3, seed=1)
        labels = np.concatenate([split.public.labels, *(private.labels for private in split.private)])
        assert sorted(labels) == list(range(700))

    def test_images_stay_with_their_labels(self, dataset: FashionMnist) -> None:
        public = split_sample(dataset, num_nodes=3, seed=1).public
        assert np.array_equal(public.images.ravel(), public.labels.astype(np.uint8))

    def test_split_depends_only_on_the_seed(self, dataset: FashionMnist) -> None:
        first, again, other = (split_sample(dataset, num_nodes=3, seed=seed) for seed in (1, 1, 2))
        assert np.array_equal(first.public.labels, again.public.labels)
        assert not np.array_equal(first.public.labels, other.public.labels)

    def test_all_samples_can_be_public(self, dataset: FashionMnist) -> None:
        split = split_sample(dataset, num_nodes=2, private_fraction=0, seed=1)
        assert len(split.public) == 700
        assert [len(private) for private in split.private] == [0, 0]

    def test_test_samples_are_for_validation(self, dataset: FashionMnist) -> None:
        assert split_sample(dataset, num_nodes=2, seed=1).validation.labels.tolist() == list(range(10))

    @pytest.mark.parametrize(("num_nodes", "fraction"), [(0, 0.1), (2, 1.0), (2, -0.1)])
    def test_impossible_split_is_rejected(
        self, dataset: FashionMnist, num_nodes: int, fraction: float
    ) -> None:
        with pytest.raises(InputError, match="received"):
            split_sample(dataset, num_nodes=num_nodes, private_fraction=fraction, seed=1)
