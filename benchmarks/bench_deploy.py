"""Deploying to four nodes against scp and rsync, alternately: one sshd on loopback, four home directories.

    make bench ARGS="-k deploy"

Prints tables, asserts no limits. Needs root and an OpenSSH server. scp and rsync use their default ciphers
and sync nothing to the disk; csdctl does. `csdctl` is the whole command, `in process` the same without its
start: read and hash, connect, send, verify.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import Fleet
from csdctl.shipping.deliver import DEFAULT_IGNORED, Delivery, TreeRequest, deliver, pack_payload, read_tree
from csdctl.transport.many import run_on_nodes, values_or_raise
from csdctl.transport.session import Session

SSHD = "/usr/sbin/sshd"
PORT = 2422
NUM_NODES = 4
ROUNDS = 5

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, (SSHD, "scp", "rsync"))),
        reason="needs root, sshd, scp and rsync",
    )
]


@dataclass(frozen=True)
class Bench:
    """A directory with a fleet; its nodes are home directories behind one sshd."""

    directory: Path
    fleet: Fleet

    def home(self, number: int) -> Path:
        return self.directory / f"home{number}"

    def ssh(self) -> str:
        known = self.directory / ".csdctl" / "known_hosts"
        return f"ssh -p {PORT} -i {self.directory}/key -o UserKnownHostsFile={known}"

    def csdctl(self, *arguments: str) -> None:
        program = [sys.executable, "-c", "from csdctl.cli.app import main; main()", "deploy", *arguments]
        subprocess.run(program, cwd=self.directory, stdout=subprocess.DEVNULL, check=True)

    def in_process(self, source: Path) -> None:
        tree = read_tree(TreeRequest(source, source.name), DEFAULT_IGNORED)
        payload = pack_payload(trees=[tree])

        def send(session: Session) -> Delivery:
            return deliver(session, payload, python=self.fleet.python_of(session.name))

        values_or_raise(run_on_nodes(self.fleet, send, directory=self.directory), "deploying")

    def to_all(self, build: Callable[[str], list[str]]) -> None:
        """Start one program for each node at once, and wait for all."""
        started = [
            subprocess.Popen(build(f"root@127.0.0.{number + 2}"), stdout=subprocess.DEVNULL)
            for number in range(NUM_NODES)
        ]
        assert [process.wait() for process in started] == [0] * NUM_NODES

    def scp(self, source: Path) -> None:
        options = ["-P", str(PORT), *self.ssh().split()[3:]]
        self.to_all(lambda node: ["scp", "-q", "-r", *options, str(source), f"{node}:scp"])

    def rsync(self, source: Path, *options: str) -> None:
        self.to_all(lambda node: ["rsync", "-a", *options, "-e", self.ssh(), f"{source}/", f"{node}:rsync"])

    def empty_homes(self) -> None:
        """Empty all home directories."""
        for number in range(NUM_NODES):
            shutil.rmtree(self.home(number), ignore_errors=True)
            self.home(number).mkdir()
        os.sync()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = tmp_path_factory.mktemp("bench")
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    blocks = "".join(
        f"Match LocalAddress 127.0.0.{number + 2}\n  ForceCommand cd {directory}/home{number} && "
        f'HOME=$PWD exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
        for number in range(NUM_NODES)
    )
    (directory / "sshd_config").write_text(
        f"Port {PORT}\nHostKey {directory}/host_key\nAuthorizedKeysFile {directory}/key.pub\nStrictModes no\n"
        f"PermitRootLogin yes\nUsePAM no\nPidFile none\nMaxStartups 100\n"
        f"Subsystem sftp /usr/lib/openssh/sftp-server\n{blocks}"
    )
    (directory / ".csdctl").mkdir()
    public = (directory / "host_key.pub").read_text()
    (directory / ".csdctl" / "known_hosts").write_text(
        "".join(f"[127.0.0.{number + 2}]:{PORT} {public}" for number in range(NUM_NODES))
    )
    nodes = "".join(
        f"  - {{name: n{number}, address: 127.0.0.{number + 2}}}\n" for number in range(NUM_NODES)
    )
    (directory / "fleet.yaml").write_text(
        f"defaults: {{user: root, key: key, port: {PORT}}}\nnodes:\n{nodes}"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-f", directory / "sshd_config"])
    bench = Bench(directory, load_fleet(directory / "fleet.yaml"))
    bench.empty_homes()
    try:
        while subprocess.run([*bench.ssh().split(), "root@127.0.0.2", "true"], check=False).returncode:
            assert server.poll() is None
            time.sleep(0.1)
        yield bench
    finally:
        server.terminate()
        server.wait()


def compare(
    title: str, methods: dict[str, Callable[[], object]], before: Callable[[], object], num_bytes: int = 0
) -> None:
    """Time `methods` alternately, and print the median of each and its ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, run in methods.items():
            before()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in times.items()}
    first = next(iter(medians.values()))
    print(f"\n{title}, median of {ROUNDS}")
    for name, median in medians.items():
        speed = f"{num_bytes / median / 2**20:7.0f} MiB/s" if num_bytes else ""
        print(f"  {name:18} {median:7.3f} s {speed}  {median / first:5.2f} ×  (min {min(times[name]):.3f} s)")


def test_deploy_of_64_mib_to_four_nodes(bench: Bench, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.mkdir()
    (source / "random.bin").write_bytes(os.urandom(64 << 20))
    methods: dict[str, Callable[[], object]] = {
        "in process": lambda: bench.in_process(source),
        "csdctl": lambda: bench.csdctl("--tree", str(source)),
        "scp": lambda: bench.scp(source),
        "rsync": lambda: bench.rsync(source),
        "rsync --fsync": lambda: bench.rsync(source, "--fsync"),
    }
    compare("64 MiB to 4 nodes", methods, bench.empty_homes, NUM_NODES * (64 << 20))
    assert (bench.home(0) / "rsync").exists()


def test_deploy_again_of_10_000_files(bench: Bench, tmp_path: Path) -> None:
    source = tmp_path / "many"
    for number in range(10_000):
        path = source / f"{number % 100:02d}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(200 + number % 5000))
    first: dict[str, Callable[[], object]] = {
        "in process": lambda: bench.in_process(source),
        "rsync -a": lambda: bench.rsync(source),
    }
    unchanged: dict[str, Callable[[], object]] = {
        "in process": lambda: bench.in_process(source),
        "csdctl": lambda: bench.csdctl("--tree", str(source)),
        "rsync -a": lambda: bench.rsync(source),
        "rsync -a -c": lambda: bench.rsync(source, "-c"),
    }
    compare("10,000 files to 4 nodes, the first time", first, bench.empty_homes)
    bench.in_process(source)
    bench.rsync(source)
    compare("10,000 files on 4 nodes, nothing changed", unchanged, lambda: None)
