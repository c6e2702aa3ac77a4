"""The base of all live views: drawn while an operation runs, and removed afterwards.

Rich must not redirect the standard streams meanwhile: it would keep colours and links of what others write.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.live import Live
from rich.progress import Progress, ProgressColumn, TextColumn

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.notebook import NotebookLive


class View:
    """A context manager around a live display; None where there is neither terminal nor notebook."""

    def __init__(self, display: Live | NotebookLive | Progress | None) -> None:
        self.__display = display

    def __enter__(self) -> Self:
        if self.__display:
            self.__display.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.__display:
            self.__display.stop()


def new_progress(console: PrintableConsole, *columns: ProgressColumn) -> Progress:
    """Return a progress display with `columns`, drawn only on a terminal and removed when it stops."""
    return Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def text_column(text_format: str, *, style: str = "none") -> TextColumn:
    """Return a column of a progress display whose text is not markup."""
    return TextColumn(text_format, style=style, markup=False)


def live_on(
    console: PrintableConsole, render: Callable[[], RenderableType], *, per_second: float = 2
) -> Live | NotebookLive | None:
    """Draw what `render` returns `per_second` times a second on a terminal, or in a notebook; else None.

    The default is as often as a rank reports.
    """
    if console.is_notebook:
        return NotebookLive(console, render)
    if not console.is_terminal:
        return None
    return Live(
        get_renderable=render,
        console=console,
        refresh_per_second=per_second,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
