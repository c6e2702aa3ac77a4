"""Transport, probes and discovery on an emulated fleet, with real servers and sockets."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.emulation.fleet import EmulatedSpec, fleet_status, start_fleet, stop_fleet
from csdctl.fleet.facts import load_facts
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import Fleet
from csdctl.transport.many import open_sessions, run_on_all
from csdctl.workflows.discovery.discover import discover
from tests.patience import eventually
from tests.started_programs import start_and_kill

pytestmark = pytest.mark.emulated

MEMORY_BYTES = 1 << 30


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project directory with a running emulated fleet; its file is `.csdctl/emulated/fleet.yaml`."""
    directory = tmp_path_factory.mktemp("project")
    emulated = directory / ".csdctl" / "emulated"
    spec = EmulatedSpec(num_nodes=2, cpu=0.5, memory_bytes=MEMORY_BYTES)
    start_fleet(emulated, spec, owner_pid=os.getpid())
    yield directory
    stop_fleet(emulated)


@pytest.fixture
def fleet(project: Path) -> Fleet:
    return load_fleet(project / ".csdctl" / "emulated" / "fleet.yaml")


def csdctl(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from csdctl.cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=project, capture_output=True, text=True, check=False
    )


def test_every_node_has_its_own_home(project: Path, fleet: Fleet) -> None:
    with open_sessions(fleet, directory=project) as sessions:
        assert not sessions.failed
        homes = run_on_all(sessions.nodes, lambda session: session.run(["pwd"]).output)
    assert len({outcome.get() for outcome in homes.values()}) == 2


def test_programs_on_a_node_end_when_csdctl_is_killed(project: Path) -> None:
    emulated = project / ".csdctl" / "emulated"
    start_and_kill(str(emulated), "csd0")
    assert eventually(lambda: not fleet_status(emulated)[0].num_processes)


def test_limits_of_the_nodes_are_discovered_and_kept(project: Path, fleet: Fleet) -> None:
    result = discover(fleet, directory=project)
    assert not result.failed
    saved = load_facts(fleet)
    assert set(saved) == {"host", "csd0", "csd1"}
    assert {saved[name].cpu_limit for name in ("csd0", "csd1")} == {0.5}
    assert {saved[name].memory_limit_bytes for name in ("csd0", "csd1")} == {MEMORY_BYTES}
    assert saved["csd0"].prefix == saved["host"].prefix == sys.prefix
    assert saved["csd0"].problem is None


def test_discover_prints_one_json_document_and_the_rest_to_stderr(project: Path, fleet: Fleet) -> None:
    ended = csdctl(project, "discover", "--fleet", str(fleet.path), "--json")
    document = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert document["schema"] == "csdctl.discover/1"
    assert document["emulated"] is True
    assert [machine["name"] for machine in document["machines"]] == ["host", "csd0", "csd1"]
    assert "(emulated fleet)" in ended.stderr


def test_discover_reports_a_lost_node_with_its_remedy_and_exit_code_3(project: Path, fleet: Fleet) -> None:
    text = fleet.path.read_text().replace(f"port: {fleet.nodes[1].port}", "port: 1")
    broken = project / "broken.yaml"
    broken.write_text(text)
    ended = csdctl(project, "discover", "--fleet", str(broken))
    assert ended.returncode == 3
    assert "csd1: 127.0.0.1 port 1 cannot be reached" in ended.stdout
    assert "check that an SSH server runs there" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    machines = json.loads(csdctl(project, "discover", "--fleet", str(broken), "--json").stdout)["machines"]
    assert [machine["problem"] is None for machine in machines] == [True, True, False]


def test_discover_with_no_node_reachable_ends_with_4(project: Path, fleet: Fleet) -> None:
    lost = project / "lost.yaml"
    lost.write_text("nodes: [{name: csd0, address: 127.0.0.1, port: 1}]\n")
    ended = csdctl(project, "discover", "--fleet", str(lost))
    assert ended.returncode == 4
    assert "none of 1 nodes" in ended.stderr


def test_help_loads_neither_paramiko_nor_tensorflow(project: Path) -> None:
    program = (
        "import sys\n"
        "try:\n  from csdctl.cli.app import app; app(['discover', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(sum(name in sys.modules for name in ('paramiko', 'tensorflow', 'numpy')))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
