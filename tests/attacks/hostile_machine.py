"""Machines that lie: an SSH server whose commands answer what the attacker wrote, and a false greeting."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncssh
import yaml

from csdctl.emulation.commands import Commands
from tests.attacks.hostile_ssh import raw_server
from tests.patience import WAIT_S, scaled

# The facts are found by `sh -c SCRIPT csdctl-facts PYTHON`; everything else reaches the real shell.
SHELL = """\
#!/bin/sh
if [ "$3" = csdctl-facts ]; then exec cat "{home}/facts"; fi
exec /bin/sh "$@"
"""
# Programs whose arguments hold the word in `lies`: an answer, a complaint, and a failure. Others really run.
PYTHON = """\
#!/bin/sh
case "$*" in
  *"$(cat "{home}/lies")"*) cat "{home}/output"; cat "{home}/complaint" >&2; exit 1 ;;
esac
exec {python} "$@"
"""


@dataclass(frozen=True)
class HostileMachine:
    """Answers of the machine, files that a test may write at any time, and its port."""

    home: Path
    port: int
    host_key: str

    def answer(self, *, facts: str = "", output: str = "", complaint: str = "", lies: str = "") -> None:
        """Set what its probes print, and what Python prints when its arguments hold `lies`."""
        answers = {"facts": facts, "output": output, "complaint": complaint, "lies": lies}
        for name, text in answers.items():
            (self.home / name).write_bytes(text.encode(errors="surrogateescape"))


class _Server(asyncssh.SSHServer):
    def __init__(self, banner: str) -> None:
        self._banner = banner

    def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
        self._connection = connection

    def begin_auth(self, username: str) -> bool:
        if self._banner:
            self._connection.send_auth_banner(self._banner)
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return True


class _NoLimit:
    def build_command(self, command: list[str]) -> list[str]:
        return command


@contextlib.contextmanager
def hostile_machine(directory: Path, banner: str = "") -> Iterator[HostileMachine]:
    """Serve one machine that accepts every login; `banner` is sent before it."""
    home, programs = directory / "home", directory / "programs"
    for path, text in ((programs / "sh", SHELL), (programs / "liar", PYTHON)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(home=home, python=sys.executable))
        path.chmod(0o755)
    home.mkdir()
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home)}

    key = asyncssh.generate_private_key("ssh-ed25519")
    started = threading.Event()
    ports: list[int] = []
    ends: list[Callable[[], object]] = []

    async def serve() -> None:
        end = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(end.set))
        async with asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=lambda: _Server(banner),
            server_host_keys=[key],
            process_factory=Commands(_NoLimit(), environment, home).run,
            encoding=None,
        ) as acceptor:
            ports.append(acceptor.get_port())
            started.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(scaled(WAIT_S))
    try:
        machine = HostileMachine(home, ports[0], key.export_public_key().decode().strip())
        machine.answer()
        yield machine
    finally:
        ends[0]()
        thread.join()


def greeting(sent: bytes) -> contextlib.AbstractContextManager[int]:
    """Answer every connection with `sent` in place of SSH's greeting; the context is the port."""

    def talk(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    return raw_server(talk)


def write_project(directory: Path, nodes: Mapping[str, HostileMachine | int]) -> Path:
    """Write fleet.yaml for `nodes` (a machine, or the port of a greeting), a key, and the host keys."""
    directory.mkdir()
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(directory / "key"))
    os.chmod(directory / "key", 0o600)
    ports = {name: node if isinstance(node, int) else node.port for name, node in nodes.items()}
    entries = [{"name": name, "address": "127.0.0.1", "port": port} for name, port in ports.items()]
    defaults = {"user": "me", "key": str(directory / "key"), "python": "liar"}
    (directory / "fleet.yaml").write_text(yaml.safe_dump({"defaults": defaults, "nodes": entries}))
    (directory / ".csdctl").mkdir()
    trusted = [node for node in nodes.values() if isinstance(node, HostileMachine)]
    lines = [f"[127.0.0.1]:{machine.port} {machine.host_key}\n" for machine in trusted]
    (directory / ".csdctl" / "known_hosts").write_text("".join(lines))
    return directory
