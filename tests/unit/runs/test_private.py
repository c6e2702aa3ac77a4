"""The directory of csdctl is for one user alone; where the step file is while a run trains, and after."""

import fnmatch
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory, keep_step_file
from csdctl.runs.private import check_private
from csdctl.standalone.leftovers import step_files


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o705, 0o710, 0o700])
def test_directory_that_others_may_enter_is_narrowed(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / ".csdctl"
    directory.mkdir()
    directory.chmod(mode)
    check_private(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("make", "message", "remedy"),
    [
        (Path.touch, "is not a directory\n", "move that file away"),
        (lambda path: path.symlink_to("/missing"), "is not a directory, but a link to /missing", "mount or"),
    ],
)
def test_what_is_no_directory_is_named(
    tmp_path: Path, make: Callable[[Path], None], message: str, remedy: str
) -> None:
    """Nothing below it can be found, which must not look like a project without runs."""
    project = ProjectDirectory(tmp_path)
    project.state.mkdir()
    make(project.runs)
    with pytest.raises(
        InputError, match=f"{project.runs}, where csdctl keeps its files, {message}"
    ) as raised:
        project.run_ids()
    assert raised.value.remedy.startswith(remedy)
    shutil.rmtree(project.state)
    make(project.state)
    with pytest.raises(InputError, match=f"{project.state}, where csdctl keeps its files, {message}"):
        check_private(project.state)
    project.state.unlink()
    assert project.run_ids() == []


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(b"state")
    return path


def test_step_file_of_a_run_that_failed_is_on_the_disk_before_the_one_in_memory_is_removed(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "run" / "step.state"
    kept.parent.mkdir()
    kept.write_text("of an earlier attempt")
    kept.with_name(".step.state.6d0ae13a").write_text("left by a csdctl that was killed")
    synced: list[tuple[str, str, bool]] = []
    sync = os.fsync

    def record(file: int) -> None:
        sync(file)
        synced.append((Path(f"/proc/self/fd/{file}").readlink().stem, kept.read_text(), memory.exists()))

    monkeypatch.setattr(os, "fsync", record)
    keep_step_file(memory, kept)
    assert synced == [(".step.state", "of an earlier attempt", True), ("run", "state", True)]
    assert kept.read_bytes() == b"state"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert list(kept.parent.iterdir()) == [kept]
    assert not memory.exists()


def test_state_stays_in_memory_when_the_disk_takes_nothing(memory: Path, tmp_path: Path) -> None:
    (tmp_path / "no directory").touch()
    keep_step_file(memory, tmp_path / "no directory" / "step.state")
    assert memory.exists()


@pytest.mark.needs("shared memory")
def test_clean_finds_the_step_files_of_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = ProjectDirectory(tmp_path)
    path = project.step_file(project.new_run())
    monkeypatch.chdir(tmp_path)
    assert fnmatch.fnmatch(str(path), step_files())
    monkeypatch.chdir(tmp_path.parent)
    assert not fnmatch.fnmatch(str(path), step_files())
