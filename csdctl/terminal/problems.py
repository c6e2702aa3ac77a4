"""Why machines failed, as text; the same cause on many machines is one problem."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet, Problem, fold_problems
from csdctl.fleet.names import format_node_names
from csdctl.terminal.console import PrintableConsole

MAX_LINES = 20
"""The most problems, and the most notes, to print: a thousand nodes must not scroll the rest away."""

ItemT = TypeVar("ItemT")


def render_failed(console: PrintableConsole, failed: Mapping[str, CsdctlError], fleet: Fleet) -> None:
    """Print why machines failed, and the remedies."""
    render_problems(console, fold_problems(failed, fleet))


def render_problems(console: PrintableConsole, problems: Sequence[Problem]) -> None:
    """Print each problem, and its remedy on the next line."""
    for problem in bounded(console, problems, "problems"):
        console.print("problem:", style="bold red", end=" ")
        console.print(f"{format_node_names(problem.names)}: {problem.message}", soft_wrap=True)
        if problem.remedy:
            console.print(f"  → {problem.remedy}", soft_wrap=True)


def bounded(console: PrintableConsole, items: Sequence[ItemT], what: str) -> Iterator[ItemT]:
    """Yield the first of `items`, then print a line that counts the rest."""
    yield from items[:MAX_LINES]
    if len(items) > MAX_LINES:
        console.print(f"… and {len(items) - MAX_LINES} more {what}; --json lists them all")
