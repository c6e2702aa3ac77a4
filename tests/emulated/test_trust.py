"""`csdctl trust` on an emulated fleet: host keys of real servers, accepted, and refused when they change."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest
import yaml

from csdctl.emulation.fleet import EmulatedSpec, start_fleet, stop_fleet
from csdctl.fleet.fleet_file import load_fleet
from tests.emulated.running import csdctl

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The fleet file of an emulated fleet of two nodes."""
    directory = tmp_path_factory.mktemp("emulated")
    spec = EmulatedSpec(2, 0.5, 1 << 30)
    yield start_fleet(directory / "state", spec, cpu_mechanism="duty", owner_pid=os.getpid())
    stop_fleet(directory / "state")


@pytest.fixture
def project(emulated: Path, tmp_path: Path) -> Path:
    """A project with the fleet file and without known keys."""
    (tmp_path / "fleet.yaml").write_text(emulated.read_text())
    return tmp_path


def known(project: Path) -> list[str]:
    path = project / ".csdctl" / "known_hosts"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.fault(4)
def test_unknown_keys_are_refused_until_the_user_accepts_them(project: Path) -> None:
    refused = csdctl(project, "discover")
    assert refused.returncode == 4
    assert "csdctl trust --limit csd0" in refused.stdout
    unconfirmed = csdctl(project, "trust")
    assert unconfirmed.returncode == 2
    assert "--yes" in unconfirmed.stderr
    assert known(project) == []
    accepted = csdctl(project, "trust", "--yes")
    assert accepted.returncode == 0, accepted.stderr
    assert accepted.stdout.count("SHA256:") == 2
    assert csdctl(project, "discover").returncode == 0


def test_dry_run_ends_as_trust_would_when_a_node_cannot_be_asked(project: Path) -> None:
    fleet = yaml.safe_load((project / "fleet.yaml").read_text())
    fleet["nodes"][1]["port"] = 1
    (project / "down.yaml").write_text(yaml.safe_dump(fleet))
    done = csdctl(project, "trust", "--dry-run", "--fleet", "down.yaml")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "csd1" in done.stdout + done.stderr


@pytest.mark.thorough
def test_dry_run_shows_keys_and_stores_none(project: Path) -> None:
    (project / ".csdctl").mkdir(exist_ok=True)
    failed = project / ".csdctl" / "failed.json"
    failed.write_text("{}")
    shown = csdctl(project, "trust", "--dry-run", "--json")
    assert failed.read_text() == "{}", "what an earlier command recorded"
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["is_dry_run"]
    assert {key["state"] for key in document["machines"].values()} == {"new"}
    assert known(project) == []
    csdctl(project, "trust", "--yes")
    forgotten = csdctl(project, "trust", "--forget", "--limit", "csd1", "--dry-run")
    assert "csd1: 1 keys would be deleted" in forgotten.stdout
    assert len(known(project)) == 2


def test_keys_are_stored_in_plain_text_and_accepted_once(project: Path) -> None:
    csdctl(project, "trust", "--yes")
    node = load_fleet(project / "fleet.yaml").node("csd0")
    assert known(project)[0].startswith(f"[{node.address}]:{node.port} ssh-ed25519 ")
    again = csdctl(project, "trust")
    assert again.returncode == 0, "nothing is left to ask"
    assert "2 keys are already accepted" in again.stdout
    assert len(known(project)) == 2


@pytest.mark.thorough
@pytest.mark.fault(5)
def test_changed_key_is_always_refused_and_forgotten_only_by_name(project: Path) -> None:
    csdctl(project, "trust", "--yes")
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().split()[1]
    name = known(project)[0].split()[0]
    (project / ".csdctl" / "known_hosts").write_text(f"{name} ssh-ed25519 {other}\n{known(project)[1]}\n")
    refused = csdctl(project, "trust", "--yes")
    assert refused.returncode == 3
    assert "csd0: host key of" in refused.stdout
    assert "has changed" in refused.stdout
    assert other in known(project)[0], "the key that was known stays"
    assert csdctl(project, "discover").returncode == 3
    forgotten = csdctl(project, "trust", "--forget", "--limit", "csd0")
    assert "csd0: 1 keys deleted" in forgotten.stdout
    assert len(known(project)) == 1
    assert csdctl(project, "trust", "--yes").returncode == 0
    assert csdctl(project, "discover").returncode == 0


def test_json_document_lists_every_key_and_failed_machines(project: Path) -> None:
    text = (project / "fleet.yaml").read_text()
    node = load_fleet(project / "fleet.yaml").node("csd1")
    (project / "fleet.yaml").write_text(text.replace(f"port: {node.port}", "port: 1"))
    done = csdctl(project, "trust", "--yes", "--json")
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert document["schema"] == "csdctl.trust/1"
    assert document["machines"]["csd0"]["state"] == "new"
    assert document["machines"]["csd0"]["fingerprint"].startswith("SHA256:")
    assert list(document["failed"]) == ["csd1"]
