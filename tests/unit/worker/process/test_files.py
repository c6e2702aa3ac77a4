"""Files of bounded size, and files that no other user can have made or read."""

import os
from pathlib import Path

import pytest

from csdctl.worker.process.files import BoundedFile, open_private


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
