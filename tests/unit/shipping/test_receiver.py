"""The receiver as a program: requirements, source text, and runs under OpenSSH and dropbear."""

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.errors import UnreachableError
from csdctl.fleet.model import Node
from csdctl.shipping.chunks import SharedChunks
from csdctl.shipping.deliver import deliver
from csdctl.shipping.parcel import MAX_INLINE_BYTES, pack_parcel
from csdctl.shipping.receiver import build_receiver_command, receiver_source
from csdctl.shipping.store import hash_file
from csdctl.shipping.tree import TreeRequest, read_tree
from csdctl.transport.shell_wrapper import build_wrapped_command
from csdctl.transport.ssh import SshSession, connect

SOURCE = Path(__file__).parents[3] / "csdctl" / "standalone" / "receive.py"
DROPBEAR_MAX_COMMAND_BYTES = 9000
PORT = 2423


def test_receiver_is_python_3_8_and_imports_the_standard_library_only() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_command_line_is_short_enough_for_dropbear() -> None:
    command = build_receiver_command("/opt/csdctl/bin/python", "x" * (MAX_INLINE_BYTES + 50))
    line = build_wrapped_command(command, deadline_s=None).command_line
    assert len(line) < DROPBEAR_MAX_COMMAND_BYTES


def test_receiver_source_runs_as_a_program(tmp_path: Path) -> None:
    program = f"{receiver_source()}\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, '{"prune": true}'],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b'{"done": {"num_removed": 0}}\n'


@pytest.fixture(params=["openssh", "dropbear"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    """A real SSH server on loopback, in a mount namespace with `tmp_path/home` as root's home."""
    program = {"openssh": "/usr/sbin/sshd", "dropbear": "/usr/sbin/dropbear"}[request.param]
    if not os.path.exists(program) or os.geteuid() != 0:
        pytest.skip(f"needs root and {program}")
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "home" / ".ssh").mkdir(mode=0o700, parents=True)
    (tmp_path / "home").chmod(0o700)
    shutil.copy(tmp_path / "key.pub", tmp_path / "home" / ".ssh" / "authorized_keys")
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{PORT} {(tmp_path / 'host_key.pub').read_text()}")
    command = _openssh(program, tmp_path) if request.param == "openssh" else _dropbear(program, tmp_path)
    script = 'mount --bind "$1" ~root && shift && exec "$@"'
    wrapped = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path / "home"), *command]
    server = subprocess.Popen(wrapped, stderr=subprocess.DEVNULL)
    yield Node(name="csd0", address="127.0.0.1", port=PORT, user="root", key=tmp_path / "key")
    server.terminate()
    server.wait()


def _openssh(program: str, directory: Path) -> list[str]:
    (directory / "config").write_text(
        f"ListenAddress 127.0.0.1:{PORT}\nHostKey {directory}/host_key\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nPidFile none\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    return [program, "-D", "-f", str(directory / "config")]


def _dropbear(program: str, directory: Path) -> list[str]:
    key = directory / "dropbear_key"
    subprocess.run(["dropbearconvert", "openssh", "dropbear", directory / "host_key", key], check=True)
    return [program, "-F", "-E", "-r", str(key), "-p", f"127.0.0.1:{PORT}", "-P", str(directory / "pid")]


def _connect(node: Node, directory: Path) -> SshSession:
    """Return a session as soon as the server listens."""
    end_s = time.monotonic() + 20
    while True:
        try:
            return connect(node, [directory / "known_hosts"])
        except UnreachableError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.05)


def test_tree_arrives_through_a_real_server(node: Node, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "big").write_bytes(os.urandom(3_000_000))
    (source / "small").write_bytes(b"small")
    session = _connect(node, tmp_path)
    try:
        for expected in (2, 0):
            chunks = SharedChunks()
            parcel = pack_parcel(trees=[read_tree(TreeRequest(source, "there"), chunks)])
            assert deliver(session, parcel, chunks).num_sent == expected
        assert session.run(["sha256sum", "there/deep/big"]).output[:64] == hash_file(source / "deep" / "big")
    finally:
        session.close()
