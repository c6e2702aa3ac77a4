"""The receiver as a program: requirements, source text, and runs under OpenSSH and dropbear."""

import ast
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.errors import UnreachableError
from csdctl.fleet.model import Node
from csdctl.shipping.deliver import build_receiver, deliver
from csdctl.shipping.payload import TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import hash_file
from csdctl.transport.commands import build_wrapped_command
from csdctl.transport.ssh import SshSession, connect
from tests.needs import require
from tests.patience import eventually

SOURCE = Path(__file__).parents[3] / "csdctl" / "standalone" / "receive.py"
DROPBEAR_MAX_COMMAND_BYTES = 9000


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
    requests: list[dict[str, object]] = [{"prune": True}, {"objects": ["x" * 64] * 10_000}]
    for request in requests:
        command, _ = build_receiver("/opt/csdctl/bin/python", request)
        line = build_wrapped_command(command, deadline_s=None).command_line
        assert len(line) < DROPBEAR_MAX_COMMAND_BYTES


@pytest.fixture(params=["openssh", "dropbear"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    """A real SSH server on loopback, in a mount namespace with `tmp_path/home` as root's home."""
    program = {"openssh": "/usr/sbin/sshd", "dropbear": "/usr/sbin/dropbear"}[request.param]
    require("mounts", {"openssh": "sshd"}.get(request.param, request.param))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "home" / ".ssh").mkdir(mode=0o700, parents=True)
    (tmp_path / "home").chmod(0o700)
    shutil.copy(tmp_path / "key.pub", tmp_path / "home" / ".ssh" / "authorized_keys")
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{port} {(tmp_path / 'host_key.pub').read_text()}")
    build_command = _openssh if request.param == "openssh" else _dropbear
    command = build_command(program, tmp_path, port)
    script = 'mount --bind "$1" ~root && shift && exec "$@"'
    wrapped = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path / "home"), *command]
    server = subprocess.Popen(wrapped, stderr=subprocess.DEVNULL)
    yield Node(name="csd0", address="127.0.0.1", port=port, user="root", key=tmp_path / "key")
    server.terminate()
    server.wait()


def _openssh(program: str, directory: Path, port: int) -> list[str]:
    (directory / "config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {directory}/host_key\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nPidFile none\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    return [program, "-D", "-f", str(directory / "config")]


def _dropbear(program: str, directory: Path, port: int) -> list[str]:
    key = directory / "dropbear_key"
    subprocess.run(["dropbearconvert", "openssh", "dropbear", directory / "host_key", key], check=True)
    return [program, "-F", "-E", "-r", str(key), "-p", f"127.0.0.1:{port}", "-P", str(directory / "pid")]


def _connect(node: Node, directory: Path) -> SshSession:
    """Return a session as soon as the server listens."""
    sessions: list[SshSession] = []

    def is_open() -> bool:
        with contextlib.suppress(UnreachableError):
            sessions.append(connect(node, [directory / "known_hosts"]))
        return bool(sessions)

    assert eventually(is_open)
    return sessions[0]


def test_tree_arrives_through_a_real_server(node: Node, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "big").write_bytes(os.urandom(3_000_000))
    (source / "small").write_bytes(b"small")
    session = _connect(node, tmp_path)
    try:
        for expected in (2, 0):
            payload = pack_payload(trees=[read_tree(TreeRequest(source, "there"))])
            assert deliver(session, payload).num_sent == expected
        assert session.run(["sha256sum", "there/deep/big"]).output[:64] == hash_file(source / "deep" / "big")
    finally:
        session.close()
