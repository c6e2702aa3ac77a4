"""The base of all live views: drawn while an operation runs, and removed afterwards except in a notebook.

Rich must not redirect the standard streams meanwhile: it would keep colours and links of what others write.
Rich's own display in notebooks needs ipywidgets, and adds an output to the cell for every printed line. Here
lines are plain text of the cell, and the view is one output with an id, which is replaced in place.
"""

import io
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import RenderableType
from rich.live import Live
from rich.progress import Progress, ProgressColumn, TextColumn

from csdctl.terminal.console import PrintableConsole

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.5, 10.0
"""Bounds of the interval between two updates of a notebook, which is a hundredth of the time so far: a server
keeps all updates of a notebook that nobody has open."""
HTML = "<pre style=\"font-family:Menlo,'DejaVu Sans Mono',consolas,monospace;line-height:1.3\">{code}</pre>"


def render_bundle(renderable: RenderableType, width: int) -> dict[str, str]:
    """Return a renderable as HTML and as plain text, by media type."""
    console = PrintableConsole(file=io.StringIO(), record=True, width=width, force_terminal=True)
    console.print(renderable)
    text = console.export_text(clear=False)
    return {
        "text/html": console.export_html(inline_styles=True, code_format=HTML),
        "text/plain": text,
    }


class NotebookLive:
    """Draws what `render` returns, from a thread of its own, until `stop`; the last drawing stays."""

    def __init__(self, console: PrintableConsole, render: Callable[[], RenderableType]) -> None:
        self.console = console
        self._render = render
        self._shown: dict[str, str] = {}
        self._output: Any = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_updating, name="notebook view", daemon=True)

    def start(self) -> None:
        """Add the output to the cell."""
        from IPython.display import display

        self._shown = render_bundle(self._render(), self.console.width)
        self._output = display(self._shown, raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Draw once more, and end."""
        self._is_over.set()
        self._thread.join()
        self._update()

    def _keep_updating(self) -> None:
        start = time.monotonic()
        interval_s = MIN_INTERVAL_S
        while not self._is_over.wait(interval_s):
            self._update()
            interval_s = min(max(MIN_INTERVAL_S, (time.monotonic() - start) / 100), MAX_INTERVAL_S)

    def _update(self) -> None:
        now = render_bundle(self._render(), self.console.width)
        if now != self._shown:
            self._shown = now
            self._output.update(now, raw=True)


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
    progress = Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.live._lock = console.lock
    return progress


def text_column(text_format: str, *, style: str = "none") -> TextColumn:
    """Return a column of a progress display whose text is not markup."""
    return TextColumn(text_format, style=style, markup=False)


def live_on(console: PrintableConsole, render: Callable[[], RenderableType]) -> Live | NotebookLive | None:
    """Draw what `render` returns once a second on a terminal, or in a notebook; else None.

    A view, or a watcher of a run, must not cost the training anything.
    """
    if console.is_notebook:
        return NotebookLive(console, render)
    if not console.is_terminal:
        return None
    live = Live(
        get_renderable=render,
        console=console,
        refresh_per_second=1,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    live._lock = console.lock
    return live
