"""The programs that csdctl starts on a machine, started by a process that a test then kills.

`python tests/started_programs.py PROJECT [NODE]` starts it on a node of the project's fleet, or on this
machine; prints `started`, and waits.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import csdctl
from csdctl.energy.sampler import LOOP
from csdctl.fleet.fleet_file import load_fleet
from csdctl.shipping.deliver import build_receiver
from csdctl.transport.commands import build_program_command
from csdctl.transport.local import LocalSession
from csdctl.transport.many import open_sessions
from csdctl.transport.session import Session
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.sandbox import SandboxPolicy

ANSWER_S = 60.0
SOURCES = str(Path(csdctl.__file__).parents[1])
COMMAND = [sys.executable, "-P", __file__]
ENVIRONMENT = {"PYTHONPATH": SOURCES}
MANIFEST = {"objects": [["0" * 64, 1000, 0o600]], "trees": [], "keep": [0]}
SANDBOX = ("/bin/sh", "-c", "setsid sleep 3000 & echo inside; sleep 3000")
RANK = 'mkfifo .csdctl/never; echo begins; exec "$@" rank --rank 0 --spec .csdctl/never'
"""A rank that does not read its input yet: its spec never comes."""


def start_all(session: Session, python: str) -> None:
    """Start each program, and take it to where it waits for csdctl, or would work for long."""

    def start(command: Sequence[str], line: str, answer: str, first: bytes = b"") -> None:
        conversation = session.converse(command)
        conversation.send_bytes(first)
        if line:
            conversation.send_line(line)
        if answer:
            received = conversation.read_line(deadline_s=ANSWER_S)
            assert received.startswith(answer), f"received {received!r}, expected {answer!r}"

    receiver, first = build_receiver(python, MANIFEST)
    worker = ["env", f"PYTHONPATH={SOURCES}", python, "-P", "-u", "-m", "csdctl.worker"]
    policy = SandboxPolicy(SANDBOX, False, "", (), (), (python,), (), {})
    start(build_program_command(python, "receive", ["lock"]), "{}", "@csdctl-locked")
    start(receiver, "", "@csdctl-missing", first)
    start(build_program_command(python, "leftovers"), "", "")
    start(["sh", "-c", LOOP, "csdctl-power", "sleep 3000", "csd0"], "", "")
    start([*worker, "sandbox"], to_json(policy), "inside")
    start(["sh", "-c", RANK, "sh", *worker], "", "begins")


def start_and_kill(*arguments: str, **variables: str) -> None:
    """Start all as another process with these environment variables, and kill that."""
    environment = os.environ | ENVIRONMENT | variables
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        assert process.stdout.readline() == b"started\n"
        process.kill()


def main(project: str, node: str = "") -> None:
    """Start all on one machine, and wait to be killed."""
    with ExitStack() as stack:
        session: Session = LocalSession("host", Path(project))
        if node:
            fleet = load_fleet(Path(project) / "fleet.yaml")
            session = stack.enter_context(open_sessions(fleet, directory=Path(project))).reachable[node]
        start_all(session, sys.executable)
        print("started", flush=True)
        time.sleep(3000)


if __name__ == "__main__":
    main(*sys.argv[1:])
