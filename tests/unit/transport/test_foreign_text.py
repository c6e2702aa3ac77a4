"""Text of machines in messages, and lines of conversations that are cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.transport.session import Conversation, bounded, last_line
from tests.unit.transport.scripted_process import ScriptedProcess, start


@given(st.lists(st.text(alphabet="ab\v\r\u2028", max_size=5), max_size=6), st.integers(1, 4))
def test_lines_end_at_newlines_only(lines: list[str], cut: int) -> None:
    content = "".join(f"{line}\n" for line in lines).encode()
    chunks = [content[start : start + cut] for start in range(0, len(content), cut)]
    talk = Conversation(start(ScriptedProcess(chunks)))
    assert [talk.read_line(deadline_s=1) for _ in lines] == lines
    with pytest.raises(EOFError):
        talk.read_line(deadline_s=1)


def test_text_in_messages_is_bounded() -> None:
    assert bounded("short") == "short"
    assert len(bounded("x" * 10_000)) < 400
    assert last_line(b"first\nlast\v\x1b[2J \n\n") == "last\v\x1b[2J"
    assert last_line(b" \n") == ""
    assert len(last_line(b"x" * 1_000_000)) < 400
