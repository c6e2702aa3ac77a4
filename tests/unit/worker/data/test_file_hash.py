"""The hash of a data file is computed again whenever the file may have changed."""

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.worker.data.file_hash import hash_file, open_regular
from csdctl.worker.process.errors import WorkerError

CONTENT = b"a" * 5000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "images.npy").write_bytes(CONTENT)
    (tmp_path / ".csdctl").mkdir()
    return tmp_path / "images.npy"


def remembered(path: Path) -> Path:
    return path.parent / ".csdctl" / "hashes.json"


def hash_of(path: Path) -> str:
    with open_regular(path) as file:
        return hash_file(file, "images.npy", remembered(path))[0]


def forge(path: Path) -> None:
    """Write another hash for every file, which shows whether the hash is remembered or computed."""
    content = json.loads(remembered(path).read_text())
    forged = {key: [*entry[:-1], ["forged", []]] for key, entry in content.items()}
    remembered(path).write_text(json.dumps(forged))


def test_hash_is_remembered_in_a_file_for_this_user_alone(path: Path) -> None:
    hash_of(path)
    assert stat.S_IMODE(remembered(path).stat().st_mode) == 0o600
    forge(path)
    assert hash_of(path) == "forged"


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"b")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"b" + CONTENT[1:])
    other.replace(path)


@pytest.mark.parametrize("change", [overwrite, replace])
def test_changed_file_of_the_same_size_and_time_is_hashed_again(
    path: Path, change: Callable[[Path], None]
) -> None:
    before = path.stat()
    hash_of(path)
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert hash_of(path) == hashlib.sha256(b"b" + CONTENT[1:]).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o640),
        lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), 5))),
    ],
    ids=["shared", "link", "no JSON", "other values"],
)
def test_hashes_that_others_could_have_written_are_not_believed(
    path: Path, change: Callable[[Path], object]
) -> None:
    hash_of(path)
    forge(path)
    change(remembered(path))
    assert hash_of(path) == hashlib.sha256(CONTENT).hexdigest()


def test_pipe_and_device_are_refused_without_waiting(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        open_regular(path)
    with pytest.raises(ValueError, match="not a regular file"):
        open_regular("/dev/zero")


def test_file_that_changes_while_it_is_read_has_no_hash(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checksum = zlib.crc32

    def change_meanwhile(content: bytes) -> int:
        overwrite(path)
        return checksum(content)

    monkeypatch.setattr(zlib, "crc32", change_meanwhile)
    with pytest.raises(WorkerError, match="images.npy was changed while it was read"):
        hash_of(path)
    assert not remembered(path).exists()
