"""Tables as all commands print them, and lists of problems, which are cut after some lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet, fold_problems
from csdctl.fleet.names import format_node_names
from csdctl.terminal.console import PrintableConsole

MAX_LINES = 20
"""The most problems, and the most notes, to print: a thousand nodes must not scroll the rest away."""
NUMBER, TEXT = ">", "~"

ItemT = TypeVar("ItemT")


def build_table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    styles: Sequence[str] = (),
    gap: int = 0,
) -> Table:
    """Return a table; `styles` are those of its rows. With a `gap` between columns, it has no lines.

    A name of a column that begins with NUMBER is right-justified, one that begins with TEXT wraps.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None if gap else SIMPLE_HEAD,
        padding=(0, gap or 1, 0, 0),
        header_style="dim" if gap else "bold",
        pad_edge=not gap,
    )
    for column in columns:
        wraps = column.startswith(TEXT)
        table.add_column(
            column.lstrip(NUMBER + TEXT),
            justify="right" if column.startswith(NUMBER) else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    for number, row in enumerate(rows):
        table.add_row(*row, style=styles[number] if styles else None)
    return table


def build_pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values without a header."""
    table = Table.grid(padding=(0, 2))
    for name, value in pairs:
        table.add_row(name, value)
    return table


def render_failed(console: PrintableConsole, failed: Mapping[str, CsdctlError], fleet: Fleet) -> None:
    """Print why machines failed, and the remedies; the same cause on many machines is one problem."""
    for problem in bounded(console, fold_problems(failed, fleet), "problems"):
        console.print("problem:", style="bold red", end=" ")
        console.print(f"{format_node_names(problem.names)}: {problem.message}", soft_wrap=True)
        if problem.remedy:
            console.print(f"  → {problem.remedy}", soft_wrap=True)


def bounded(console: PrintableConsole, items: Sequence[ItemT], what: str) -> Iterator[ItemT]:
    """Yield the first of `items`, then print a line that counts the rest."""
    yield from items[:MAX_LINES]
    if len(items) > MAX_LINES:
        console.print(f"… and {len(items) - MAX_LINES} more {what}; --json lists them all")
