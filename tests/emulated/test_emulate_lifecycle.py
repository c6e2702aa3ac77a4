"""Emulated fleets that start, crash and end, and the commands for it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from csdctl.cli.commands.emulation import emulate
from csdctl.emulation.fleet import EmulatedSpec, FleetPaths, fleet_status, is_up, start_fleet, stop_fleet
from csdctl.emulation.limits import list_cgroups, list_marked
from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet
from tests.emulated.emulated_fleet import CPU, MEMORY_BYTES, Running, start, wait_until

pytestmark = [pytest.mark.first(1), pytest.mark.emulated, pytest.mark.needs("ssh")]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory for a fleet of the test, which is stopped afterwards."""
    directory = tmp_path / ".csdctl" / "emulated"
    yield directory
    with contextlib.suppress(InputError):
        stop_fleet(directory)


def keep_busy(fleet: Running) -> None:
    """Leave one process on csd0 that computes for ever."""
    fleet.output("setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &")
    wait_until(lambda: fleet.status().num_processes == 1)  # the shell that started it has ended


def assert_nothing_is_left(directory: Path) -> None:
    paths = FleetPaths(directory)
    assert list_marked(paths.fleet_id) == []
    assert list_cgroups(f"csdctl-{paths.fleet_id}") == []
    assert not directory.exists()
    assert not list(Path(tempfile.gettempdir()).glob(f"{paths.short_tmp_prefix}*"))


def test_a_running_fleet_is_reused_and_another_is_refused(directory: Path) -> None:
    spec = EmulatedSpec((CPU,), MEMORY_BYTES)
    path = start_fleet(directory, spec, owner_pid=os.getpid())
    pids = [status.pid for status in fleet_status(directory)]
    assert start_fleet(directory, spec, owner_pid=os.getpid()) == path
    assert [status.pid for status in fleet_status(directory)] == pids
    with pytest.raises(InputError, match="another emulated fleet is running") as refusal:
        start_fleet(directory, EmulatedSpec((CPU, CPU), MEMORY_BYTES))
    assert "csdctl emulate down" in refusal.value.remedy


@pytest.mark.first(3)
@pytest.mark.parametrize("mechanism", ["cgroup", "duty"])
@pytest.mark.parametrize("state", ["running", "whole", "cut short", "gone", "directory gone"])
def test_down_leaves_nothing_though_a_node_is_busy_also_after_a_crash(
    directory: Path, mechanism: str, state: str
) -> None:
    fleet = start(directory, mechanism)
    keep_busy(fleet)
    for status in fleet_status(directory) if state != "running" else ():
        os.kill(status.pid, signal.SIGKILL)
    paths = FleetPaths(directory)
    if state == "cut short":
        paths.state.write_text(paths.state.read_text()[:100])
    elif state == "gone":
        paths.state.unlink()
    elif state == "directory gone":
        shutil.rmtree(directory)
    num_processes = stop_fleet(directory).num_processes
    # Two servers, what watches the owner, and the busy process.
    assert num_processes == 4 if state == "running" else num_processes >= 1
    assert_nothing_is_left(directory)
    assert stop_fleet(directory).num_processes == 0


def test_a_kept_fleet_starts_again_with_its_files(directory: Path) -> None:
    spec = EmulatedSpec((CPU, CPU), MEMORY_BYTES)
    start_fleet(directory, spec)
    paths = FleetPaths(directory)
    private, key = paths.node("csd0").private / "samples", paths.key.read_bytes()
    private.write_text("mine")
    stop_fleet(directory, keep=True)
    assert not is_up(directory)
    assert list(list_marked(paths.fleet_id)) == []
    with pytest.raises(InputError, match="is kept in"):
        start_fleet(directory, EmulatedSpec((CPU,), MEMORY_BYTES))
    start_fleet(directory, spec)
    assert is_up(directory)
    assert (private.read_text(), paths.key.read_bytes()) == ("mine", key)
    stop_fleet(directory)
    assert_nothing_is_left(directory)


def test_a_fleet_with_a_dead_server_is_restarted_with_its_files(directory: Path) -> None:
    fleet = start(directory, "auto")
    private = [FleetPaths(directory).node(name).private / "samples" for name in ("csd0", "csd1")]
    for path in private:
        path.write_text("mine")
    pids = [status.pid for status in fleet_status(directory)]
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not fleet.status("csd0").is_running)
    assert fleet.status("csd1").is_running
    start(directory, "auto")
    assert fleet.ssh("true").returncode in (0, 255)  # the old port is gone
    assert not {status.pid for status in fleet_status(directory)} & set(pids)
    assert [path.read_text() for path in private] == ["mine", "mine"]
    assert all(status.is_running for status in fleet_status(directory))


@pytest.fixture
def owner() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that only waits; killed, it stays a zombie for as long as the test wants."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("mechanism", ["cgroup", "duty"])
@pytest.mark.parametrize("state", ["whole", "a server killed", "state cut short", "all gone"])
def test_fleet_ends_with_its_owner(
    directory: Path, owner: "subprocess.Popen[bytes]", mechanism: str, state: str
) -> None:
    fleet = start(directory, mechanism, owner_pid=owner.pid)
    for node in ("csd0", "csd1"):
        fleet.output("setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &", node)
    if state == "a server killed":
        os.kill(fleet.status().pid, signal.SIGKILL)
    elif state == "state cut short":
        FleetPaths(directory).state.write_text("{")
    elif state == "all gone":
        shutil.rmtree(directory.parent)
    owner.kill()
    wait_until(lambda: not list_marked(FleetPaths(directory).fleet_id))
    assert_nothing_is_left(directory)


def test_owner_that_does_not_run_is_refused(directory: Path, owner: "subprocess.Popen[bytes]") -> None:
    owner.kill()
    owner.wait()
    for pid in (owner.pid, 0, -1):
        with pytest.raises(InputError, match=f"received {pid} .* expected .* running process") as refusal:
            start_fleet(directory, EmulatedSpec((CPU,)), owner_pid=pid)
        assert "--pid" in refusal.value.remedy
    assert not directory.exists()


def test_demo_that_is_killed_leaves_no_fleet(tmp_path: Path) -> None:
    directory = tmp_path / "demo" / ".csdctl" / "emulated"
    command = [sys.executable, "-P", "-m", "csdctl", "demo", "--nodes", "1", "--directory", "demo"]
    try:
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as demo:
            wait_until(lambda: is_up(directory))
            demo.kill()
        wait_until(lambda: not list_marked(FleetPaths(directory).fleet_id))
        assert_nothing_is_left(directory)
        assert not (tmp_path / "demo" / "fleet.yaml").exists()
    finally:
        stop_fleet(directory)


def test_a_foreign_fleet_file_is_not_changed(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("nodes: []\n")
    with pytest.raises(InputError, match="it is unchanged"):
        start_fleet(directory, EmulatedSpec((CPU,)), fleet_path=path)
    assert path.read_text() == "nodes: []\n"
    assert not directory.exists()


def test_a_foreign_directory_is_not_changed(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "thesis.tex").touch()
    for attempt in (lambda: start_fleet(directory, EmulatedSpec((CPU,))), lambda: stop_fleet(directory)):
        with pytest.raises(InputError):
            attempt()
    assert (directory / "thesis.tex").exists()


def test_commands_start_show_and_stop_a_fleet(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def run(*arguments: str) -> str:
        result = runner.invoke(emulate, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    up = ("up", "--nodes", "1", "--memory", "256M", "--pid", str(os.getpid()))
    started = json.loads(run(*up, "--json"))
    assert (started["schema"], started["emulated"], started["was_up"]) == ("csdctl.emulate/1", True, False)
    assert started["owner_pid"] == os.getpid()
    assert load_fleet(tmp_path / "fleet.yaml").node("csd0").port == started["nodes"][0]["port"]
    assert "was already up" in run(*up)
    assert json.loads(run("status", "--json"))["nodes"][0]["is_running"]
    assert "csd0" in run("status")
    (tmp_path / "fleet.yaml").write_text("nodes: []\n")
    ended = json.loads(run("down", "--json"))
    assert ended["num_processes"] == 2  # the server, and what watches the owner
    assert ended["kept_fleet_path"] == str(tmp_path / "fleet.yaml")
    assert "no emulated fleet" in run("status")
