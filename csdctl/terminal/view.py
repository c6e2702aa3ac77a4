"""Live views: drawn on a terminal while an operation runs, and removed afterwards.

Where the terminal has no room for all ranks, those that fail have rows first, then the slowest. One line
names the others by state, so that no failing rank is counted among the rest.

Rich must not redirect the standard streams meanwhile: it would keep colours and links of what others write.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from csdctl.fleet.names import fold_names, names_by_value
from csdctl.notify import make_printable
from csdctl.reporting.numbers import format_seconds, format_share
from csdctl.reporting.tally import Amounts
from csdctl.terminal.console import NUMBER, PrintableConsole
from csdctl.worker.protocol.events import (
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    NodeBack,
    NodeLost,
    Progress,
    Ready,
)

NUM_GRADES = 20
WIDE = 100


class View:
    """A context manager around a live display of what `render` returns, as `live_on`."""

    def __init__(self, console: PrintableConsole, render: Callable[[], RenderableType]) -> None:
        self._console = console
        self._live = live_on(console, render)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def live_on(console: PrintableConsole, render: Callable[[], RenderableType]) -> Live | None:
    """Draw what `render` returns once a second on a terminal. Else None.

    A view, or a watcher of a run, must not cost the training anything.
    """
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


STARTING, READY, TRAINING, DONE = "starting", "ready", "training", "done"
LOST, FAILED = "lost", "failed"
STATES: dict[type[Event], str] = {
    Ready: READY,
    Joined: TRAINING,
    Progress: TRAINING,
    EpochEnd: TRAINING,
    Finished: DONE,
    NodeLost: LOST,
    Failed: FAILED,
    NodeBack: TRAINING,
}
"""State of a rank after an event about it."""
"""Grades of slowness: rows of one grade keep their order, so that the view does not flicker."""
"""Columns of a terminal from which on rows have more values."""


@dataclass
class RankRow:
    """What one rank does."""

    node: str
    state: str = STARTING
    batch_size: int = 0
    compute_s: float = 0.0
    """Seconds of computing in a step."""
    wait_s: float = 0.0
    """Seconds of waiting in a step, communication included."""
    others_s: float | None = None
    """The part of wait_s until the slowest rank had computed; None: unknown."""
    rate: float | None = None
    """Rate in samples/s."""

    @property
    def is_sick(self) -> bool:
        """Whether the rank does not do what it should."""
        return self.state in (LOST, FAILED)

    def take(self, event: Event, report: Amounts | None) -> None:
        """Take what an event about the rank says. `report`: what it adds to the rank's tally."""
        self.state = STATES.get(type(event), self.state)
        if self.is_sick:  # it takes no steps
            self.rate, self.compute_s, self.wait_s = None, 0.0, 0.0
        if report and report.steps:
            self.compute_s, self.wait_s = report.compute_s / report.steps, report.wait_s / report.steps
            self.others_s = None if report.others_s is None else report.others_s / report.steps
            self.rate = report.own_throughput

    def join(self) -> None:
        """Rank 0 names this rank among those that take part. Of one that was lost, its return is reported."""
        if not self.is_sick:
            self.state = TRAINING

    @property
    def held_s(self) -> float:
        """Seconds of a step spent waiting for the slowest rank. All of wait_s where the part is unknown."""
        return self.wait_s if self.others_s is None else min(self.others_s, self.wait_s)

    @property
    def sum_s(self) -> float:
        """Seconds of a step spent in communication."""
        return self.wait_s - self.held_s

    @property
    def slowness(self) -> float:
        """Compute time as a share of a step: the rank that waits least is the slowest."""
        step_s = self.compute_s + self.wait_s
        return self.compute_s / step_s if step_s else 0.0

    def draw_waiting(self, width: int) -> Text:
        """Return a bar of computing, waiting for others and the sum, and the share of the last two.

        Empty before the first step.
        """
        step_s = self.compute_s + self.wait_s
        if step_s <= 0:
            return Text()
        computing, held = self.compute_s / step_s, self.held_s / step_s
        first, second = round(computing * width), round(min(1.0, computing + held) * width)
        parts = ("█" * first, "green"), ("▒" * (second - first), "yellow"), ("░" * (width - second), "dim")
        return Text.assemble(*parts, f" {format_share(1 - computing)}")


def choose_rows(rows: Sequence[RankRow], capacity: int) -> tuple[list[RankRow], list[RankRow]]:
    """Return the rows to show, of which there are fewer than `capacity` unless all fit, and the others."""
    others = sorted(
        rows[1:], key=lambda row: (0, 0) if row.is_sick else (1, -round(row.slowness * NUM_GRADES))
    )
    ordered = [*rows[:1], *others]
    num_shown = len(rows) if len(rows) <= capacity else capacity - 1
    return ordered[:num_shown], ordered[num_shown:]


def describe_rest(rest: Sequence[RankRow]) -> str:
    """Return the number and names of ranks by state, the sick ones first. '' for none."""
    by_state = names_by_value((row.node, row.state) for row in sorted(rest, key=lambda row: not row.is_sick))
    states = (f"{','.join(fold_names(names))} {state}" for state, names in by_state.items())
    return f"{len(rest)} more: {'; '.join(states)}" if rest else ""


def show_elapsed(seconds: float) -> str:
    """Return a time that is still running, in whole seconds."""
    return format_seconds(seconds) if seconds >= 100 else f"{math.floor(seconds)} s"


Columns = Mapping[str, Callable[[RankRow], str | Text]]
"""What the rows show after node and state, by the name of the column; numbers as in `build_table`."""


def tabulate(rows: Sequence[RankRow], columns: Columns, width: int) -> list[Text]:
    """Return the names of the columns and the rows, a line each. Rich's table takes four times as long."""
    table = [[Text(name.lstrip(NUMBER)) for name in ("node", "state", *columns)]]
    for row in rows:
        cells = [cell(row) for cell in columns.values()]
        shown = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        table.append(
            [Text(make_printable(row.node)), Text(row.state, "red" if row.is_sick else "none"), *shown]
        )
    widths = [max(cell.cell_len for cell in column) for column in zip(*table, strict=True)]
    widths[0] = min(widths[0], max(10, width - sum(widths[1:]) - len(widths)))
    for line in table:
        for name, cell, size in zip(("", "", *columns), line, widths, strict=True):
            cell.truncate(size, overflow="ellipsis")
            cell.align("right" if name.startswith(NUMBER) else "left", size)
    lines = [Text(" ", no_wrap=True).join(line) for line in table]
    lines[0].stylize("dim")
    return lines
