"""SSH: failing and lost connections, and misbehaving servers."""

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from csdctl.errors import (
    AuthenticationError,
    CsdctlError,
    DeadlineError,
    HostKeyError,
    RemoteCommandError,
    UnreachableError,
)
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.session import Deadline
from csdctl.transport.ssh import SshSession, connect
from csdctl.transport.ssh_connect import JumpHosts, open_transport
from tests.patience import eventually, scaled

Server = Any


@contextlib.contextmanager
def answering(what: bytes | None) -> Iterator[int]:
    """Listen on a port, send `what` to every client, and keep the connection open."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    kept.append(connection)
                    if what is not None:
                        connection.sendall(what)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def make_key(path: Path, passphrase: str | None = None) -> Path:
    key = asyncssh.generate_private_key("ssh-ed25519")
    path.write_bytes(key.export_private_key(passphrase=passphrase))
    path.chmod(0o600)
    return path


@pytest.mark.fault(1)
def test_closed_port_is_unreachable_with_a_remedy(server: Server) -> None:
    with pytest.raises(UnreachableError, match="refused") as caught:
        connect(server.node(port=closed_port()), [server.known_hosts])
    assert caught.value.node == "csd0"
    assert "SSH server" in caught.value.remedy


def test_name_that_does_not_resolve_is_unreachable(server: Server) -> None:
    with pytest.raises(UnreachableError, match="cannot be resolved"):
        connect(
            server.node(address="no-such-name.invalid"), [server.known_hosts], connect_deadline_s=scaled(60)
        )


@pytest.mark.fault(3)
@pytest.mark.parametrize("banner", [None, b"SSH-2.0-stuck\r\n"])
def test_server_that_stops_meets_the_deadline(server: Server, banner: bytes | None) -> None:
    with answering(banner) as port, pytest.raises(UnreachableError, match="did not respond") as caught:
        connect(server.node(port=port), [server.known_hosts], connect_deadline_s=0.5)
    assert caught.value.node == "csd0"


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 200_000])
def test_server_that_sends_garbage_is_unreachable(server: Server, garbage: bytes) -> None:
    with answering(garbage) as port, pytest.raises(UnreachableError):
        connect(server.node(port=port), [server.known_hosts], connect_deadline_s=1.0)


@pytest.mark.fault(4)
def test_unknown_host_key_is_refused_with_fingerprint_and_remedy(server: Server, tmp_path: Path) -> None:
    fingerprint = asyncssh.import_public_key(server.public_key).get_fingerprint()
    with pytest.raises(HostKeyError, match="unknown") as caught:
        connect(server.node(), [tmp_path / "known_hosts"])
    assert fingerprint in caught.value.message
    assert "csdctl trust --limit csd0" in caught.value.remedy


@pytest.mark.fault(5)
@pytest.mark.parametrize("key_type", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
def test_changed_host_key_is_refused_with_file_and_line(server: Server, key_type: str) -> None:
    other = asyncssh.generate_private_key(key_type).export_public_key().decode()
    server.known_hosts.write_text(f"# ours\n[127.0.0.1]:{server.port} {other}")
    with pytest.raises(HostKeyError, match="has changed") as caught:
        connect(server.node(), [server.known_hosts])
    assert f"{server.known_hosts}:2" in caught.value.message


@pytest.mark.fault(6)
def test_key_with_a_passphrase_is_refused_without_a_prompt(server: Server, tmp_path: Path) -> None:
    key = make_key(tmp_path / "locked", passphrase="secret")
    with pytest.raises(AuthenticationError, match="passphrase") as caught:
        connect(server.node(key=key), [server.known_hosts])
    assert "ssh-add" in caught.value.remedy


def test_key_with_a_passphrase_works_with_an_agent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    shutil.copy(server.key, locked)
    with _agent_holding([make_key(tmp_path / "other"), locked], tmp_path, monkeypatch):
        subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", locked], check=True)
        shutil.copy(f"{server.key}.pub", f"{locked}.pub")
        session = connect(server.node(key=locked), [server.known_hosts])
        assert session.run(["true"]).exit_code == 0
        session.close()


@contextlib.contextmanager
def _agent_holding(keys: list[Path], directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a real ssh-agent with `keys` for this process."""
    address = directory / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", address], stdout=subprocess.DEVNULL)
    try:
        assert eventually(address.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
        subprocess.run(["ssh-add", "-q", *keys], check=True)
        yield
    finally:
        agent.terminate()
        agent.wait()


def test_missing_and_damaged_key_files_are_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="does not exist"):
        connect(server.node(key=tmp_path / "missing"), [server.known_hosts])
    (tmp_path / "damaged").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    with pytest.raises(AuthenticationError, match="is not a private key"):
        connect(server.node(key=tmp_path / "damaged"), [server.known_hosts])


@pytest.mark.fault(12)
def test_output_of_the_login_shell_is_dropped(server: Server) -> None:
    server.shell_prefix = "echo welcome; echo notice >&2; printf 'no line end'; printf 'nor here' >&2"
    session = connect(server.node(), [server.known_hosts])
    completed = session.run(["sh", "-c", "echo out; echo err >&2"])
    assert (completed.stdout, completed.stderr) == (b"out\n", b"err\n")
    talk = session.converse(["cat"])
    talk.send_line("hello")
    assert talk.read_line(deadline_s=scaled(30)) == "hello"
    talk.close()
    session.close()


def test_login_shell_that_never_starts_the_command_is_quoted(server: Server) -> None:
    server.refuse_exec = True
    session = connect(server.node(), [server.known_hosts])
    with pytest.raises(RemoteCommandError, match="not available"):
        session.run(["true"])
    session.close()


def test_login_shell_that_hangs_meets_the_deadline(server: Server) -> None:
    server.shell_prefix = "sleep 30"
    session = connect(server.node(), [server.known_hosts])
    with pytest.raises(DeadlineError, match="login shell"):
        session.run(["true"], deadline_s=0.5)
    session.close()


def test_process_group_is_made_where_the_server_makes_none(server: Server) -> None:
    server.is_group_leader = False
    session = connect(server.node(), [server.known_hosts])
    with pytest.raises(DeadlineError, match="it was ended"):
        session.run(["sh", "-c", "echo $$ >pid; sleep 1000 & wait"], deadline_s=scaled(2))
    pid = int((server.home / "pid").read_text())
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert session.run(["sh", "-c", "exit 9"]).exit_code == 9
    session.close()


@pytest.mark.fault(16)
def test_node_ends_the_command_after_a_lost_connection(server: Server, ssh: Any) -> None:
    errors: list[CsdctlError] = []

    def run() -> None:
        try:
            ssh.run(["sh", "-c", "echo $$ >pid; exec sleep 1000"], deadline_s=scaled(4))
        except CsdctlError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    path = server.home / "pid"
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    server.drop_connections()
    thread.join()
    assert isinstance(errors[0], UnreachableError)
    assert "lost while a command ran" in errors[0].message
    pid = int(path.read_text())
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_commands_go_on_while_keys_are_exchanged_again(server: Server) -> None:
    """Channels close meanwhile, which the reading thread must answer; it must not wait for itself."""
    known = KnownHosts.load([server.known_hosts])
    transport = open_transport(server.node(), Deadline(scaled(10)), JumpHosts(known))
    transport.packetizer.REKEY_BYTES = 1 << 16
    session = SshSession(server.node(), transport)
    ended: list[int] = []

    def run() -> None:
        for _ in range(20):
            ended.append(len(session.run(["head", "-c", "20000", "/dev/zero"], deadline_s=scaled(60)).stdout))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.close()
    assert ended == [20_000] * 120
