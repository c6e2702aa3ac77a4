"""Files that survive a crash, and files that no other user can have made or read."""

import os
from pathlib import Path
from typing import Any

import pytest

from csdctl.worker.process.files import BoundedFile, open_private, save_atomically


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Note what is synced to disk and what is renamed, in order, by the names of the files."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def noting_replace(source: Any, target: Any) -> None:
        calls.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    return calls


def test_text_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = note_calls(monkeypatch)
    (tmp_path / "it").write_text("before")
    save_atomically(tmp_path / "it", "after")
    assert (tmp_path / "it").read_text() == "after"
    assert calls == [("fsync", ".it.new"), ("replace", "it")]


def test_private_file_is_made_for_this_user_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_private(tmp_path / "it")
    for is_creating in (True, False):
        os.close(open_private(tmp_path / "it", is_creating=is_creating))
        assert (tmp_path / "it").stat().st_mode & 0o777 == 0o600


def test_no_more_is_asked_of_a_file_than_it_has(tmp_path: Path) -> None:
    """Memory is allocated for what is asked: an archive may say any size."""
    (tmp_path / "it").write_bytes(b"12345")
    for size in (-1, None, 1 << 60):
        with BoundedFile(open(tmp_path / "it", "rb", buffering=0)) as file:
            assert file.read(size) == b"12345"
