import contextlib
import os
import stat
from pathlib import Path

import pytest

from csdctl.documents import build_atomically, save_bytes, save_text, write_atomically
from tests.full_disk import full_disk
from tests.unit.worker.process.test_files import note_calls


class TestSaving:
    def test_content_is_synced_before_renaming(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = note_calls(monkeypatch)
        save_bytes(tmp_path / "file", b"new")
        assert [name for name, _ in calls[:2]] == ["fsync", "replace"]

    def test_files_are_synced_before_their_directory_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int | str] = []
        sync, rename = os.fsync, os.rename
        monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.fstat(file).st_ino), sync(file)))
        monkeypatch.setattr(os, "rename", lambda *given: (calls.append("rename"), rename(*given)))
        with build_atomically(tmp_path / "model") as temporary:
            (temporary / "deeper").mkdir()
            for name in ("one", "deeper/two"):
                (temporary / name).write_bytes(b"content")
        files = {(tmp_path / "model" / name).stat().st_ino for name in ("one", "deeper/two")}
        assert files <= set(calls[: calls.index("rename")])

    def test_missing_directories_are_for_this_user_alone(self, tmp_path: Path) -> None:
        umask = os.umask(0)
        try:
            save_text(tmp_path / "a" / "b" / "file", "content")
        finally:
            os.umask(umask)
        modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/file")]
        assert modes == [0o700, 0o700, 0o600]

    def test_failed_and_interrupted_writes_leave_only_the_old_file(self, tmp_path: Path) -> None:
        save_bytes(tmp_path / "file", b"old")
        with full_disk(4096), pytest.raises(OSError, match="too large"):
            save_bytes(tmp_path / "file", bytes(100_000))
        with contextlib.suppress(KeyboardInterrupt), write_atomically(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}

    def test_directory_is_complete_or_absent(self, tmp_path: Path) -> None:
        with contextlib.suppress(KeyboardInterrupt), build_atomically(tmp_path / "model") as temporary:
            (temporary / "half").write_bytes(b"x")
            raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []
        for content in (b"one", b"two"):
            with build_atomically(tmp_path / "model") as temporary:
                (temporary / "file").write_bytes(content)
            assert [path.name for path in tmp_path.iterdir()] == ["model"]
            assert (tmp_path / "model" / "file").read_bytes() == content
