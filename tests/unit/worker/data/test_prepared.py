"""Reading shards of small data sets in which the label of a sample is its row number."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.worker.data import file_hash
from csdctl.worker.data.file_hash import REMEMBERED
from csdctl.worker.data.prepared import EpochReader, PreparedSamples, rows_of
from csdctl.worker.data.schedule import OwnSamples, Share, Span, begin_epoch
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, Runtime
from tests.unit.worker.ingest.prepared_data import sha256, slice_of


def save(directory: Path, samples: np.ndarray, labels: np.ndarray) -> DatasetSlice:
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "images.npy", samples)
    np.save(directory / "labels.npy", labels)
    return slice_of(directory)


def write(directory: Path, num_rows: int, first_label: int = 0) -> DatasetSlice:
    """Write images of which every pixel has the value of the label."""
    labels = np.arange(first_label, first_label + num_rows, dtype=np.int32)
    images = np.broadcast_to(labels.astype(np.uint8).reshape(-1, 1, 1, 1), (num_rows, 2, 2, 1))
    return save(directory, images, labels)


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> DatasetSlice:
    return write(tmp_path_factory.mktemp("data"), 60)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> DatasetSlice:
    return write(tmp_path_factory.mktemp("other"), 20, first_label=100)


def rows_from(part: DatasetSlice, start: int, stop: int, seed: int = 5) -> DatasetSlice:
    return dataclasses.replace(part, start=start, stop=stop, permutation_seed=seed)


def rank_of(
    number: int,
    private: DatasetSlice | None = None,
    public: DatasetSlice | None = None,
    sizes: tuple[int, int] = (0, 0),
    *options: int,
) -> RankSpec:
    """Return a rank with so many private and public samples."""
    return RankSpec(number, f"node{number}", 8, Runtime(1), private, public, *sizes, *options)


def run_of(*ranks: RankSpec, public: DatasetSlice | None = None) -> RunSpec:
    return RunSpec("run", "", "", Recipe(seed=7), ranks, public, None, "")


def one_rank(
    private: DatasetSlice | None, public: DatasetSlice | None, sizes: tuple[int, int], num_repeated: int = 0
) -> RunSpec:
    """Return a run of one rank; `sizes`: its numbers of private and public samples without repeated ones."""
    rank = rank_of(0, private, public, (sizes[0] + num_repeated, sizes[1]))
    return run_of(dataclasses.replace(rank, num_repeated=num_repeated), public=public)


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), max_size=5), st.integers(0, 2**31))
def test_slices_of_one_permutation_are_disjoint_and_complete(cuts: list[int], seed: int) -> None:
    edges = [0, *sorted(cuts), 60]
    rows = [rows_of(DatasetSlice("", "", start, stop, seed), 60) for start, stop in pairwise(edges)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(60))
    assert all(np.array_equal(one, np.sort(one)) for one in rows)


def test_rank_reads_each_epoch_in_its_own_order_and_from_its_own_view(tmp_path: Path) -> None:
    """The same as a process that begins with this epoch, after a restart."""
    part = write(tmp_path, 60)
    labels = np.concatenate([np.arange(30), np.arange(100, 130)]).astype(np.int32)
    np.save(part.labels, labels)  # two views of 30 samples, here with other labels
    spec = one_rank(None, dataclasses.replace(slice_of(tmp_path), num_views=2), (0, 30))
    first_half = Share(0, 15, 0, 0, 0, 15)
    reader = EpochReader(spec, 0)
    read = []
    for epoch in (1, 2, 3, 4):
        reader.set_epoch(epoch)
        read.append(reader.read(first_half)[1].tolist())
        again = EpochReader(spec, 0)
        again.set_epoch(epoch)
        assert again.read(first_half)[1].tolist() == read[-1]
    assert [{label // 100 for label in one} for one in read] == [{1}, {0}, {1}, {0}]
    assert len({tuple(label % 100 for label in one) for one in read}) == 4


def test_orders_of_seeds_epochs_ranks_and_of_private_and_public_samples_differ(
    part: DatasetSlice, tmp_path: Path
) -> None:
    private, orders = write(tmp_path, 60), []
    ranks = [rank_of(rank, private, part, (60, 60)) for rank in range(3)]
    for seed, rank, epoch in itertools.product((7, 8), range(3), (1, 2)):
        spec = dataclasses.replace(run_of(*ranks, public=part), recipe=Recipe(seed=seed))
        reader = EpochReader(spec, rank)
        reader.set_epoch(epoch)
        for share in (Share(rank, 9, 0, 9, 0, 0), Share(rank, 9, 0, 0, 0, 9)):
            orders.append(tuple(reader.read(share)[1].tolist()))
    assert len(set(orders)) == len(orders) == 2 * 3 * 2 * 2


@pytest.mark.parametrize("changed", ["public/images.npy", "own/labels.npy"])
def test_file_that_is_changed_during_an_epoch_is_refused_in_the_next(tmp_path: Path, changed: str) -> None:
    """Also one that the host reads for others."""
    public, own = write(tmp_path / "public", 60), write(tmp_path / "own", 8)
    spec = run_of(rank_of(0, own, None, (8, 0)), rank_of(1, sizes=(0, 60)), public=public)
    reader = EpochReader(spec, 0)
    reader.set_epoch(1)
    before = sha256(tmp_path / changed)
    with (tmp_path / changed).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    hashes = f"expected SHA-256 {before}, found {sha256(tmp_path / changed)}"
    with pytest.raises(WorkerError, match=f"{changed} is not what was prepared: {hashes}") as raised:
        reader.set_epoch(2)
    assert raised.value.remedy.startswith("run `csdctl prepare`")


def damage_unnoticed(path: Path) -> None:
    """Flip a byte as a failing disk does: the file's state and what is remembered of it stay the same."""
    before = path.stat()
    with path.open("r+b") as file:
        place = before.st_size - 5
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, place)[0] ^ 1]), place)
    key, after = f"{before.st_dev}:{before.st_ino}", path.stat()
    entries = json.loads(REMEMBERED.read_text())
    entries[key][1:3] = [after.st_mtime_ns, after.st_ctime_ns]
    REMEMBERED.write_text(json.dumps(entries))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_byte_that_the_disk_has_damaged_is_found_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, order: Literal["C", "F"]
) -> None:
    """The rows before it can be read. The file is then refused until it is prepared again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_hash, "MIN_CHUNK_BYTES", 256)
    REMEMBERED.parent.mkdir()
    labels = np.arange(600, dtype=np.int32)
    images = np.asarray(np.broadcast_to(labels.reshape(-1, 1, 1), (600, 2, 2)), np.uint8, order=order)
    part = save(tmp_path / "data", images, labels)
    PreparedSamples(part)
    damage_unnoticed(tmp_path / "data" / name)
    samples = PreparedSamples(part)
    samples.check()
    if order == "C" or name == "labels.npy":
        assert samples.span(0, 500)[1].tolist() == [*range(500)]
    with pytest.raises(JobError, match=f"{name} is not what was prepared: expected SHA-256 "):
        samples.span(500, 100)
    with pytest.raises(JobError, match=f"{name} is not what was prepared"):
        PreparedSamples(part)


def test_checksum_that_the_disk_has_damaged_is_no_damage_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    REMEMBERED.parent.mkdir()
    part = write(tmp_path / "data", 60)
    PreparedSamples(part)
    entries = json.loads(REMEMBERED.read_text())
    for entry in entries.values():
        entry[-1][1] = [1]
    REMEMBERED.write_text(json.dumps(entries))
    assert PreparedSamples(part).span(0, 60)[1].tolist() == [*range(60)]


def structured(directory: Path, num_rows: int = 40) -> DatasetSlice:
    """Write samples with two inputs, and labels of two outputs with weights, as wide as users give them."""
    samples = np.zeros(num_rows, [("a", "f4", (2,)), ("b", "i8")])
    samples["a"][:, 1] = samples["b"] = np.arange(num_rows)
    labels = np.zeros(num_rows, [("u", "u1"), ("v", "f8", (3,)), ("sample_weight", "f4")])
    labels["u"], labels["sample_weight"] = np.arange(num_rows), np.arange(num_rows) / 8
    labels["v"][:, 2] = np.arange(num_rows)
    return save(directory, samples, labels)


def test_host_reads_reassigned_samples_as_their_own_rank_would_and_fields_stay_together(
    tmp_path: Path,
) -> None:
    """Rank 1 has public[30:40]; the host reads the rows that rank 1 would have read from its own file."""
    part, other = structured(tmp_path / "public"), structured(tmp_path / "private", 20)
    own = rank_of(0, other, rows_from(part, 0, 30, 7), (20, 30))
    host = EpochReader(run_of(own, rank_of(1, None, None, (0, 10), 30), public=part), 0)
    host.set_epoch(3)
    spans = (Span(1, 2, 6),)
    rows = host.read_reassigned(spans)[0]["b"].tolist()
    assert len(set(rows) & set(rows_of(rows_from(part, 30, 40, 7), 40).tolist())) == 4
    packed = host.pack_reassigned(spans)
    share = Share(0, 8, 0, 5, 0, 7, spans)
    for samples, labels in (host.read(share, packed), host.read(share), host.first(0)):
        assert labels.dtype == np.dtype([("u", "i4"), ("v", "f4", (3,)), ("sample_weight", "f4")])
        assert np.array_equal(labels["u"], samples["b"])
        assert np.array_equal(labels["v"][:, 2], samples["a"][:, 1])
        assert np.array_equal(labels["sample_weight"], samples["b"].astype(np.float32) / 8)
    assert len(host.read(share, packed)[0]) == 16
    assert len(packed) == 4 * (samples.dtype.itemsize + labels.dtype.itemsize)


PICKLED = np.array([{"a": 1}] * 50, dtype=object)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-4]),
        lambda path: np.save(path, PICKLED, allow_pickle=True),
    ],
    ids=["missing", "short", "pickle"],
)
def test_unreadable_file_is_an_error_that_names_no_file(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    damage(Path(write(tmp_path, 50).labels))
    with pytest.raises(WorkerError, match="cannot be read") as raised:
        PreparedSamples(slice_of(tmp_path))
    assert str(tmp_path) not in raised.value.message
    assert "labels" not in raised.value.message


@settings(deadline=None)
@given(*(st.integers(0, 60),) * 2, st.integers(0, 70), st.integers(1, 60), st.integers(1, 99))
def test_public_rows_are_read_once_and_repeated_private_ones_equally_often_first_in_a_batch_and_counted(
    part: DatasetSlice,
    other: DatasetSlice,
    start: int,
    stop: int,
    num_repeated: int,
    batch_size: int,
    epoch: int,
) -> None:
    mine, num_public = rows_from(part, start, stop), max(0, stop - start)
    reader = EpochReader(one_rank(other, mine, (20, num_public), num_repeated), 0)
    reader.set_epoch(epoch)
    segment = begin_epoch([OwnSamples(20 + num_repeated, num_public)], {0: batch_size})
    all_private, all_public = list[int](), list[int]()
    for step in range(segment.stop_step):
        share = segment.shares[0].batch(step)
        images, read = reader.read(share)
        assert images.shape == (len(read), 2, 2, 1)
        assert np.array_equal(images[:, 0, 0, 0], read.astype(np.uint8))
        labels = read.tolist()
        copies = reader.private_copies(share).tolist()
        private, public = labels[: len(copies)], labels[len(copies) :]
        assert [private.count(label) for label in private] == copies
        all_private += private
        all_public += public
    assert sorted(all_public) == sorted(rows_of(mine, 60).tolist())
    times = [all_private.count(label) for label in range(100, 120)]
    assert sum(times) == len(all_private) == 20 + num_repeated
    assert max(times) - min(times) <= 1
