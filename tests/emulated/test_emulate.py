"""Sessions to an emulated fleet: OpenSSH's client, limits, signals, and MPI."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from typer.testing import CliRunner

from csdctl.cli.commands.fleet import emulate
from csdctl.emulation.fleet import (
    EmulatedSpec,
    FleetPaths,
    NodeStatus,
    fleet_status,
    is_up,
    start_fleet,
    stop_fleet,
)
from csdctl.emulation.limits import list_cgroups, list_descendants, list_marked
from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet
from csdctl.worker.protocol.processes import load_stat
from tests.needs import require
from tests.patience import eventually, stays

CPU = 0.25
MEMORY_BYTES = 160 << 20


@dataclass(frozen=True)
class Running:
    """A running fleet, and OpenSSH's configuration for it."""

    directory: Path
    config: Path
    mechanism: str

    def ssh(
        self, command: str, node: str = "csd0", stdin: bytes = b""
    ) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            ["ssh", "-F", self.config, node, command], input=stdin, capture_output=True, check=False
        )

    def output(self, command: str, node: str = "csd0") -> str:
        completed = self.ssh(command, node)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.decode()

    def status(self, node: str = "csd0") -> NodeStatus:
        return next(status for status in fleet_status(self.directory) if status.name == node)


def start(directory: Path, mechanism: str, num_nodes: int = 2, *, owner_pid: int | None = None) -> Running:
    """Start a fleet that ends with `owner_pid`, or with these tests, however they end."""
    if mechanism == "cgroup":
        require("cpu cgroups")
    spec = EmulatedSpec((CPU,) * num_nodes, MEMORY_BYTES)
    chosen = mechanism.replace("cgroup", "auto")
    start_fleet(directory, spec, cpu_mechanism=chosen, owner_pid=owner_pid or os.getpid())
    expected = mechanism.removeprefix("auto")
    assert all(status.cpu_mechanism.startswith(expected) for status in fleet_status(directory))
    lines = [f"UserKnownHostsFile {directory / 'known_hosts'}", "BatchMode yes", "ConnectTimeout 10"]
    for node in load_fleet(directory / "fleet.yaml").nodes:
        lines += [f"Host {node.name}", f"HostName {node.address}", f"Port {node.port}"]
        lines += [f"User {node.user}", f"IdentityFile {node.key}"]
    config = directory.parent / "ssh_config"
    config.write_text("\n".join(lines) + "\n")
    return Running(directory, config, mechanism)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory for a fleet of the test, which is stopped afterwards."""
    directory = tmp_path / ".csdctl" / "emulated"
    yield directory
    with contextlib.suppress(InputError):
        stop_fleet(directory)


@pytest.fixture
def owner() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that only waits; killed, it stays a zombie for as long as the test wants."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


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


@pytest.mark.parametrize("mechanism", ["cgroup", "duty"])
@pytest.mark.parametrize("state", ["running", "servers killed", "state cut short", "state gone", "all gone"])
@pytest.mark.parametrize("end", ["down", "owner"])
@pytest.mark.first(5)
def test_fleet_leaves_nothing_though_its_nodes_are_busy_also_after_a_crash(
    directory: Path, owner: "subprocess.Popen[bytes]", mechanism: str, state: str, end: str
) -> None:
    fleet = start(directory, mechanism, owner_pid=owner.pid)
    for node in ("csd0", "csd1"):
        fleet.output("setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &", node)
    paths = FleetPaths(directory)
    if state == "servers killed":
        for status in fleet_status(directory):
            os.kill(status.pid, signal.SIGKILL)
    elif state == "state cut short":
        paths.state.write_text(paths.state.read_text()[:100])
    elif state == "state gone":
        paths.state.unlink()
    elif state == "all gone":
        shutil.rmtree(directory.parent)
    if end == "owner":
        owner.kill()
        assert eventually(lambda: not list_marked(paths.fleet_id))
    else:
        assert stop_fleet(directory) >= (5 if state == "running" else 1)
    assert_nothing_is_left(directory)
    assert stop_fleet(directory) == 0


def test_kept_fleet_and_one_with_a_dead_server_start_again_with_their_files(directory: Path) -> None:
    fleet = start(directory, "auto")
    paths = FleetPaths(directory)
    private, key = paths.node("csd0") / "home" / "private" / "samples", paths.key.read_bytes()
    private.write_text("mine")
    stop_fleet(directory, keep=True)
    assert not is_up(directory)
    assert list(list_marked(paths.fleet_id)) == []
    with pytest.raises(InputError, match="is kept in"):
        start_fleet(directory, EmulatedSpec((CPU,), MEMORY_BYTES))
    start(directory, "auto")
    pids = {status.pid for status in fleet_status(directory)}
    os.kill(fleet.status("csd0").pid, signal.SIGKILL)
    assert eventually(lambda: not fleet.status("csd0").is_running)
    assert fleet.status("csd1").is_running
    start(directory, "auto")
    assert not {status.pid for status in fleet_status(directory)} & pids
    assert all(status.is_running for status in fleet_status(directory))
    assert (private.read_text(), paths.key.read_bytes()) == ("mine", key)


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
    assert (tmp_path / "fleet.yaml").exists(), "it was not written by the emulator"
    assert "no emulated fleet" in run("status")


pytestmark = [pytest.mark.first(1), pytest.mark.emulated, pytest.mark.needs("ssh")]

BUSY = """
import os, sys, time
start, children = time.monotonic(), []
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        while time.monotonic() - start < float(sys.argv[2]): pass
        os._exit(0)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
used = os.times()
print((used.children_user + used.children_system) / (time.monotonic() - start))
"""


@pytest.fixture(scope="module", params=["cgroup", "duty"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One fleet for the tests that do not change it, for each CPU mechanism."""
    directory = tmp_path_factory.mktemp("fleet") / ".csdctl" / "emulated"
    try:
        yield start(directory, request.param)
    finally:
        stop_fleet(directory)


def test_commands_start_in_a_home_of_their_own_with_a_clean_environment(fleet: Running) -> None:
    homes = {fleet.output("pwd; ls -A private", node) for node in ("csd0", "csd1")}
    assert len(homes) == 2
    environment = dict(line.split("=", 1) for line in fleet.output("env").splitlines())
    assert environment["HOME"] in "".join(homes)
    assert len(environment["TMPDIR"].removeprefix(tempfile.gettempdir())) < 36
    assert Path(environment["TMPDIR"]).is_dir()
    assert environment["CSDCTL_CPU_LIMIT"] == "0.25"
    assert environment["CSDCTL_MEMORY_LIMIT"] == str(MEMORY_BYTES)
    assert set(environment) - {"PWD", "SHLVL", "OLDPWD", "_"} == {
        *("HOME", "TMPDIR", "PATH", "USER", "LOGNAME", "SHELL", "LANG"),
        *("CSDCTL_EMULATED_FLEET", "CSDCTL_EMULATED_NODE", "CSDCTL_CPU_LIMIT", "CSDCTL_MEMORY_LIMIT"),
    }


def test_streams_are_binary_clean_and_exit_codes_come_back(fleet: Running) -> None:
    completed = fleet.ssh("echo out; echo err >&2; exit 7")
    assert (completed.returncode, completed.stdout, completed.stderr) == (7, b"out\n", b"err\n")
    content = bytes(range(256)) * 20_000
    assert fleet.ssh("cat", stdin=content).stdout == content
    reads_little = fleet.ssh("head -c 3; exit 5", stdin=b"abc" * 2_000_000)
    assert (reads_little.returncode, reads_little.stdout) == (5, b"abc")


def test_key_of_the_fleet_alone_opens_a_connection_with_signals_and_files(fleet: Running) -> None:
    node = load_fleet(fleet.directory / "fleet.yaml").nodes[0]
    another_key = asyncssh.generate_private_key("ssh-ed25519")

    def log_in(user: str, **secret: object) -> Any:
        options = {"client_keys": None, "agent_path": None, "config": None, **secret}
        return asyncssh.connect(node.address, node.port, username=user, known_hosts=None, **options)

    async def try_out() -> None:
        async with log_in(node.user, client_keys=[str(node.key)]) as connection:
            assert (await connection.run("kill -KILL $$")).exit_signal[0] == "KILL"
            async with connection.create_process("exec sleep 60") as process:
                process.send_signal("TERM")
                await process.wait()
                assert process.exit_signal[0] == "TERM"
            async with connection.start_sftp_client() as sftp:
                async with sftp.open("sent.bin", "wb") as file:
                    await file.write(bytes(range(256)))
                await sftp.posix_rename("sent.bin", "private/kept.bin")
        for secret in ({"client_keys": [another_key]}, {"password": "csd"}):
            with pytest.raises(asyncssh.PermissionDenied):
                await log_in(node.user, **secret)

    asyncio.run(try_out())
    assert fleet.output("wc -c < private/kept.bin; rm private/kept.bin").strip() == "256"
    assert node.key is not None
    assert node.key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("num_processes", [1, 2])
def test_busy_node_gets_its_share_of_the_cpu(fleet: Running, num_processes: int) -> None:
    share = float(fleet.output(f"python3 -c '{BUSY}' {num_processes} 3"))
    assert 0.2 * CPU < share < 1.25 * CPU  # below it only where the machine itself is overloaded


def test_idle_node_is_never_stopped(fleet: Running) -> None:
    with subprocess.Popen(["ssh", "-F", fleet.config, "csd1", "exec sleep 9999"]) as client:
        try:
            assert eventually(lambda: fleet.status("csd1").num_processes)
            # Starting it was work, for which it may still be stopped.
            assert eventually(lambda: stays(lambda: states_on(fleet, "csd1") == ["S"], 0.5))
            states = set()
            for _ in range(200):
                states |= {*states_on(fleet, "csd1")}
                time.sleep(0.003)
        finally:
            client.terminate()
    assert states == {"S"}


def states_on(fleet: Running, node: str) -> list[str]:
    """Return the states of all processes of a node."""
    stats = [load_stat(pid) for pid in list_descendants(fleet.status(node).pid)]
    return [stat.state for stat in stats if stat]


def test_command_ends_when_its_client_disconnects_and_a_daemon_stays_with_the_node(fleet: Running) -> None:
    script = "trap '' TERM HUP; sleep 9999 | sleep 9999"
    client = subprocess.Popen(["ssh", "-F", fleet.config, "csd0", script])
    assert eventually(lambda: fleet.status().num_processes >= 3)
    client.kill()
    client.wait()
    assert eventually(lambda: fleet.status().num_processes == 0)
    fleet.output("setsid sleep 9999 </dev/null >/dev/null 2>&1 &")
    assert eventually(lambda: fleet.status().num_processes == 1)  # the shell has ended
    assert stays(lambda: fleet.status().num_processes == 1, 0.3)
    (pid,) = list_descendants(fleet.status().pid)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())  # also reaped


@pytest.mark.fault(22)
def test_a_process_that_grows_too_large_is_killed(fleet: Running) -> None:
    grow = "import time\nblocks = []\nwhile True: blocks.append(bytearray(8 << 20)); time.sleep(0.02)"
    completed = fleet.ssh(f'python3 -c "{grow}"; echo "exit $?"')
    assert completed.stdout == b"exit 137\n"
    log = (fleet.directory / "nodes" / "csd0" / "server.log").read_text()
    assert "out of memory: killed python3" in log
