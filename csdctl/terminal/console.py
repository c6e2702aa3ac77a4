"""The console of csdctl, its tables and live views. Text that is printed is only text.

Strings are never markup, and are made printable before they are laid out. Segments are made printable once
more, for Text objects that were not built from a string here. Rich's own control codes are segments of
another kind, and colours are added later.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from csdctl.notify import make_printable, shorten

MAX_PRINTED = 20_000
"""Characters of one printed string: enough for the names of a thousand machines."""
MAX_CELL = 500
"""Characters of a string inside of something, such as a cell of a table."""
NUMBER = ">"
"""The beginning of the name of a column whose cells are numbers."""


class PrintableConsole(Console):
    """A Rich console for text of others."""

    _is_notebook = False
    outlives_its_reader = False
    """Whether the program goes on when nobody reads its output any more, such as `tee` after Ctrl-C."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)
        self.lock = threading.RLock()
        """Held while a line is printed or a live view is drawn: Rich moves the cursor before it draws."""
        self._is_notebook = self.is_jupyter
        self.is_jupyter = False  # lines are text of the cell; Rich would make an output of each

    @property
    def is_terminal(self) -> bool:
        """Whether the cursor can be moved. A kernel's standard output says so, and is no terminal."""
        return super().is_terminal and not self._is_notebook

    def on_broken_pipe(self) -> None:
        """Print nothing from now on. End the program, unless it outlives its reader."""
        if not self.outlives_its_reader:
            super().on_broken_pipe()
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def print(self, *objects: Any, **options: Any) -> None:
        """Print strings and renderables. Later lines of a string are indented: they are no line of csdctl."""
        parts = [
            Text(make_printable(shorten(part, MAX_PRINTED)).replace("\n", "\n  "))
            if isinstance(part, str)
            else part
            for part in objects
        ]
        with self.lock:
            super().print(*parts, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string inside of a renderable, whatever `options` say about markup."""
        plain = {**options, "markup": False, "emoji": False, "highlight": False}
        return super().render_str(make_printable(shorten(text, MAX_CELL)), **plain)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments without foreign control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(make_printable(segment.text), segment.style)


def build_table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    styles: Sequence[str] = (),
) -> Table:
    """Return a table. `styles`: of the rows."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for column in columns:
        justify: JustifyMethod = "right" if column.startswith(NUMBER) else "left"
        table.add_column(column.lstrip(NUMBER), justify=justify, overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style=styles[number] if styles else None)
    return table


def print_rows(
    console: PrintableConsole, columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]
) -> None:
    """Print a row on each line, or a table with folded cells in a terminal that is too narrow for that."""
    lines = [[name.lstrip(NUMBER) for name in columns], *rows]
    signs = [">" if name.startswith(NUMBER) else "<" for name in columns]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    if console.is_terminal and sum(widths) + len(widths) > console.width + 1:
        console.print(build_table(columns, rows, styles=styles))
        return
    text = Text()  # Rich would lay out each cell, which takes a second for a thousand rows
    for line, style in zip(lines, ["dim", *styles], strict=True):
        cells = [f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)]
        text.append(make_printable(" ".join(cells).rstrip()) + "\n", style)
    console.print(text, soft_wrap=True, end="")


def build_pairs(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Return a table of names and values without a header."""
    table = Table.grid(padding=(0, 2))
    for name, value in pairs:
        table.add_row(name, value)
    return table


class View:
    """A context manager around a live display of what `render` returns, on a terminal.

    Drawn once a second: it must not cost the training anything. Rich must not redirect the standard streams
    meanwhile: it would keep colours and links of what others write.
    """

    def __init__(self, console: PrintableConsole, render: Callable[[], RenderableType]) -> None:
        self._console = console
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                get_renderable=render,
                console=console,
                refresh_per_second=1,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live._lock = console.lock

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)
