"""Sessions for the tests of transport: the host itself, and a small real SSH server in a thread.

The server is asyncssh's, on a real socket, with its own home directory.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from csdctl.fleet.model import Node
from csdctl.transport.commands import find_state_directory
from csdctl.transport.local import LocalSession
from csdctl.transport.ssh import SshSession, connect
from tests.patience import WAIT_S, scaled

USER = "tester"
NASTY_NAMES = [
    "with space",
    "semi;colon",
    "$(touch pwned)",
    "`touch pwned`",
    "new\nline",
    "-rf",
    "--help",
    "quote'quote\"quote",
    "*",
    "back\\slash",
    "ü€",
    "~",
]
"""File names and arguments that break naive quoting."""


@dataclass
class ServerFiles:
    """The port of a server, its user's key and its known host key."""

    directory: Path
    port: int = 0

    @property
    def key(self) -> Path:
        return self.directory / "id_user"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    def node(self, **changes: Any) -> Node:
        values = {"name": "csd0", "address": "127.0.0.1", "port": self.port, "user": USER, "key": self.key}
        return Node(**{**values, **changes})

    def trust(self, public_key: str) -> None:
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public_key}")

    def trust_in(self, project: Path) -> None:
        known_hosts = project / ".csdctl" / "known_hosts"
        known_hosts.parent.mkdir(exist_ok=True)
        with known_hosts.open("a") as file:
            file.write(self.known_hosts.read_text().strip() + "\n")


@dataclass
class SshServer(ServerFiles):
    """The configuration of the server. Fields may be changed while it runs."""

    banner: str = ""
    """Text that is sent before the login."""
    shell_prefix: str = ""
    """Shell text that runs before every command, like the start-up file of a login shell."""
    is_group_leader: bool = True
    refuse_exec: bool = False
    forwards: bool = True
    """Whether it serves as a jump host."""
    connections: list[asyncssh.SSHServerConnection] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def state(self) -> Path:
        """The directory that csdctl's own programs start in."""
        return find_state_directory(str(self.home / ".csdctl"))

    @property
    def public_key(self) -> str:
        return (self.directory / "host_key.pub").read_text()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[SshServer]:
    """A second server, for a jump host."""
    with running_server(tmp_path / "gate") as running:
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with running_server(tmp_path / "server") as running:
        yield running


@pytest.fixture
def ssh(server: SshServer) -> Iterator[SshSession]:
    """An open session to the server. Its home is the directory in which its programs start."""
    session = connect(server.node(env=(("HOME", str(server.state)),)), [server.known_hosts])
    yield session
    session.close()


@pytest.fixture(params=["local", "ssh"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """A session of each transport, and the directory that csdctl's own programs start in."""
    if request.param == "ssh":
        yield request.getfixturevalue("ssh"), request.getfixturevalue("server").state
    else:
        session = LocalSession("host", tmp_path, {"HOME": str(tmp_path)})
        yield session, tmp_path
        session.close()


@contextlib.contextmanager
def running_server(directory: Path) -> Iterator[SshServer]:
    """Start a server with keys and home in `directory`."""
    server = SshServer(directory)
    server.home.mkdir(parents=True)
    for path in (server.key, directory / "host_key"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        path.touch(mode=0o600)
        key.write_private_key(path)
        key.write_public_key(f"{path}.pub")
    started = threading.Event()
    thread = threading.Thread(target=lambda: server.loop.run_until_complete(_serve(server, started)))
    thread.start()
    assert started.wait(scaled(WAIT_S))
    server.trust(server.public_key)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.stopping.set)
        thread.join()
        server.loop.close()


async def _serve(server: SshServer, started: threading.Event) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    server.port = listening.getsockname()[1]
    listener = await asyncssh.listen(
        sock=listening,
        server_factory=lambda: _Gate(server),
        server_host_keys=[str(server.directory / "host_key")],
        process_factory=lambda process: _run(server, process),
        encoding=None,
        line_editor=False,
    )
    started.set()
    await server.stopping.wait()
    listener.close()
    for connection in server.connections:
        connection.abort()
    handlers = asyncio.all_tasks() - {asyncio.current_task()}
    for handler in handlers:
        handler.cancel()
    await asyncio.gather(*handlers, return_exceptions=True)
    await asyncio.sleep(0.02)  # the pipes of what was ended close by themselves


class _Gate(asyncssh.SSHServer):
    def __init__(self, server: SshServer) -> None:
        self._server = server

    def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
        self._server.connections.append(connection)

    def begin_auth(self, username: str) -> bool:
        if self._server.banner:
            self._server.connections[-1].send_auth_banner(self._server.banner)
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        ours = asyncssh.read_public_key(f"{self._server.key}.pub")
        return username == USER and key.public_data == ours.public_data

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        if not self._server.forwards:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "not allowed")
        return True


async def _run(server: SshServer, process: asyncssh.SSHServerProcess[bytes]) -> None:
    if server.refuse_exec:
        process.stderr.write(b"This account is currently not available.\n")
        process.exit(1)
        return
    child = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        f"{server.shell_prefix}\n{process.command}",
        cwd=server.home,
        env={"HOME": str(server.home), "PATH": os.environ["PATH"]},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=server.is_group_leader,
    )
    try:
        # asyncssh has its own redirection, which fails when a command ends while input still comes.
        feeding = asyncio.create_task(_pump(process.stdin, child.stdin))
        await asyncio.gather(_pump(child.stdout, process.stdout), _pump(child.stderr, process.stderr))
        code = await child.wait()
        feeding.cancel()
        if code < 0:
            process.exit_with_signal(signal.Signals(-code).name[3:])
        else:
            process.exit(code)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        raise
    finally:
        child._transport.close()  # asyncio has no public way to let go of unread pipes


async def _pump(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    if isinstance(sink, asyncio.StreamWriter):
        sink.close()
