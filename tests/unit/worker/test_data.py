"""Shards over small data sets whose labels number the rows."""

from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.placement.equation1 import RankLoad, place_shards
from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.contract import DatasetInfo, ShardPart
from csdctl.worker.data import Shard, open_arrays, rows_of
from csdctl.worker.events import WorkerError
from csdctl.workflows.deploy import cut_shards


def write(directory: Path, num_rows: int, first_label: int = 0) -> ShardPart:
    """Images that hold their own label in each pixel."""
    directory.mkdir(parents=True, exist_ok=True)
    labels = np.arange(first_label, first_label + num_rows, dtype=np.int32)
    images = np.broadcast_to(labels.astype(np.uint8).reshape(-1, 1, 1, 1), (num_rows, 2, 2, 1))
    np.save(directory / "images.npy", images)
    np.save(directory / "labels.npy", labels)
    return ShardPart(str(directory / "images.npy"), str(directory / "labels.npy"))


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> ShardPart:
    return write(tmp_path_factory.mktemp("data"), 60)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> ShardPart:
    return write(tmp_path_factory.mktemp("other"), 20, first_label=100)


def some(part: ShardPart, start: int, stop: int, seed: int = 5) -> ShardPart:
    return ShardPart(part.images, part.labels, start, stop, seed)


def labels_of(shard: Shard, batch_size: int, num_steps: int, seed: tuple[int, int, int]) -> list[list[int]]:
    batches = []
    for images, labels in shard.batches(batch_size, num_steps, seed):
        assert images.shape == (len(labels), 2, 2, 1)
        assert np.array_equal(images[:, 0, 0, 0], labels.astype(np.uint8))
        batches.append(labels.tolist())
    return batches


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 30), st.integers(0, 99))
def test_epoch_reads_every_row_exactly_once(
    part: ShardPart, other: ShardPart, start: int, stop: int, batch_size: int, seed: int
) -> None:
    mine = some(part, start, stop)
    shard = Shard([mine, other])
    num_steps = -(-len(shard) // batch_size) + 1
    batches = labels_of(shard, batch_size, num_steps, (seed, 1, 0))
    expected = [*rows_of(mine, 60).tolist(), *range(100, 120)]
    assert sorted(chain(*batches)) == sorted(expected)
    assert len(shard) == len(expected)


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), max_size=5), st.integers(0, 2**31))
def test_parts_that_share_a_permutation_share_no_row_and_leave_none(cuts: list[int], seed: int) -> None:
    edges = [0, *sorted(cuts), 60]
    rows = [rows_of(ShardPart("", "", start, stop, seed), 60) for start, stop in pairwise(edges)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(60))
    assert all(np.array_equal(one, np.sort(one)) for one in rows)


def test_order_follows_seed_epoch_and_rank_and_comes_again(part: ShardPart) -> None:
    shard = Shard([part])
    orders = {
        seed: labels_of(shard, 7, 9, seed) for seed in [(7, 1, 0), (7, 2, 0), (7, 1, 1), (8, 1, 0), (1, 7, 0)]
    }
    assert len({str(order) for order in orders.values()}) == len(orders)
    for seed, order in orders.items():
        assert labels_of(Shard([part]), 7, 9, seed) == order


def test_last_batches_are_partial_and_empty(part: ShardPart) -> None:
    batches = labels_of(Shard([some(part, 0, 10)]), 4, 5, (0, 1, 0))
    assert [len(batch) for batch in batches] == [4, 4, 2, 0, 0]


def test_empty_batch_keeps_shape_and_type_of_a_sample(part: ShardPart, other: ShardPart) -> None:
    for parts in ([some(part, 0, 4)], [some(part, 0, 4), other]):
        *_, (images, labels) = Shard(parts).batches(50, 2, (0, 1, 0))
        assert (images.shape, images.dtype) == ((0, 2, 2, 1), np.uint8)
        assert (labels.shape, labels.dtype) == ((0,), np.int32)


def test_fewer_steps_than_needed_read_only_so_many(part: ShardPart) -> None:
    assert [len(batch) for batch in labels_of(Shard([part]), 8, 2, (0, 1, 0))] == [8, 8]


def test_shard_without_rows_has_empty_batches(part: ShardPart, tmp_path: Path) -> None:
    for parts in ([some(part, 6, 6)], [write(tmp_path, 0)]):
        shard = Shard(parts)
        assert len(shard) == 0
        assert labels_of(shard, 4, 2, (0, 1, 0)) == [[], []]
        assert list(shard.in_order(4)) == []


def test_two_parts_are_mixed_within_batches(part: ShardPart, other: ShardPart) -> None:
    batches = labels_of(Shard([part, other]), 40, 2, (3, 1, 0))
    assert all(any(label < 100 for label in batch) for batch in batches)
    assert all(any(label >= 100 for label in batch) for batch in batches)


def test_evaluation_reads_all_in_order(part: ShardPart) -> None:
    batches = [labels.tolist() for _, labels in Shard([part]).in_order(25)]
    assert [len(batch) for batch in batches] == [25, 25, 10]
    assert list(chain(*batches)) == list(range(60))


def test_rows_of_a_part_without_stop_are_all_rows() -> None:
    assert rows_of(ShardPart("", ""), 5).tolist() == [0, 1, 2, 3, 4]


def test_arrays_are_mapped_not_loaded(part: ShardPart) -> None:
    for array in open_arrays(part.images, part.labels):
        assert isinstance(array, np.memmap)
        assert array.mode == "r"


def test_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data", 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    images, _ = open_arrays("~/data/images.npy", "~/data/labels.npy")
    assert len(images) == 3


def test_what_a_node_is_sent_is_what_the_host_would_read(tmp_path: Path) -> None:
    part = write(tmp_path / "prepared", 50)
    public = DatasetInfo("prepared", 50, (2, 2, 1), "uint8", (), 49, "fingerprint")
    placed = place_shards([RankLoad("host", 20), RankLoad("csd0", 4), RankLoad("csd1", 3, 40)], 50)
    cut = cut_shards(placed, public, seed=9, project=ProjectDirectory(tmp_path))
    assert set(cut) == {"csd0"}  # csd1 is full of private samples and needs no empty file
    images, labels = (np.load(file.source) for file in cut["csd0"])
    on_host = some(part, placed[1].public_start, placed[1].public_stop, seed=9)
    rows = rows_of(on_host, 50)
    assert labels.tolist() == rows.tolist() == np.load(part.labels)[rows].tolist()
    assert np.array_equal(images, np.load(part.images)[rows])
    sent = ShardPart(*(str(file.source) for file in cut["csd0"]))
    assert labels_of(Shard([sent]), 3, 5, (9, 1, 1)) == labels_of(Shard([on_host]), 3, 5, (9, 1, 1))
    assert sorted(rows.tolist() + rows_of(some(part, 0, placed[0].public_stop, seed=9), 50).tolist()) == list(
        range(50)
    )


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "text", "pickle", "one number", "zip"])
def test_unreadable_file_is_an_error_that_names_no_file(tmp_path: Path, damage: str) -> None:
    part = write(tmp_path, 50)
    path = Path(part.labels)
    content = path.read_bytes()
    path.unlink()
    if damage == "pickle":
        np.save(path, np.array([{"a": 1}] * 50, dtype=object), allow_pickle=True)
    elif damage == "one number":
        np.save(path, np.float32(1))
    elif damage == "zip":
        with path.open("wb") as file:
            np.savez(file, labels=np.zeros(50))
    elif damage != "missing":
        path.write_bytes({"empty": b"", "short": content[:-4], "text": b"1, 2, 3\n"}[damage])
    with pytest.raises(WorkerError, match="cannot be read") as raised:
        Shard([part])
    assert str(tmp_path) not in raised.value.message
    assert "labels" not in raised.value.message


def test_images_without_as_many_labels_are_refused_with_both_numbers(tmp_path: Path) -> None:
    part = write(tmp_path, 5)
    np.save(part.labels, np.zeros(4))
    with pytest.raises(WorkerError, match="5 images but 4 labels"):
        Shard([part])
