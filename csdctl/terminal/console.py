"""The console of csdctl: text that is printed on it is only text, and the control codes are its own.

Strings are never markup, and are made printable before they are laid out. Segments are made printable once
more, for Text objects that were not built from a string here; Rich's own control codes are segments of
another kind, and colours are added later.
"""

import threading
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from csdctl.notify import make_printable, shorten

MAX_PRINTED = 20_000
"""Characters of one printed string: enough for the names of a thousand machines."""
MAX_CELL = 500
"""Characters of a string inside of something, such as the cell or the title of a table."""


class PrintableConsole(Console):
    """A Rich console for text of others."""

    is_notebook = False
    """Whether this process is the kernel of a notebook."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)
        self.lock = threading.RLock()
        """Held while a line is printed or a live view is drawn.

        Rich computes how far to move the cursor before it draws: a line that another thread prints in between
        would be overwritten.
        """
        self.is_notebook = self.is_jupyter
        self.is_jupyter = False  # lines are text of the cell; Rich makes an output of each

    @property
    def is_terminal(self) -> bool:
        """Whether the cursor can be moved; a kernel's standard output says so, and is no terminal."""
        return super().is_terminal and not self.is_notebook

    def print(self, *objects: Any, **options: Any) -> None:
        """Print strings and renderables; the lines of a string after its first one are indented.

        So text of others cannot pass for a line of csdctl.
        """
        with self.lock:
            super().print(*(_as_text(one) if isinstance(one, str) else one for one in objects), **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string inside of a renderable, whatever `options` say about markup."""
        plain = {**options, "markup": False, "emoji": False, "highlight": False}
        return super().render_str(make_printable(shorten(text, MAX_CELL)), **plain)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments without foreign control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(make_printable(segment.text), segment.style)


def _as_text(text: str) -> Text:
    return Text(make_printable(shorten(text, MAX_PRINTED)).replace("\n", "\n  "))
