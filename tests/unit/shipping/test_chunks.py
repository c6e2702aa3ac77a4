"""Special files are never opened."""

import os
import socket
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.shipping.chunks import printable
from csdctl.shipping.payload import TreeRequest, read_tree


def test_special_file_is_never_opened(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    (tmp_path / "tree").mkdir()
    listening.bind(str(tmp_path / "tree" / "s"))
    with pytest.raises(InputError, match="is a socket and cannot be deployed"):
        read_tree(TreeRequest(tmp_path / "tree", "there"))
    listening.close()
    assert printable(os.fsdecode(b"\xff")) == "\\xff"
