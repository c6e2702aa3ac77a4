"""Fixtures of the benchmarks: the lab, and one sshd that listens at a thousand addresses.

The session, its reaper and the needs of tests are those of tests/conftest.py.

As root the sshd runs in a network namespace, and a second namespace reaches it with a round trip of 50 ms: a
small router between two TUN devices delays every packet by 25 ms, including the handshake. (`tc netem` would
do the same where the kernel has it.) Otherwise it serves the loopback addresses of this machine, without a
delay.
"""

import getpass
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.lab import Lab, open_lab
from tests.needs import require

pytest_plugins = ["tests.conftest"]

TIMEOUT_S = 5400
ROUND_TRIP_S = 0.05
NEAR = "127.7"
FAR = "10.77"
PORT = 2200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every benchmark the same timeout."""
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@dataclass(frozen=True)
class ManyNodes:
    """A server that listens at many addresses, with and without a delay."""

    directory: Path
    namespace: str
    """'' without root."""
    port: int = PORT

    @property
    def key(self) -> Path:
        return self.directory / "id"

    @property
    def known_hosts(self) -> Path:
        return self.directory / ".csdctl" / "known_hosts"

    def addresses(self, count: int, *, far: bool = False) -> list[str]:
        prefix = FAR if far else NEAR
        return [f"{prefix}.{number // 250 + 1}.{number % 250 + 2}" for number in range(count)]

    def prefix(self, *, far: bool = False) -> list[str]:
        """Return the command prefix that runs a command without (or, if `far`, with) the delay."""
        if not self.namespace:
            return []
        return ["ip", "netns", "exec", f"{self.namespace}{'-far' if far else ''}"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    require("lab")
    with open_lab() as opened:
        yield opened


@pytest.fixture(scope="session")
def many_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyNodes]:
    is_root = os.geteuid() == 0
    namespace = f"csdctl-bench-{os.getpid()}" if is_root else ""
    nodes = ManyNodes(tmp_path_factory.mktemp("sshd"), namespace)
    router = None
    try:
        if is_root:
            for name in (namespace, f"{namespace}-far"):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", namespace, "route", "add", "local", f"{FAR}.0.0/16", "dev", "lo")
            program = Path(__file__).with_name("delay_router.py")
            command = [sys.executable, program, namespace, str(ROUND_TRIP_S / 2)]
            router = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert router.stdout
            assert router.stdout.readline()
        server = _start_sshd(nodes)
        try:
            yield nodes
        finally:
            server.terminate()
            server.wait()
    finally:
        if router:
            router.terminate()
            router.wait()
        for name in (namespace, f"{namespace}-far") if is_root else ():
            subprocess.run(["ip", "netns", "del", name], check=False)


def _start_sshd(nodes: ManyNodes) -> subprocess.Popen[bytes]:
    for name in ("id", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(nodes.directory / name))
    public_key = (nodes.directory / "host_key.pub").read_text().split()
    names = nodes.addresses(1000) + nodes.addresses(1000, far=True)
    nodes.known_hosts.parent.mkdir()
    nodes.known_hosts.write_text("".join(f"[{name}]:{PORT} {' '.join(public_key[:2])}\n" for name in names))
    config = nodes.directory / "sshd_config"
    config.write_text(
        f"Port {PORT}\nListenAddress {'0.0.0.0' if nodes.namespace else f'{NEAR}.1.2'}\n"
        f"HostKey {nodes.directory}/host_key\nAuthorizedKeysFile {nodes.directory}/id.pub\n"
        "StrictModes no\nUsePAM no\nUseDNS no\nMaxStartups 2000\nPidFile none\nLogLevel ERROR\n"
        # A nested shell reads no start-up files: logins cost the same on every machine.
        "PasswordAuthentication no\nSetEnv SHLVL=2\n"
    )
    if nodes.namespace:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([*nodes.prefix(), "/usr/sbin/sshd", "-D", "-e", "-f", str(config)])
    probe = ["ssh", "-F", "none", "-i", nodes.key, "-o", f"UserKnownHostsFile={nodes.known_hosts}"]
    probe += ["-o", "BatchMode=yes", "-p", str(PORT), f"{getpass.getuser()}@{nodes.addresses(1)[0]}", "true"]
    deadline_s = time.monotonic() + 20
    while subprocess.run([*nodes.prefix(), *probe], check=False, stderr=subprocess.DEVNULL).returncode:
        assert server.poll() is None, "sshd ended"
        assert time.monotonic() < deadline_s, "sshd does not answer"
        time.sleep(0.1)
    return server


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
