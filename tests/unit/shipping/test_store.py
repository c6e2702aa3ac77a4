"""The host's content-addressed store."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.shipping.store import OBJECTS, hash_file, read_chunk, store_bytes, store_file


def test_stored_file_is_named_by_its_hash(host: Path, tmp_path: Path) -> None:
    stored = store_bytes(b"abc", ".json", host)
    assert stored.sha256 == hashlib.sha256(b"abc").hexdigest() == hash_file(stored.source)
    assert stored.path == f"{OBJECTS}/{stored.sha256}.json"
    assert stored.source == host / stored.path
    assert stored.source.read_bytes() == b"abc"
    assert stored.size == 3
    (tmp_path / "weights.json").write_bytes(b"abc")
    assert store_file(tmp_path / "weights.json", host) == stored
    stored.source.unlink()
    with pytest.raises(InputError, match=stored.sha256):
        read_chunk(stored, 0)


def test_only_a_damaged_file_in_the_hosts_store_is_written_again(host: Path, tmp_path: Path) -> None:
    (tmp_path / "source.npy").write_bytes(b"right")
    path = store_file(tmp_path / "source.npy", host).source
    before = path.stat()
    assert store_bytes(b"right", ".npy", host).source == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.write_bytes(b"wrong")
    store_file(tmp_path / "source.npy", host)
    assert path.read_bytes() == b"right"
    assert len(list((host / OBJECTS).iterdir())) == 1


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
