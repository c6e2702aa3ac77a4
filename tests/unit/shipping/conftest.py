"""A source tree on the host, and the machines that receive it."""

from pathlib import Path

import pytest

from csdctl.transport.local import LocalSession
from tests.unit.shipping.delivering import Machine, fill
from tests.unit.transport.conftest import machine, server, ssh  # noqa: F401


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "of-host"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "of-host" / "tree", a=b"one", deep__b=b"two", deep__c=b"one")


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    (tmp_path / "node").mkdir()
    return LocalSession("csd0", tmp_path / "node"), tmp_path / "node"
