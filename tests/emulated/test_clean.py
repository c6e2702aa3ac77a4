"""`csdctl clean`, `--failed-from` and `csdctl trust` on an emulated fleet, with real processes and keys."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.emulation.fleet import EmulatedSpec, start_fleet, stop_fleet
from csdctl.fleet.fleet_file import load_fleet
from csdctl.transport.many import open_sessions
from tests.emulated.running import csdctl, document, refuse, succeed
from tests.patience import eventually

pytestmark = pytest.mark.emulated

RUN = f"20260101-000000-{os.getpid() % 1_000_000:06}"
"""Id for this process alone: `num_running` counts the processes of other tests on this machine, too."""
LEAVE_A_RANK = (
    "rm -f ~/left; "
    f"setsid sh -c 'echo $$ >~/left; sleep 100000; true' csdctl-run={RUN}/csd0 >/dev/null 2>&1 </dev/null & "
    "until [ -s ~/left ]; do sleep 0.05; done; cat ~/left"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with an emulated fleet, and broken.yaml in which the port of csd1 is closed."""
    directory = tmp_path_factory.mktemp("project")
    emulated = directory / ".csdctl" / "emulated"
    written = start_fleet(
        emulated,
        EmulatedSpec((0.5, 0.5), 1 << 30),
        fleet_path=directory / "fleet.yaml",
        cpu_mechanism="duty",
        owner_pid=os.getpid(),
    )
    text = written.read_text()
    (directory / "broken.yaml").write_text(
        text.replace(f"port: {load_fleet(written).node('csd1').port}", "port: 1")
    )
    yield directory
    stop_fleet(emulated)


def on_csd0(project: Path, script: str) -> str:
    with open_sessions(load_fleet(project / "fleet.yaml"), directory=project) as sessions:
        return sessions.reachable["csd0"].run(["sh", "-c", script]).check("csd0", doing="a script").output


def num_running(project: Path) -> int:
    """Return the number of running processes of the run."""
    script = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^csdctl-run={RUN}'; true"
    return int(on_csd0(project, script))


@pytest.mark.fault(24)
def test_process_of_an_earlier_run_is_ended_and_its_run_named(project: Path) -> None:
    on_csd0(project, LEAVE_A_RANK)
    listed = csdctl(project, "clean", "--dry-run")
    assert f"csd0: 1 process of run {RUN} still running" in listed.stdout
    assert num_running(project) == 1
    done = csdctl(project, "clean")
    assert done.returncode == 0, done.stderr
    assert f"csd0: 1 process of run {RUN} ended" in done.stdout
    assert "csd1: no leftovers" in done.stdout
    assert eventually(lambda: num_running(project) == 0)  # a killed process may take a moment to end


@pytest.mark.thorough
def test_everything_is_removed_only_when_confirmed(project: Path) -> None:
    (project / "tree").mkdir()
    (project / "tree" / "file").write_text("content")
    succeed(project, "deploy", "--tree", "tree")
    for option in (["--everything"], ["--unused"], ["--computed"], ["--older-than", "1h"]):
        said = refuse(project, "clean", *option)
        assert "csd0: " in said
        assert (
            "Remove this on host and 2 nodes? There is no terminal to answer on → confirm with --yes" in said
        )
    assert "could be removed" in refuse(project, "clean", "--everything")
    assert on_csd0(project, "cat ~/tree/file") == "content"
    succeed(project, "clean", "--everything", "--yes")
    assert on_csd0(project, "ls -d ~/tree .csdctl 2>/dev/null; true") == "", "no dangling link remains"
    assert (project / ".csdctl" / "emulated").is_dir(), "the host's own directory stays"


@pytest.mark.fault(1)
def test_failed_node_is_named_and_only_it_is_retried(project: Path) -> None:
    failed = csdctl(project, "clean", "--fleet", "broken.yaml")
    assert failed.returncode == 3
    assert "csd0: no leftovers" in failed.stdout
    assert "csdctl clean --fleet broken.yaml --failed-from .csdctl/failed.json" in failed.stderr
    again = document(project, "clean", "--failed-from", ".csdctl/failed.json")
    assert list(again["machines"]) == ["host", "csd1"]
    assert "no failed nodes are recorded" in refuse(project, "clean", "--failed-from", ".csdctl/failed.json")


@pytest.fixture
def unknown(project: Path, tmp_path: Path) -> Path:
    """A project with the fleet file and without known keys."""
    (tmp_path / "fleet.yaml").write_text((project / "fleet.yaml").read_text())
    return tmp_path


@pytest.mark.fault(4)
def test_unknown_keys_are_refused_until_the_user_accepts_them(unknown: Path) -> None:
    assert "csdctl trust --limit csd0" in refuse(unknown, "discover", code=4)
    assert "--yes" in refuse(unknown, "trust")
    offered = document(unknown, "trust", "--dry-run")
    assert {key["state"] for key in offered["machines"].values()} == {"new"}
    known_hosts = unknown / ".csdctl" / "known_hosts"
    assert not known_hosts.exists()
    assert succeed(unknown, "trust", "--yes").stdout.count("SHA256:") == 2
    succeed(unknown, "discover")
    node = load_fleet(unknown / "fleet.yaml").node("csd0")
    assert known_hosts.read_text().startswith(f"[{node.address}]:{node.port} ssh-ed25519 ")
    assert "2 keys already accepted" in succeed(unknown, "trust").stdout
