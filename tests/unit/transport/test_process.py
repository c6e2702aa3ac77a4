"""Deadlines of commands that print without pause: no wait for their output ever ends by itself.

Their output is long, not endless, so that a wait without a deadline fails instead of hanging.
"""

from itertools import repeat

import pytest

from csdctl.errors import DeadlineError
from csdctl.transport.session import Conversation, Deadline
from tests.unit.transport.scripted_process import GROUP, ScriptedProcess, start

NUM_CHUNKS = 5000
FEW = 10
"""A command is ended after a few reads once its deadline has passed."""


def test_command_that_prints_without_pause_is_ended_at_its_deadline() -> None:
    process = ScriptedProcess(repeat(b"y\n" * 1000, NUM_CHUNKS))
    with pytest.raises(DeadlineError, match="did not finish within 0 s; it was ended"):
        start(process).run_to_end(b"", Deadline(0.0))
    assert process.num_read < FEW
    assert (process.killed, process.is_released) == ([GROUP], True)


def test_wait_for_a_command_that_prints_lines_without_pause_has_a_deadline() -> None:
    process = ScriptedProcess(repeat(b"y\n" * 1000, NUM_CHUNKS))
    with pytest.raises(DeadlineError, match="did not finish within 0 s; it still runs"):
        Conversation(start(process)).wait(deadline_s=0.0)
    assert process.num_read < FEW


@pytest.mark.parametrize("starts", [True, False], ids=["command", "login shell"])
def test_line_that_never_ends_has_a_deadline(starts: bool) -> None:
    """A login shell may print without pause before the command, whose lines then never begin."""
    process = ScriptedProcess(repeat(b"y", NUM_CHUNKS), starts=starts)
    talk = Conversation(start(process))
    with pytest.raises(DeadlineError, match="did not respond within 0 s"):
        talk.read_line(deadline_s=0.0)
    assert process.num_read < FEW


def test_line_that_is_there_is_read_after_the_deadline() -> None:
    talk = Conversation(start(ScriptedProcess([b"one\ntwo\nunfini", b"shed"])))
    with pytest.raises(DeadlineError):  # its first read is the wrapper's line
        talk.read_line(deadline_s=0.0)
    assert [talk.read_line(deadline_s=0.0) for _ in range(2)] == ["one", "two"]
    with pytest.raises(DeadlineError):
        talk.read_line(deadline_s=0.0)
    assert talk.read_line(deadline_s=0.0) == "unfinished"
    with pytest.raises(EOFError):
        talk.read_line(deadline_s=0.0)
