"""What went wrong on machines, as people read it: the same cause on many of them is one problem."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Console

from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet
from csdctl.fleet.problems import Problem, fold_problems
from csdctl.fleet.ranges import show_names

MAX_LINES = 20
"""Of problems, and of notes: a thousand nodes shall not scroll the rest away."""

ItemT = TypeVar("ItemT")


def render_failed(console: Console, failed: Mapping[str, CsdctlError], fleet: Fleet) -> None:
    """Why machines failed, by name, and what to do about it."""
    render_problems(console, fold_problems(failed, fleet))


def render_problems(console: Console, problems: Sequence[Problem]) -> None:
    """Each problem, and what to do about it on the next line."""
    for problem in bounded(console, problems, "problems"):
        console.print("problem:", style="bold red", end=" ")
        console.print(f"{show_names(problem.names)}: {problem.message}", markup=False, soft_wrap=True)
        if problem.remedy:
            console.print(f"  → {problem.remedy}", markup=False, soft_wrap=True)


def bounded(console: Console, items: Sequence[ItemT], what: str) -> Iterator[ItemT]:
    """The first of `items`, and a line that counts the rest."""
    yield from items[:MAX_LINES]
    if len(items) > MAX_LINES:
        console.print(f"… and {len(items) - MAX_LINES} more {what}; --json has them all")
