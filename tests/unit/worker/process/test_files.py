"""Files that only this user can have made, and files that survive a crash."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.worker.process.files import BoundedFile, open_private, save_atomically


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    (directory / "file").write_text("content")
    (directory / "file").chmod(0o600)
    return directory / "file"


def test_private_file_is_opened_for_reading_and_writing(path: Path) -> None:
    descriptor = open_private(path)
    assert os.read(descriptor, 100) == b"content"
    os.write(descriptor, b"!")
    os.close(descriptor)
    assert path.read_text() == "content!"


def link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o640),
        lambda path: path.chmod(0o602),
        lambda path: path.parent.chmod(0o770),
        lambda path: path.parent.chmod(0o702),
        lambda path: os.link(path, path.with_name("second")),
        link,
        pipe,
    ],
)
@pytest.mark.parametrize("is_creating", [True, False])
def test_what_another_user_may_have_made_or_can_read_is_refused(
    path: Path, change: Callable[[Path], object], is_creating: bool
) -> None:
    change(path)
    with pytest.raises(OSError):  # noqa: PT011, of several kinds
        open_private(path, is_creating=is_creating)


def test_missing_file_is_created_only_on_request_and_for_this_user_alone(path: Path) -> None:
    path.unlink()
    with pytest.raises(FileNotFoundError):
        open_private(path)
    umask = os.umask(0)
    try:
        os.close(open_private(path, is_creating=True))
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600


def test_content_is_on_the_disk_before_it_gets_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    sync = os.fsync

    def record(file: int) -> None:
        seen.append((os.fstat(file).st_size, path.read_text()))
        sync(file)

    monkeypatch.setattr(os, "fsync", record)
    save_atomically(path, "other")
    assert seen == [(5, "content")]
    assert path.read_text() == "other"
    assert [found.name for found in path.parent.iterdir()] == ["file"]


def test_file_is_never_asked_for_more_than_it_has(path: Path) -> None:
    with BoundedFile(open(path, "rb", buffering=0)) as file:
        assert file.read(1 << 62) == b"content"
    with BoundedFile(open(path, "rb", buffering=0)) as file:
        assert file.read(3) == b"con"
        assert file.read() == b"tent"
