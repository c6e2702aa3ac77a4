"""Sessions to an emulated fleet: OpenSSH's client, limits, signals, and MPI."""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from csdctl.emulation.fleet import stop_fleet
from csdctl.emulation.limits import list_descendants
from csdctl.fleet.fleet_file import load_fleet
from csdctl.worker.protocol.processes import load_stat
from tests.emulated.emulated_fleet import CPU, MEMORY_BYTES, Running, start, wait_until
from tests.patience import stays

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


def test_commands_start_in_a_home_of_their_own_with_a_clean_environment(
    fleet: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_only_the_key_of_the_fleet_is_accepted(fleet: Running, tmp_path: Path) -> None:
    node = load_fleet(fleet.directory / "fleet.yaml").nodes[0]
    other = asyncssh.generate_private_key("ssh-ed25519")

    async def log_in(user: str, **secret: object) -> None:
        options = {"client_keys": None, "agent_path": None, "config": None, **secret}
        async with asyncssh.connect(node.address, node.port, username=user, known_hosts=None, **options):
            pass

    asyncio.run(log_in(node.user, client_keys=[str(node.key)]))
    for user, secret in ((node.user, {"client_keys": [other]}), (node.user, {"password": "csd"})):
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
    with subprocess.Popen(["ssh", "-F", fleet.config, "csd1", "exec sleep 9999"]) as client:
        try:
            wait_until(lambda: fleet.status("csd1").num_processes)
            # Starting it was work, for which it may still be stopped.
            wait_until(lambda: stays(lambda: states_on(fleet, "csd1") == ["S"], 0.5))
            states = set()
            for _ in range(200):
                states |= {*states_on(fleet, "csd1")}
                time.sleep(0.003)
        finally:
            client.terminate()
    assert states == {"S"}


def states_on(fleet: Running, node: str) -> list[str]:
    """Return the states of all processes of a node."""
    found = [load_stat(pid) for pid in list_descendants(fleet.status(node).pid)]
    return [stat.state for stat in found if stat]


def test_a_command_ends_when_its_client_disconnects(fleet: Running) -> None:
    script = "trap '' TERM HUP; sleep 9999 | sleep 9999"
    client = subprocess.Popen(["ssh", "-F", fleet.config, "csd0", script])
    wait_until(lambda: fleet.status().num_processes >= 3)
    client.kill()
    client.wait()
    wait_until(lambda: fleet.status().num_processes == 0)


def test_a_daemon_outlives_its_channel_and_stays_with_the_node(fleet: Running) -> None:
    fleet.output("setsid sleep 9999 </dev/null >/dev/null 2>&1 &")
    wait_until(lambda: fleet.status().num_processes == 1)  # the shell has ended
    assert stays(lambda: fleet.status().num_processes == 1, 0.3)
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
