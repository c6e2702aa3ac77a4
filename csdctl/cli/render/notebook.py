"""Live views in a notebook: one output of the cell, which is replaced in place.

Rich's own display in notebooks needs ipywidgets, and adds an output to the cell for every printed line. Here
lines are plain text of the cell, and what changes is an output with an id, which needs no widgets.
"""

import io
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from csdctl.cli.console import PrintableConsole

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.5, 10.0
"""Between two updates. The interval is a hundredth of the time so far: a server keeps the updates of a
notebook that nobody has open."""
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
