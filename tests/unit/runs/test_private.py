"""The directory of csdctl's own files is for one user alone."""

import stat
from pathlib import Path

import pytest

from csdctl.runs.private import check_private


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o705, 0o710, 0o700])
def test_directory_that_others_may_enter_is_narrowed(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / ".csdctl"
    directory.mkdir()
    directory.chmod(mode)
    check_private(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_missing_directory_is_not_created(tmp_path: Path) -> None:
    check_private(tmp_path / ".csdctl")
    assert list(tmp_path.iterdir()) == []
