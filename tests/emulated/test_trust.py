"""`csdctl trust` on an emulated fleet: host keys of real servers, accepted, and refused when they change."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.emulation.fleet import EmulatedSpec, start_fleet, stop_fleet
from csdctl.fleet.fleet_file import load_fleet
from tests.emulated.running import csdctl, document, refuse, succeed

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The fleet file of an emulated fleet of two nodes."""
    directory = tmp_path_factory.mktemp("emulated")
    spec = EmulatedSpec((0.5, 0.5), 1 << 30)
    yield start_fleet(directory / "state", spec, cpu_mechanism="duty", owner_pid=os.getpid())
    stop_fleet(directory / "state")


@pytest.fixture
def project(emulated: Path, tmp_path: Path) -> Path:
    """A project with the fleet file and without known keys."""
    (tmp_path / "fleet.yaml").write_text(emulated.read_text())
    return tmp_path


@pytest.mark.fault(4)
def test_unknown_keys_are_refused_until_the_user_accepts_them(project: Path) -> None:
    assert "csdctl trust --limit csd0" in refuse(project, "discover", code=4)
    assert "--yes" in refuse(project, "trust")
    shown = document(project, "trust", "--dry-run")
    assert {key["state"] for key in shown["machines"].values()} == {"new"}
    known_hosts = project / ".csdctl" / "known_hosts"
    assert not known_hosts.exists()
    assert succeed(project, "trust", "--yes").stdout.count("SHA256:") == 2
    succeed(project, "discover")
    node = load_fleet(project / "fleet.yaml").node("csd0")
    assert known_hosts.read_text().startswith(f"[{node.address}]:{node.port} ssh-ed25519 ")
    assert "2 keys already accepted" in succeed(project, "trust").stdout


def test_machine_that_cannot_be_asked_is_named_beside_the_keys_of_the_others(project: Path) -> None:
    node = load_fleet(project / "fleet.yaml").node("csd1")
    text = (project / "fleet.yaml").read_text()
    (project / "fleet.yaml").write_text(text.replace(f"port: {node.port}", "port: 1"))
    for options in (("--dry-run",), ("--yes",)):
        done = csdctl(project, "trust", *options, "--json")
        assert done.returncode == 3
        found = json.loads(done.stdout)
        assert found["machines"]["csd0"]["fingerprint"].startswith("SHA256:")
        assert list(found["failed"]) == ["csd1"]
