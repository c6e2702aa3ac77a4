"""One command on each of 100 nodes: csdctl against asyncssh, pyinfra, parallel-ssh and Ansible.

Every client is a separate process, including its start and imports. Peers are installed in separate
environments, in the directory CSDCTL_BENCH_PEERS or a temporary directory. All check host keys (parallel-ssh
cannot), all use the same key, and Ansible keeps no connections open (ControlMaster=no), as that gains nothing
for one command.
"""

import getpass
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running import CLIENTS, PEERS

NUM_NODES = 100
NUM_ROUNDS = int(os.environ.get("CSDCTL_BENCH_ROUNDS", "5"))
OUTPUT = "pong"
"""Word that every client has each node print."""
PACKAGES = {name: name for name in ("asyncssh", "pyinfra", "parallel-ssh")} | {"ansible": "ansible-core"}


@dataclass(frozen=True)
class Cost:
    """The cost of one client: user and system time including children, and wall time."""

    cpu_s: float
    wall_s: float


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the bin directories of the peers that could be installed."""
    cache = Path(os.environ.get(PEERS) or tmp_path_factory.mktemp("peers"))
    found = {}
    for peer, package in PACKAGES.items():
        environment = cache / package
        if not (environment / "done").exists():
            subprocess.run([sys.executable, "-m", "venv", environment], check=True)
            install = [environment / "bin" / "python", "-m", "pip", "install", "-qq", package]
            if subprocess.run(install, check=False).returncode:
                print(f"\nNOT MEASURED: {peer} could not be installed")
                continue
            (environment / "done").touch()
        found[peer] = environment / "bin"
    return found


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_one_command_on_a_hundred_nodes(
    far: bool, many_nodes: Any, peers: dict[str, Path], tmp_path: Path
) -> None:
    if far and not many_nodes.namespace:
        pytest.skip("a delay needs root: network namespaces and TUN devices")
    commands = build_commands(many_nodes, peers, tmp_path, far)
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(NUM_ROUNDS):
        for name, command in commands.items():
            costs[name].append(measure([*many_nodes.prefix(far=far), *command], tmp_path))
    print(f"\n{NUM_NODES} nodes, one command each, {'50 ms' if far else 'no'} delay, {NUM_ROUNDS} rounds")
    print_table(costs)


def build_commands(nodes: Any, peers: dict[str, Path], directory: Path, far: bool) -> dict[str, list[str]]:
    """Return the command line of every client."""
    addresses = nodes.addresses(NUM_NODES, far=far)
    arguments = [getpass.getuser(), str(nodes.port), str(nodes.key), str(nodes.known_hosts), *addresses]
    write_inventories(nodes, addresses, directory)
    commands_by_client = {
        "csdctl": [sys.executable, f"{CLIENTS}/csdctl_client.py", *arguments],
        "asyncssh": ["python", f"{CLIENTS}/asyncssh_client.py", *arguments],
        "pyinfra": ["pyinfra", "-y", f"{directory}/inventory.py", "exec", "--", "echo", OUTPUT],
        "parallel-ssh": ["python", f"{CLIENTS}/parallel_ssh_client.py", *arguments],
        "ansible": [*f"ansible all -i hosts -m raw -f {NUM_NODES} -a".split(), f"echo {OUTPUT}"],
    }
    return {
        name: command if name == "csdctl" else [str(peers[name] / command[0]), *command[1:]]
        for name, command in commands_by_client.items()
        if name == "csdctl" or name in peers
    }


def write_inventories(nodes: Any, addresses: list[str], directory: Path) -> None:
    """Write the same fleet as an inventory of pyinfra and of Ansible."""
    data = {
        "ssh_user": getpass.getuser(),
        "ssh_port": nodes.port,
        "ssh_key": str(nodes.key),
        "ssh_known_hosts_file": str(nodes.known_hosts),
        "ssh_strict_host_key_checking": "yes",
    }
    (directory / "inventory.py").write_text(f"nodes = ({addresses!r}, {data!r})\n")
    (directory / "hosts").write_text(
        "\n".join(addresses) + f"\n[all:vars]\nansible_user={getpass.getuser()}\nansible_port={nodes.port}\n"
        f"ansible_ssh_private_key_file={nodes.key}\n"
        f"ansible_ssh_common_args=-F none -o UserKnownHostsFile={nodes.known_hosts}\n"
    )
    (directory / "ansible.cfg").write_text("[ssh_connection]\nssh_args = -C -o ControlMaster=no\n")


def measure(command: list[str], directory: Path, *, num_nodes: int = NUM_NODES) -> Cost:
    """Run one client to its end; every node must have printed OUTPUT."""
    environment = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
    with (directory / "output").open("w+b") as output:
        started_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert process.returncode == 0, text[-2000:]
    assert text.count(OUTPUT) >= num_nodes, text[-2000:]
    return Cost(usage.ru_utime + usage.ru_stime, wall_s)


def print_table(costs: dict[str, list[Cost]]) -> None:
    """Print medians, and the median of each round's ratio to csdctl."""
    print(f"{'':14}{'CPU s':>8}{'ratio':>8}{'wall s':>9}{'ratio':>8}")
    for name, column in costs.items():
        pairs = list(zip(column, costs["csdctl"], strict=True))
        cpu_ratio = statistics.median(cost.cpu_s / ours.cpu_s for cost, ours in pairs)
        wall_ratio = statistics.median(cost.wall_s / ours.wall_s for cost, ours in pairs)
        cpu_s = statistics.median(cost.cpu_s for cost in column)
        wall_s = statistics.median(cost.wall_s for cost in column)
        print(f"{name:14}{cpu_s:8.2f}{cpu_ratio:8.2f}{wall_s:9.2f}{wall_ratio:8.2f}")


@pytest.mark.parametrize("max_files", [256, 1024])
def test_one_command_on_a_thousand_nodes(max_files: int, many_nodes: Any, tmp_path: Path) -> None:
    addresses = many_nodes.addresses(1000)
    client = [sys.executable, f"{CLIENTS}/csdctl_client.py", getpass.getuser(), str(many_nodes.port)]
    command = [*client, str(many_nodes.key), str(many_nodes.known_hosts), *addresses]
    limited = [*many_nodes.prefix(), "prlimit", f"--nofile={max_files}", *command]
    cost = measure(limited, tmp_path, num_nodes=1000)
    last_line = (tmp_path / "output").read_text(errors="replace").splitlines()[-1]
    print(
        f"\n1000 nodes, {max_files} open files: CPU {cost.cpu_s:.1f} s, wall {cost.wall_s:.1f} s; {last_line}"
    )
