"""Processes of ranks that are started before there is a run for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from csdctl.supervision.run_setup import EarlyRanks
from csdctl.worker.protocol.events import Failed, event_from_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import Runtime
from tests.fake_session import FakeConversation, FakeSession

RUNTIME = Runtime(2, onednn=False)


def start(exit_code: int = 0) -> tuple[EarlyRanks, FakeConversation]:
    session = FakeSession("csd0").on("sh", exit_code=exit_code)
    early = EarlyRanks("20261127-1")
    early.start(session, "python3", "worker.pyz", RUNTIME)
    assert session.commands[0][-1] == "csdctl-run=20261127-1/csd0"
    return early, session.conversations[0]


def test_rank_takes_over_the_process_of_its_machine_once() -> None:
    early, conversation = start()
    assert early.take("csd1", RUNTIME, "spec.json", 2) is None
    assert early.take("csd0", RUNTIME, "spec.json", 1) is conversation
    assert [json.loads(line) for line in conversation.sent] == [{"spec": "spec.json", "rank": 1}]
    assert early.take("csd0", RUNTIME, "spec.json", 1) is None
    early.close()
    assert not conversation.is_closed


def test_process_that_does_not_fit_or_has_ended_is_left_and_closed() -> None:
    early, conversation = start()
    assert early.take("csd0", Runtime(1), "spec.json", 1) is None
    assert conversation.is_closed
    early, conversation = start(exit_code=1)
    assert early.take("csd0", RUNTIME, "spec.json", 1) is None
    early, conversation = start()
    early.close()
    assert conversation.is_closed


@pytest.mark.parametrize("is_told", [True, False])
def test_waiting_process_has_loaded_tensorflow_and_becomes_the_rank_that_it_is_told_to_be(
    tmp_path: Path, *, is_told: bool
) -> None:
    """It reads the spec that it is told; without csdctl, it ends."""
    (tmp_path / "spec.json").write_text("{}")
    line = json.dumps({"spec": str(tmp_path / "spec.json"), "rank": 1}) + "\n" if is_told else ""
    done = subprocess.run(
        [sys.executable, "-v", "-m", "csdctl.worker", "rank", "--runtime", to_json(Runtime())],
        input=line,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "import 'tensorflow'" in done.stderr
    (failed,) = filter(None, map(event_from_line, done.stdout.splitlines()))
    assert isinstance(failed, Failed)
    expected = "RunSpec: expected architecture" if is_told else "expected JSON, received ''"
    assert expected in failed.message
