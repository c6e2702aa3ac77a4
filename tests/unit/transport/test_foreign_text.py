"""Text of machines in messages, and lines of conversations that are cut anywhere."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.errors import RemoteCommandError
from csdctl.transport.process import LineConversation, Running
from csdctl.transport.session import Completed, bounded, last_line
from csdctl.transport.shell_wrapper import WrappedCommand

TOKEN = "csdctl-0"


class ScriptedProcess:
    """Implements `process.Process` with fixed output."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = [f"{TOKEN}\n".encode(), *chunks, b""]

    def read_stdout(self, timeout_s: float, *, wakes_at_exit: bool = False) -> bytes:
        return self._chunks.pop(0)

    def start_stderr(self, take: Callable[[bytes], object]) -> None:
        take(f"{TOKEN} 77\n".encode())

    def finish_stderr(self, timeout_s: float) -> None: ...

    def write_stdin(self, data: bytes, timeout_s: float) -> None: ...

    def close_stdin(self) -> None: ...

    def exit_code(self, timeout_s: float) -> int:
        return 0

    def kill_group(self, group: int) -> bool:
        return True

    def release(self) -> None: ...


@given(st.lists(st.text(alphabet="ab\v\r\u2028", max_size=5), max_size=6), st.integers(1, 4))
def test_lines_end_at_newlines_only(lines: list[str], cut: int) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    chunks = [content[start : start + cut] for start in range(0, len(content), cut)]
    talk = LineConversation(Running("csd0", WrappedCommand(("cat",), (), TOKEN), ScriptedProcess(chunks)))
    assert [talk.read_line(deadline_s=1) for _ in lines] == lines
    with pytest.raises(EOFError):
        talk.read_line(deadline_s=1)


def test_text_in_messages_is_bounded() -> None:
    assert bounded("short") == "short"
    assert len(bounded("x" * 10_000)) < 400
    assert last_line(b"first\nlast\v\x1b[2J \n\n") == "last\v\x1b[2J"
    assert last_line(b" \n") == ""
    assert len(last_line(b"x" * 1_000_000)) < 400


def test_error_of_a_command_is_bounded() -> None:
    completed = Completed(("x",), 1, b"", b"x" * 1_000_000, 0.0)
    with pytest.raises(RemoteCommandError) as caught:
        completed.check("csd0", doing="a test")
    assert len(str(caught.value)) < 500
