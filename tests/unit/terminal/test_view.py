"""Lines that are printed while another thread draws a live view, and what a notebook shows of a report."""

import io
import threading
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.view import View


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
