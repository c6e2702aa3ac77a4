"""Machines that lie: an SSH server whose commands answer what the attacker wrote, and a false greeting."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncssh
import yaml

from tests.attacks.hostile_ssh import raw_server
from tests.unit.transport.conftest import USER, SshServer, running_server

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
    """Answers of the machine, files that a test may write at any time."""

    server: SshServer

    def answer(self, *, facts: str = "", output: str = "", complaint: str = "", lies: str = "") -> None:
        """Set what its probes print, and what Python prints when its arguments hold `lies`."""
        answers = {"facts": facts, "output": output, "complaint": complaint, "lies": lies}
        for name, text in answers.items():
            (self.server.home / name).write_bytes(text.encode(errors="surrogateescape"))


@contextlib.contextmanager
def hostile_machine(directory: Path, banner: str = "") -> Iterator[HostileMachine]:
    """Serve one machine; `banner` is sent before the login."""
    with running_server(directory) as server:
        programs = directory / "programs"
        programs.mkdir()
        for name, text in (("sh", SHELL), ("liar", PYTHON)):
            (programs / name).write_text(text.format(home=server.home, python=sys.executable))
            (programs / name).chmod(0o755)
        server.banner, server.shell_prefix = banner, f"PATH={programs}:/usr/bin:/bin"
        machine = HostileMachine(server)
        machine.answer()
        yield machine


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
    (directory / ".csdctl").mkdir(parents=True)
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(directory / "key"))
    os.chmod(directory / "key", 0o600)
    entries: list[dict[str, object]] = []
    for name, node in nodes.items():
        entries.append({"name": name, "address": "127.0.0.1", "port": node})
        if isinstance(node, HostileMachine):
            entries[-1].update(port=node.server.port, key=str(node.server.key))
            node.server.trust_in(directory)
    defaults = {"user": USER, "key": str(directory / "key"), "python": "liar"}
    (directory / "fleet.yaml").write_text(yaml.safe_dump({"defaults": defaults, "nodes": entries}))
    return directory
