"""Nodes that answer csdctl's programs with whatever they like: without end, out of range, of another type."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, DeadlineError, RemoteCommandError
from csdctl.launch.leftovers import CleanupOptions, clean_machine, describe_holder
from csdctl.shipping.deliver import deliver, pack_payload
from csdctl.shipping.store import store_bytes
from csdctl.transport.program import AnswerLimits
from csdctl.transport.ssh import SshSession, connect
from tests.patience import eventually, scaled

pytestmark = [pytest.mark.attack(13), pytest.mark.first(1)]

HEAD = """\
import json, sys, time


def say(kind, **content):
    print("@csdctl-" + kind, json.dumps(content), flush=True)


"""
QUICK = AnswerLimits(silence_s=5.0, whole_s=3.0)
"""So short that the whole ends first where every answer comes in time."""
PATIENT = AnswerLimits(silence_s=scaled(60), whole_s=scaled(60))
"""For an answer that ends the delivery."""

FOR_EVER = {
    "progress": "while True: say('progress'); time.sleep(0.6)",
    "progress without pause": "while True: say('progress')",
    "more of nothing": "while True: say('missing', marks=['0'])",
    "the same again": "while True: say('missing', marks=['1']); sys.stdin.buffer.read(9)",
    "a line without end": "while True: sys.stdout.write('x' * 65536)",
    "silence": "time.sleep(3600)",
    "no reading": "say('missing', marks=['1']); time.sleep(3600)",
}
WRONG = {
    "refused an object": "say('error', message={'a': 1})",
    "an unknown kind": "say('mine')",
    "more than was offered": "say('missing', marks=['11'])",
    "other marks": "say('missing', marks=['x'])",
    "numbers for marks": "say('missing', marks=[1])",
    "failed without a number": "say('damaged')",
    "damage of what was not offered": "say('damaged', number=7)",
    "a bomb": "print('@csdctl-result ' + '[' * 900_000, flush=True); time.sleep(3600)",
}


@pytest.fixture
def session(server: Any) -> Iterator[SshSession]:
    """A real SSH session to a node whose Python is the attacker's."""
    with closing(connect(server.node(name="csd1"), [server.known_hosts])) as opened:
        yield opened


@pytest.fixture
def hostile(tmp_path: Path) -> Callable[[str], str]:
    """Write a program in the place of a node's Python; return its path."""

    def write(body: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable} -IS\n{HEAD}{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


@contextmanager
def refused(*kinds: type[CsdctlError]) -> Iterator[pytest.ExceptionInfo[CsdctlError]]:
    """Expect a short error that names the node."""
    with pytest.raises(kinds or RemoteCommandError) as raised:
        yield raised
    assert raised.value.node == "csd1"
    assert len(raised.value.message) < 400


def send(session: SshSession, directory: Path, python: str, patience: AnswerLimits) -> None:
    payload = pack_payload([store_bytes(bytes(9), ".bin", directory)])
    deliver(session, payload, python=python, patience=patience)


@pytest.mark.parametrize("body", FOR_EVER.values(), ids=FOR_EVER)
def test_receiver_that_goes_on_for_ever_is_left(
    session: SshSession, tmp_path: Path, hostile: Callable[[str], str], body: str
) -> None:
    with refused(RemoteCommandError, DeadlineError):
        send(session, tmp_path, hostile(body), QUICK)


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_answer_of_a_receiver_is_typed_and_in_range(
    session: SshSession, tmp_path: Path, hostile: Callable[[str], str], body: str
) -> None:
    with refused() as raised:
        send(session, tmp_path, hostile(body), PATIENT)
    assert raised.value.message.startswith("receiving files")


LEFT: dict[str, Any] = {"num_processes": 0, "runs": [], "paths": [], "num_bytes": 0}
ANSWERS = [
    "result ",
    "result " + "[" * 100_000,
    'held {"holder": 5}',
    "held " + json.dumps({"holder": describe_holder("train", Path()) | {"boot": "an earlier one"}}),
    *(
        "result " + json.dumps({**LEFT, **wrong})
        for wrong in ({"num_processes": -1}, {"runs": [{}]}, {"paths": [[1]]}, {"paths": ["x" * 5_000_000]})
    ),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda text: text[:20])
def test_answer_about_leftovers_is_typed_and_in_range(
    session: SshSession, hostile: Callable[[str], str], answer: str
) -> None:
    with refused():
        clean_machine(session, hostile(f"print('@csdctl-' + {answer!r})"), CleanupOptions())


def test_process_that_a_lock_only_names_is_not_ended(
    session: SshSession, server: Any, tmp_path: Path
) -> None:
    """The file of the lock says who holds it; a process is ended only if it has that file open."""
    victim = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    state = server.state / ".csdctl"
    state.mkdir(mode=0o700, parents=True)
    false = {"boot": "an earlier one", "holding_pid": victim.pid}
    (state / "lock").write_text(json.dumps(describe_holder("train", tmp_path) | false))
    with subprocess.Popen(["flock", state / "lock", "sleep", "100000"], start_new_session=True) as holding:
        try:
            attempt = ["flock", "-n", state / "lock", "true"]
            assert eventually(lambda: subprocess.run(attempt, check=False).returncode != 0)
            clean_machine(session, sys.executable, CleanupOptions())
            assert victim.poll() is None
        finally:
            victim.kill()
            victim.wait()
            os.killpg(holding.pid, signal.SIGKILL)
