"""What all views of something under way have in common: open while it lasts, gone afterwards."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import Progress


class View:
    """A context manager around the part that moves; None where there is no terminal to move it on."""

    def __init__(self, moving: Live | Progress | None) -> None:
        self.__moving = moving

    def __enter__(self) -> Self:
        if self.__moving:
            self.__moving.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.__moving:
            self.__moving.stop()


def live_on(console: Console, render: Callable[[], RenderableType]) -> Live | None:
    """What `render` gives, several times a second, on a terminal; None elsewhere."""
    if not console.is_terminal:
        return None
    return Live(get_renderable=render, console=console, refresh_per_second=4, transient=True)
