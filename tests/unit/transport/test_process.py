"""Commands with fixed output instead of pipes or a channel: deadlines, lines, text in messages.

Output without pause is long, not endless, so that a wait without a deadline fails instead of hanging.
"""

from collections.abc import Iterable
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.errors import DeadlineError
from csdctl.transport.commands import WrappedCommand
from csdctl.transport.session import Conversation, Deadline, bounded, last_line

NUM_CHUNKS = 5000
FEW = 10
"""A command is ended after a few reads once its deadline has passed."""
TOKEN = "csdctl-0"
GROUP = 77


class ScriptedProcess:
    """Implements `session.Process`. The next bytes are always there, however short the wait for them."""

    def __init__(self, chunks: Iterable[bytes], *, starts: bool = True) -> None:
        self._chunks = chain([f"{TOKEN}\n".encode()] if starts else [], chunks)
        self._errors = iter([f"{TOKEN} {GROUP}\n".encode()] if starts else [])
        self.num_read = 0
        self.is_at_end = False
        self.killed: list[int] = []
        self.is_released = False

    def read_stdout(self, timeout_s: float) -> bytes:
        self.num_read += 1
        chunk = next(self._chunks, b"")
        self.is_at_end = not chunk
        return chunk

    def read_stderr(self) -> bytes:
        return next(self._errors, b"")

    def write_stdin(self, data: bytes, timeout_s: float) -> None: ...

    def close_stdin(self) -> None: ...

    def exit_code(self, timeout_s: float) -> int:
        if not self.is_at_end:
            raise TimeoutError
        return 0

    def kill_group(self, group: int) -> bool:
        self.killed.append(group)
        return True

    def release(self) -> None:
        self.is_released = True


def start(process: ScriptedProcess) -> Conversation:
    """Return the command of `process`, running on csd0."""
    return Conversation("csd0", WrappedCommand(("cat",), TOKEN, b""), process)


def test_command_that_prints_without_pause_has_a_deadline() -> None:
    process = ScriptedProcess(repeat(b"y\n" * 1000, NUM_CHUNKS))
    with pytest.raises(DeadlineError, match="did not finish within 0 s; it still runs"):
        start(process).wait(deadline_s=0.0)
    assert (process.num_read < FEW, process.killed, process.is_released) == (True, [], False)
    process = ScriptedProcess(repeat(b"y\n" * 1000, NUM_CHUNKS))
    with pytest.raises(DeadlineError, match="did not finish within 0 s; it was ended"):
        start(process).run_to_end(b"", Deadline(0.0))
    assert (process.num_read < FEW, process.killed, process.is_released) == (True, [GROUP], True)


@pytest.mark.parametrize("starts", [True, False], ids=["command", "login shell"])
def test_line_that_never_ends_has_a_deadline(starts: bool) -> None:
    """A login shell may print without pause before the command, whose lines then never begin."""
    process = ScriptedProcess(repeat(b"y", NUM_CHUNKS), starts=starts)
    talk = start(process)
    with pytest.raises(DeadlineError, match="did not respond within 0 s"):
        talk.read_line(deadline_s=0.0)
    assert process.num_read < FEW


def test_line_that_is_there_is_read_after_the_deadline() -> None:
    talk = start(ScriptedProcess([b"one\ntwo\nunfini", b"shed"]))
    with pytest.raises(DeadlineError):  # its first read is the wrapper's line
        talk.read_line(deadline_s=0.0)
    assert [talk.read_line(deadline_s=0.0) for _ in range(2)] == ["one", "two"]
    with pytest.raises(DeadlineError):
        talk.read_line(deadline_s=0.0)
    assert talk.read_line(deadline_s=0.0) == "unfinished"
    with pytest.raises(EOFError):
        talk.read_line(deadline_s=0.0)


@given(st.lists(st.text(alphabet="ab\v\r\u2028", max_size=5), max_size=6), st.integers(1, 4))
def test_lines_end_at_newlines_only(lines: list[str], cut: int) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    chunks = [content[start : start + cut] for start in range(0, len(content), cut)]
    talk = start(ScriptedProcess(chunks))
    assert [talk.read_line(deadline_s=1) for _ in lines] == lines
    with pytest.raises(EOFError):
        talk.read_line(deadline_s=1)


def test_text_in_messages_is_bounded() -> None:
    assert bounded("short") == "short"
    assert len(bounded("x" * 10_000)) < 400
    assert last_line(b"first\nlast\v\x1b[2J \n\n") == "last\v\x1b[2J"
    assert last_line(b" \n") == ""
    assert len(last_line(b"x" * 1_000_000)) < 400
