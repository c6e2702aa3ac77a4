"""Questions at the terminal, and where results and words for people go."""

import json
import sys
from contextlib import nullcontext
from io import StringIO
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.model import Host
from csdctl.terminal.streams import Streams


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y\n", " YES \n", "n\n", "", "yep\n"])
def test_anything_but_yes_is_a_no(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    is_yes = answer.strip().lower() in ("y", "yes")
    with nullcontext() if is_yes else pytest.raises(InputError, match="nothing was done"):
        Streams(StringIO(), Terminal()).confirm("Remove everything?", yes=False)


@pytest.mark.parametrize(("stdin", "stderr"), [(StringIO("y\n"), Terminal()), (Terminal("y\n"), StringIO())])
def test_without_a_terminal_the_option_is_named(
    monkeypatch: pytest.MonkeyPatch, stdin: StringIO, stderr: StringIO
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(InputError, match="no terminal") as raised:
        Streams(StringIO(), stderr).confirm("Remove everything?", yes=False)
    assert "--yes" in raised.value.remedy


@pytest.mark.parametrize("is_json", [True, False])
def test_with_json_only_the_document_is_on_stdout(is_json: bool) -> None:
    stdout, stderr = StringIO(), StringIO()
    streams = Streams(stdout, stderr, is_json=is_json, is_quiet=False)
    document = {"path": Path("a"), "error": InputError("bad", remedy="mend it"), "host": Host(threads=2)}
    streams.say("a line for people")
    streams.result(document)
    streams.result_line({"line": 1})
    if not is_json:
        assert (stdout.getvalue(), stderr.getvalue()) == ("a line for people\n", "")
        return
    assert stderr.getvalue() == "a line for people\n"
    first, end = json.JSONDecoder().raw_decode(stdout.getvalue())
    assert first == {
        "path": "a",
        "error": {"message": "bad", "remedy": "mend it"},
        "host": {"threads": 2, "trains": True, "power": None, "device": "auto", "env": {}},
    }
    assert stdout.getvalue()[end:] == '\n{"line": 1}\n'
