"""Files of another user."""

import os
import stat
from pathlib import Path

import pytest

OTHER_USER = 65534
needs_root = pytest.mark.needs("root")  # to give a file to another user


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def give(path: Path) -> Path:
    """Let `path` belong to another user."""
    os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
    return path
