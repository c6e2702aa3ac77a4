"""A source tree on the host, the machines that receive it, delivery to them, and what arrived."""

from pathlib import Path
from typing import Any

import pytest

from csdctl.shipping.deliver import Delivery, TreeRequest, deliver, pack_payload, read_tree
from csdctl.shipping.store import StoredFile
from csdctl.transport.local import LocalSession
from tests.unit.transport.conftest import machine, server, ssh  # noqa: F401

Machine = tuple[Any, Path]
"""A session and the home directory that its commands start in."""


def send(session: Any, *files: StoredFile, **options: Any) -> Delivery:
    return deliver(session, pack_payload(files), **options)


def send_tree(session: Any, source: Path, destination: str = "there", **options: Any) -> Delivery:
    payload = pack_payload(trees=[read_tree(TreeRequest(source, destination))])
    return deliver(session, payload, **options)


def content_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def parts(home: Path) -> list[Path]:
    return [*home.rglob("*.part"), *(home / ".csdctl").rglob(".part-*")]


def fill(directory: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "of-host"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "of-host" / "tree", a=b"one", deep__b=b"two", deep__c=b"one")


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    (tmp_path / "node").mkdir()
    home = tmp_path / "node"
    return LocalSession("csd0", home, {"HOME": str(home)}), home
