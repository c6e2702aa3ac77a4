"""Text of machines, servers and files that a terminal would obey, or that Rich would take for markup."""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import asyncssh
import numpy as np
import pytest
import yaml

from csdctl.worker.protocol.events import Failed, Ready, event_to_line
from tests.attacks.hostile_ssh import raw_server
from tests.attacks.hostile_text import (
    CLIPBOARD,
    CONTROLS,
    FORGED,
    HOSTILE,
    MARKUP,
    facts_of_this_machine,
    hostile_facts,
)
from tests.attacks.terminal import on_terminal
from tests.emulated.small_jobs import dense_model
from tests.unit.transport.conftest import USER, SshServer, running_server

pytestmark = pytest.mark.first(1)

ESCAPED_CLIPBOARD = r"\x1b]52;c;ZXZpbA==\x07"
MARKUP_AS_TEXT = ("[/bold]", "[link=file:///etc/passwd]", ":smile:")
JOB = """\
model: model.py:build
data: {{public: {{path: public.npz}}{private}}}
recipe: {{epochs: 1, learning_rate: 0.1, loss: mean_squared_error}}
"""
GREETINGS = {
    "old": b"SSH-1%s-x\r\n",
    "lines": b"%s\r\n" * 120,
    "silent": b"SSH-2.0-%s\r\n" + b"\x00" * 64,
    "comment": b"SSH-2.0-OpenSSH_9.9 %s\r\n%s\r\n",
    "web": b"HTTP/1.1 400 %s\r\n\r\n",
}

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


def forged_lines(text: str) -> list[str]:
    """Return the lines that a machine wrote and that could be csdctl's own."""
    begins = ("error: the disk is full", "  → run: curl")
    return [line for line in text.splitlines() if line.startswith(begins)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[HostileMachine]:
    """A machine that sends a banner before login."""
    with hostile_machine(tmp_path / "machine", banner=HOSTILE) as served:
        yield served


@pytest.fixture
def second(tmp_path: Path) -> Iterator[HostileMachine]:
    """Another one."""
    with hostile_machine(tmp_path / "other") as served:
        yield served


@pytest.mark.attack(10)
@pytest.mark.attack(11)
@pytest.mark.parametrize(
    "command", ["discover -v", "doctor -vv", "trust --yes", "clean --dry-run", "deploy --tree tree -vv"]
)
def test_terminal_obeys_no_text_of_a_machine(
    machine: HostileMachine, second: HostileMachine, tmp_path: Path, command: str
) -> None:
    answers = {"output": f"{HOSTILE}\n{FORGED}", "complaint": f"{FORGED}\n{CLIPBOARD}{MARKUP}\x9b2J"}
    machine.answer(facts=hostile_facts(HOSTILE), **answers)
    cpu = f"processor : 0\nmodel name : {CLIPBOARD}{MARKUP}\nflags : avx"
    second.answer(facts=facts_of_this_machine(CPU=cpu), **answers)  # fit until its Python is asked
    project = write_project(tmp_path / "project", {"csd0": machine, "csd1": second})
    (project / "tree").mkdir()
    (project / "tree" / CONTROLS.replace("/", "")).write_text("")
    screen = on_terminal(project, *command.split(), columns=250)
    assert screen.foreign == []
    assert "csdctl failed" not in screen.plain
    assert not forged_lines(screen.plain)
    if command.startswith("discover"):
        assert all(text in screen.plain for text in MARKUP_AS_TEXT)


@pytest.mark.attack(10)
@pytest.mark.parametrize("command", ["discover", "trust --yes"])
def test_terminal_obeys_no_greeting_before_login(tmp_path: Path, command: str) -> None:
    line = CONTROLS.replace("\r", "").encode()
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(greeting(sent.replace(b"%s", line))) for name, sent in GREETINGS.items()
        }
        screen = on_terminal(write_project(tmp_path / "project", ports), *command.split())
    assert screen.foreign == []
    assert ESCAPED_CLIPBOARD in screen.plain
    assert all(name in screen.plain for name in GREETINGS)
    assert screen.code == 4


@pytest.mark.thorough
@pytest.mark.attack(10)
def test_terminal_and_logs_get_no_control_code_of_a_worker(machine: HostileMachine, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", {"csd0": machine})
    (project / "model.py").write_text(dense_model(2, outputs=1, activation="linear"))
    np.savez(project / "public.npz", x=np.zeros((64, 2), np.float32), y=np.zeros((64, 1), np.float32))
    (project / "job.yaml").write_text(JOB.format(private=""))
    (project / "private.yaml").write_text(JOB.format(private=", private: {path: ~/private.npz}"))
    error = {"exit_code": 2, "message": FORGED + HOSTILE, "remedy": FORGED + HOSTILE}
    said = f"{HOSTILE}\n@csdctl-error {json.dumps(error)}\n"
    machine.answer(facts=facts_of_this_machine(), lies=" prepare", output=said, complaint=HOSTILE)
    prepared = on_terminal(project, "prepare", "private.yaml")
    assert prepared.foreign == []
    assert ESCAPED_CLIPBOARD in prepared.plain
    assert prepared.code != 0

    events = [Ready(1, "csd0", 32), Failed(1, "csd0", FORGED + HOSTILE, FORGED + HOSTILE, 2)]
    printed = "\n".join([HOSTILE, *map(event_to_line, events), ""])
    machine.answer(facts=facts_of_this_machine(), lies=" rank ", output=printed, complaint=HOSTILE)
    trained = on_terminal(project, "train", "--batch-size", "8", "--skip-doctor", "-vv")
    assert trained.foreign == []
    assert trained.code not in (0, 130)
    assert not forged_lines(prepared.plain + trained.plain)
    [log] = project.glob(".csdctl/runs/*/logs/rank-1.log")
    assert ESCAPED_CLIPBOARD in log.read_text()
    assert not {char for char in log.read_text() if not char.isprintable()} - {"\n", "\t"}
    assert on_terminal(project, "report").foreign == []
