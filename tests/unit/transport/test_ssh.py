"""SSH: keys, login shells and key exchanges. Failing connections are in tests/lab and tests/attacks."""

import base64
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import AuthenticationError, DeadlineError, RemoteCommandError, UnreachableError
from csdctl.facts.machine import measure_clock_trip
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.session import Deadline
from csdctl.transport.ssh import JumpHosts, SshSession, connect, load_keys, open_transport
from tests.patience import eventually, scaled

Server = Any


def test_name_that_does_not_resolve_is_unreachable(server: Server) -> None:
    node = server.node(address="no-such-name.invalid")
    with pytest.raises(UnreachableError, match="cannot be resolved"):
        connect(node, [server.known_hosts], connect_deadline_s=scaled(60))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An agent without keys."""
    address = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", address], stdout=subprocess.DEVNULL)
    try:
        assert eventually(address.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.usefixtures("agent")
def test_key_with_a_passphrase_works_with_an_agent(server: Server, gate: Server, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    shutil.copy(server.key, locked)
    subprocess.run(["ssh-add", "-q", gate.key, locked], check=True)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", locked], check=True)
    shutil.copy(f"{server.key}.pub", f"{locked}.pub")
    with contextlib.closing(connect(server.node(key=locked), [server.known_hosts])) as session:
        assert session.run(["true"]).exit_code == 0


@pytest.mark.usefixtures("agent")
def test_keys_are_offered_in_the_order_of_ssh(server: Server, gate: Server, tmp_path: Path) -> None:
    """First keys of files that the agent has, then its others, then files. One private key is missing."""
    rsa, missing = tmp_path / "rsa", tmp_path / "only in the agent"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", rsa], check=True)
    subprocess.run(["ssh-add", "-q", rsa, gate.key], check=True)
    shutil.copy(f"{gate.key}.pub", f"{missing}.pub")
    node = server.node(key=server.key, other_keys=(tmp_path / "nowhere", missing))
    blobs = [base64.b64decode(Path(f"{key}.pub").read_text().split()[1]) for key in (gate.key, server.key)]
    keys, notes = load_keys(node)
    assert [key.asbytes() for key in keys] == blobs
    assert notes == [f"the key {tmp_path / 'nowhere'} does not exist"]
    keys, _ = load_keys(replace(node, offers_agent=True))
    assert [key.get_name() for key in keys] == ["ssh-ed25519", "ssh-rsa", "ssh-ed25519"]
    assert [keys[0].asbytes(), keys[2].asbytes()] == blobs
    with contextlib.closing(connect(node, [server.known_hosts])) as session:
        assert session.run(["true"]).exit_code == 0


def test_missing_and_damaged_key_files_are_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="does not exist"):
        connect(server.node(key=tmp_path / "missing"), [server.known_hosts])
    (tmp_path / "damaged").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    with pytest.raises(AuthenticationError, match="is not a private key"):
        connect(server.node(key=tmp_path / "damaged"), [server.known_hosts])


@pytest.mark.parametrize("start_up", ["sleep 30", "read x", "cat >/dev/null", "exec sh"])
def test_login_shell_that_never_starts_the_command_meets_the_deadline(
    server: Server, ssh: SshSession, start_up: str
) -> None:
    server.shell_prefix = start_up
    with pytest.raises(DeadlineError, match="the login shell did not start it") as caught:
        ssh.run(["cat"], stdin=b"content", deadline_s=0.5)
    assert "may read standard input" in caught.value.remedy


def test_login_shell_that_refuses_the_command_is_quoted(server: Server, ssh: SshSession) -> None:
    server.refuse_exec = True
    with pytest.raises(RemoteCommandError, match="not available"):
        ssh.run(["true"])


def test_start_up_file_that_merges_outputs_changes_no_output(server: Server, ssh: SshSession) -> None:
    server.shell_prefix = "echo welcome; exec 2>&1"
    assert ssh.run(["printf", "x"]).output == "x"
    assert ssh.run(["true"]).output == ""
    with pytest.raises(DeadlineError, match="it was ended"):
        ssh.run(["sleep", "1000"], deadline_s=scaled(2))


def test_start_of_the_login_shell_does_not_count_for_the_clock(server: Server, ssh: SshSession) -> None:
    server.shell_prefix = "sleep 1; date +%s.%N >started"
    trip = measure_clock_trip(ssh, scaled(30))
    assert trip.sent_s >= float((server.home / "started").read_text())


def test_missing_home_is_named(server: Server) -> None:
    server.shell_prefix = "HOME=/nonexistent"
    with contextlib.closing(connect(server.node(), [server.known_hosts])) as session:
        with pytest.raises(RemoteCommandError, match="the home directory '/nonexistent' does not exist"):
            session.run(["true"])
        assert session.run(["true"], is_users=True).exit_code == 0
    assert not Path("/nonexistent").exists()
    node = server.node(state=str(server.directory / "elsewhere"))
    with contextlib.closing(connect(node, [server.known_hosts])) as session:
        assert session.run(["pwd"]).output.startswith(str(server.directory / "elsewhere/machines/"))


def test_process_group_is_made_where_the_server_makes_none(server: Server, ssh: SshSession) -> None:
    server.is_group_leader = False
    with pytest.raises(DeadlineError, match="it was ended"):
        ssh.run(["sh", "-c", "echo $$ >pid; sleep 1000 & wait"], deadline_s=scaled(2))
    pid = int((server.state / "pid").read_text())
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert ssh.run(["sh", "-c", "exit 9"]).exit_code == 9


def test_commands_go_on_while_keys_are_exchanged_again(server: Server) -> None:
    """Channels close meanwhile, which the reading thread must answer. It must not wait for itself."""
    known_hosts = KnownHosts.load([server.known_hosts])
    transport = open_transport(server.node(), Deadline(scaled(10)), JumpHosts(known_hosts))
    transport.packetizer.REKEY_BYTES = 1 << 16
    session = SshSession(server.node(), transport)

    def run(_: int) -> int:
        return len(session.run(["head", "-c", "20000", "/dev/zero"], deadline_s=scaled(60)).stdout)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, range(120))) == [20_000] * 120
    session.close()
