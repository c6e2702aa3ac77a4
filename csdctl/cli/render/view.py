"""The base of all live views: drawn while an operation runs, and removed afterwards."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import Progress, ProgressColumn


class View:
    """A context manager around a live display; None where there is no terminal."""

    def __init__(self, display: Live | Progress | None) -> None:
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


def new_progress(console: Console, *columns: ProgressColumn) -> Progress:
    """Return a progress display with `columns`, drawn only on a terminal and removed when it stops."""
    return Progress(
        *columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal
    )


def live_on(console: Console, render: Callable[[], RenderableType]) -> Live | None:
    """Draw what `render` returns several times a second on a terminal; return None elsewhere."""
    if not console.is_terminal:
        return None
    return Live(get_renderable=render, console=console, refresh_per_second=4, transient=True)
