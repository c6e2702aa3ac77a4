"""The store between a host and one machine, both of them directories here."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csdctl.errors import NodeError, RemoteCommandError
from csdctl.shipping.store import (
    OBJECTS,
    StoredFile,
    deliver,
    find_missing,
    hash_file,
    store_bytes,
    store_file,
)
from csdctl.transport.fake import FakeSession
from csdctl.transport.local import LocalSession


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


@pytest.fixture
def node(home: Path) -> Iterator[LocalSession]:
    session = LocalSession("csd0", home)
    yield session
    session.close()


@pytest.fixture
def files(host: Path) -> list[StoredFile]:
    return [store_bytes(f"content {number}".encode(), ".bin", host) for number in range(3)]


def test_stored_file_lies_under_its_own_hash(host: Path) -> None:
    stored = store_bytes(b"abc", ".json", host)
    assert stored.sha256 == hashlib.sha256(b"abc").hexdigest() == hash_file(stored.source)
    assert stored.path == f"{OBJECTS}/{stored.sha256}.json"
    assert stored.source == host / stored.path
    assert stored.source.read_bytes() == b"abc"


def test_file_is_stored_as_its_bytes_are(host: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.npz").write_bytes(b"abc")
    assert store_file(tmp_path / "weights.npz", host) == store_bytes(b"abc", ".npz", host)


@pytest.mark.parametrize("way", ["file", "bytes"])
def test_damaged_file_in_the_hosts_own_store_is_replaced(host: Path, tmp_path: Path, way: str) -> None:
    source = tmp_path / "source.npy"
    source.write_bytes(b"right")

    def store() -> StoredFile:
        return store_file(source, host) if way == "file" else store_bytes(b"right", ".npy", host)

    store().source.write_bytes(b"wrong")
    assert store().source.read_bytes() == b"right"
    assert len(list((host / OBJECTS).iterdir())) == 1


def test_unchanged_file_is_not_written_again(host: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    before = store_file(tmp_path / "a.bin", host).source.stat()
    assert store_file(tmp_path / "a.bin", host).source.stat() == before
    assert store_bytes(b"abc", ".bin", host).source.stat() == before


def test_all_files_arrive_at_an_empty_machine(
    node: LocalSession, home: Path, files: list[StoredFile]
) -> None:
    delivery = deliver(node, files)
    assert (delivery.num_sent, delivery.bytes_sent, delivery.num_present) == (3, 27, 0)
    for file in files:
        assert hash_file(home / file.path) == file.sha256


def test_only_what_is_missing_is_sent(node: LocalSession, home: Path, files: list[StoredFile]) -> None:
    deliver(node, files[:2])
    times = [(home / file.path).stat().st_mtime_ns for file in files[:2]]
    delivery = deliver(node, files)
    assert (delivery.num_sent, delivery.bytes_sent, delivery.num_present) == (1, 9, 2)
    assert [(home / file.path).stat().st_mtime_ns for file in files[:2]] == times
    assert deliver(node, files).num_sent == 0


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(b"CONTENT 1"), id="same size, other bytes"),
        pytest.param(lambda path: path.write_bytes(b"cont"), id="cut short"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.unlink(), id="gone"),
    ],
)
def test_damaged_file_is_found_and_replaced(
    node: LocalSession, home: Path, files: list[StoredFile], damage: Callable[[Path], object]
) -> None:
    deliver(node, files)
    damage(home / files[1].path)
    assert find_missing(node, files) == [files[1]]
    assert deliver(node, files).num_sent == 1
    assert (home / files[1].path).read_bytes() == b"content 1"


def test_nothing_to_deliver_asks_the_machine_nothing() -> None:
    session = FakeSession("csd0")
    assert deliver(session, []).num_sent == 0
    assert session.commands == []


def test_file_that_arrives_damaged_is_an_error_with_the_nodes_name(files: list[StoredFile]) -> None:
    session = FakeSession("csd4").on("sh", stdout=f"{'0' * 64}  {files[0].path}\n")
    with pytest.raises(NodeError, match="3 of 3 files arrived damaged") as raised:
        deliver(session, files)
    assert raised.value.node == "csd4"


def test_machine_that_cannot_hash_is_told_what_it_needs(files: list[StoredFile]) -> None:
    session = FakeSession("csd4").on("sh", exit_code=127, stderr="sh: not found")
    with pytest.raises(RemoteCommandError) as raised:
        deliver(session, files)
    assert "sha256sum" in raised.value.remedy
