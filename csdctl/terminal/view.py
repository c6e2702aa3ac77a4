"""Live views: drawn on a terminal while an operation runs, and removed afterwards.

Rich must not redirect the standard streams meanwhile: it would keep colours and links of what others write.
"""

from collections.abc import Callable
from typing import Self

from rich.console import RenderableType
from rich.live import Live

from csdctl.terminal.console import PrintableConsole


class View:
    """A context manager around a live display of what `render` returns, drawn once a second on a terminal.

    It must not cost the training anything.
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
