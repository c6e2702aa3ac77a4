"""An emulated fleet with OpenSSH's client in front of it."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from csdctl.emulation.fleet import EmulatedSpec, NodeStatus, fleet_status, start_fleet
from csdctl.fleet.fleet_file import load_fleet
from tests.needs import require
from tests.patience import eventually

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
    known = mechanism.removeprefix("auto")
    assert all(one.cpu_mechanism.startswith(known) for one in fleet_status(directory))
    lines = [f"UserKnownHostsFile {directory / 'known_hosts'}", "BatchMode yes", "ConnectTimeout 10"]
    for node in load_fleet(directory / "fleet.yaml").nodes:
        lines += [f"Host {node.name}", f"HostName {node.address}", f"Port {node.port}"]
        lines += [f"User {node.user}", f"IdentityFile {node.key}"]
    config = directory.parent / "ssh_config"
    config.write_text("\n".join(lines) + "\n")
    return Running(directory, config, mechanism)


def wait_until(condition: Callable[[], object]) -> None:
    assert eventually(condition), "it never became true"
