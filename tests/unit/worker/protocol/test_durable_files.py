"""Files and directories are synced, then named; interrupted and killed writers leave nothing for long."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from csdctl.worker.protocol.durable_files import (
    replacing,
    replacing_by_name,
    replacing_directory,
    save_bytes,
    save_text,
)
from tests.full_disk import full_disk

WRITERS = [replacing, replacing_by_name, replacing_directory]
Writer = Callable[[Path], AbstractContextManager[Any]]
WRITER_PROGRAM = """\
import sys
from pathlib import Path

from csdctl.worker.protocol import durable_files

with getattr(durable_files, sys.argv[1])(Path(sys.argv[2])):
    print(flush=True)
    sys.stdin.read()
"""


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Note what is synced to disk and what is renamed, in order, by names without the random part."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append(("fsync", path.stem if path.name.startswith(".") else path.name))
        fsync(descriptor)

    def noting_replace(source: Any, target: Any) -> None:
        calls.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    return calls


def content_of(directory: Path) -> dict[str, bytes]:
    paths = directory.rglob("*")
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths if path.is_file()}


def write(writer: Writer, path: Path, content: bytes) -> None:
    """Write `content` with a writer, into a directory as its file `file`."""
    with writer(path) as target:
        if isinstance(target, Path):
            (target / "file" if target.is_dir() else target).write_bytes(content)
        else:
            target.write(content)


def test_content_new_parents_and_name_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top").mkdir()
    calls = note_calls(monkeypatch)
    save_bytes(tmp_path / "top" / "a" / "b" / "file", b"new")
    parents = [("fsync", "top"), ("fsync", "a")]
    assert calls == [*parents, ("fsync", ".file"), ("replace", "file"), ("fsync", "b")]


def test_file_written_by_its_name_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top").mkdir()
    calls = note_calls(monkeypatch)
    write(replacing_by_name, tmp_path / "top" / "model.keras", b"new")
    assert calls == [("fsync", "model.keras"), ("replace", "model.keras"), ("fsync", "top")]


def test_all_in_a_directory_is_synced_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "top").mkdir()
    calls = note_calls(monkeypatch)
    with replacing_directory(tmp_path / "top" / "model") as directory:
        (directory / "deeper").mkdir()
        for name in ("one", "deeper/two"):
            (directory / name).write_bytes(b"content")
    assert {name for call, name in calls[:4] if call == "fsync"} == {"one", "two", "deeper", ".model"}
    assert calls[4:] == [("replace", "model"), ("fsync", "top")]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_directories_of_a_file_system_that_syncs_none_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fsync = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    save_text(tmp_path / "new" / "file", "content")
    assert (tmp_path / "new" / "file").read_text() == "content"


def test_missing_directories_are_for_this_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        save_text(tmp_path / "a" / "b" / "file", "content")
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/file")]
    assert modes == [0o700, 0o700, 0o600]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    save_bytes(tmp_path / "file", b"old")
    with full_disk(4096), pytest.raises(OSError, match="too large"):
        save_bytes(tmp_path / "file", bytes(100_000))
    assert content_of(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("writer", WRITERS)
def test_interrupted_write_leaves_what_was_there(tmp_path: Path, writer: Writer) -> None:
    write(writer, tmp_path / "path", b"old")
    before = content_of(tmp_path)
    with contextlib.suppress(KeyboardInterrupt), writer(tmp_path / "path"):
        raise KeyboardInterrupt
    assert content_of(tmp_path) == before
    assert os.listdir(tmp_path) == ["path"]
    write(writer, tmp_path / "path", b"new")
    assert [*content_of(tmp_path).values()] == [b"new"]


def start_writing(writer: Writer, path: Path) -> "subprocess.Popen[bytes]":
    """Start a process that is in the middle of writing `path`."""
    command = [sys.executable, "-c", WRITER_PROGRAM, writer.__name__, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path, writer: Writer) -> None:
    unrelated = [
        ".path.html",
        ".path.html.original",
        ".path.txt.01234567",
        ".other.01234567",
        "path.01234567",
    ]
    for name in unrelated:
        (tmp_path / name).touch()
    process = start_writing(writer, tmp_path / "path")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(os.listdir(tmp_path)) == len(unrelated) + 1
    write(writer, tmp_path / "path", b"new")
    assert {*os.listdir(tmp_path)} == {*unrelated, "path"}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_that_still_writes_is_left_alone(tmp_path: Path, writer: Writer) -> None:
    process = start_writing(writer, tmp_path / "path")
    with writer(tmp_path / "path") as target:
        assert len(os.listdir(tmp_path)) == 2
        if isinstance(target, Path) and not target.is_dir():
            target.touch()
    assert len(os.listdir(tmp_path)) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
