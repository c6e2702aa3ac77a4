"""The host's content-addressed store."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.shipping.store import OBJECTS, StoredFile, hash_file, store_bytes, store_file


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


def test_stored_file_is_named_by_its_hash(host: Path) -> None:
    stored = store_bytes(b"abc", ".json", host)
    assert stored.sha256 == hashlib.sha256(b"abc").hexdigest() == hash_file(stored.source)
    assert stored.path == f"{OBJECTS}/{stored.sha256}.json"
    assert stored.source == host / stored.path
    assert stored.source.read_bytes() == b"abc"


def test_file_is_stored_unchanged(host: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.npz").write_bytes(b"abc")
    assert store_file(tmp_path / "weights.npz", host) == store_bytes(b"abc", ".npz", host)


@pytest.mark.parametrize("way", ["file", "bytes"])
def test_damaged_file_in_the_hosts_store_is_replaced(host: Path, tmp_path: Path, way: str) -> None:
    source = tmp_path / "source.npy"
    source.write_bytes(b"right")

    def store() -> StoredFile:
        return store_file(source, host) if way == "file" else store_bytes(b"right", ".npy", host)

    store().source.write_bytes(b"wrong")
    assert store().source.read_bytes() == b"right"
    assert len(list((host / OBJECTS).iterdir())) == 1


def test_unchanged_file_is_not_written_again(host: Path, tmp_path: Path) -> None:
    def written(stored: StoredFile) -> tuple[int, int]:
        found = stored.source.stat()
        return found.st_ino, found.st_mtime_ns  # the time of access may change: it is read again

    (tmp_path / "a.bin").write_bytes(b"abc")
    before = written(store_file(tmp_path / "a.bin", host))
    assert written(store_file(tmp_path / "a.bin", host)) == before
    assert written(store_bytes(b"abc", ".bin", host)) == before


def test_stored_file_becomes_an_object_with_its_name(host: Path) -> None:
    stored = store_bytes(b"abc", ".json", host)
    found = stored.as_object()
    assert (f"{OBJECTS}/{found.name}", found.sha256, found.size) == (
        stored.path,
        stored.sha256,
        3,
    )


def test_missing_stored_file_is_named(host: Path) -> None:
    stored = store_bytes(b"abc", ".json", host)
    stored.source.unlink()
    with pytest.raises(InputError, match=stored.sha256):
        stored.as_object()


@pytest.mark.fault(25)
def test_failed_copy_leaves_nothing_in_the_store(host: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100_000))
    script = f"""
import resource, pathlib, signal
from csdctl.shipping.store import store_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store_file(pathlib.Path({str(tmp_path / "a.bin")!r}), pathlib.Path({str(host)!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert list((host / OBJECTS).iterdir()) == []
