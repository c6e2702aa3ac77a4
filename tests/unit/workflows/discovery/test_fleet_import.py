"""A fleet file from another source of nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import Node
from csdctl.workflows.discovery.inventory import FoundNodes, import_fleet


@dataclass
class TwoNodes:
    """A source of two nodes that counts how often it was read."""

    name: str = "two nodes"
    origin: str = "Written by a test"
    num_reads: int = 0

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        self.num_reads += 1
        return FoundNodes((Node("csd0", "10.0.0.1"), Node("csd1", "10.0.0.2")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet.yaml"


def test_imported_fleet_is_written(path: Path) -> None:
    found = import_fleet(TwoNodes(), path, directory=path.parent)
    assert [node.name for node in load_fleet(path).nodes] == ["csd0", "csd1"]
    assert path.read_text() == found.text


def test_dry_run_writes_nothing_and_may_find_a_file(path: Path) -> None:
    path.write_text("nodes: []\n")
    found = import_fleet(TwoNodes(), path, directory=path.parent, is_dry_run=True)
    assert "csd[0-1]" in found.text
    assert path.read_text() == "nodes: []\n"


def test_existing_file_is_an_error_before_the_source_is_read(path: Path) -> None:
    path.write_text("nodes: []\n")
    source = TwoNodes()
    with pytest.raises(InputError, match=r"fleet\.yaml already exists"):
        import_fleet(source, path, directory=path.parent)
    assert source.num_reads == 0


def test_existing_file_is_overwritten_when_allowed(path: Path) -> None:
    path.write_text("nodes: []\n")
    import_fleet(TwoNodes(), path, directory=path.parent, force=True)
    assert len(load_fleet(path).nodes) == 2
