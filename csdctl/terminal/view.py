"""Live views: drawn on a terminal while an operation runs, and removed afterwards.

Where the terminal has no room for all ranks, those that fail have rows first, then the slowest. One line
names the remaining ones by state, so that every failing rank is seen.

Rich must not redirect the standard streams meanwhile: it would keep colours and links of what others write.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Grades of slowness: rows of one grade keep their order, so that the view does not flicker."""
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


@dataclass
class RankRow:
    """What one rank does."""

    node: str
    batch_size: int = 0
    state: str = STARTING
    report: Amounts = field(default_factory=Amounts)
    """The latest report with steps. Empty before the first, and for a rank that takes no steps."""

    @property
    def is_sick(self) -> bool:
        """Whether the rank does not do what it should."""
        return self.state in (LOST, FAILED)

    def take(self, event: Event, report: Amounts | None) -> None:
        """Take what an event about the rank says. `report`: what it adds to the rank's tally."""
        self.state = STATES.get(type(event), self.state)
        if report and report.steps:
            self.report = report
        elif self.is_sick:
            self.report = Amounts()

    @property
    def step_s(self) -> tuple[float, float, float]:
        """Seconds of a step: computing, waiting for the slowest rank, communication. 0 before the first step.

        All waiting counts as waiting for the slowest rank where the rank does not divide it.
        """
        report, steps = self.report, max(1, self.report.steps)
        for_slowest_s = report.wait_s if report.others_s is None else min(report.others_s, report.wait_s)
        return report.compute_s / steps, for_slowest_s / steps, (report.wait_s - for_slowest_s) / steps

    @property
    def slowness(self) -> float:
        """Compute time as a share of a step: the rank that waits least is the slowest."""
        return self.report.compute_s / self.report.step_s if self.report.step_s else 0.0

    def draw_waiting(self, width: int) -> Text:
        """Return a bar of computing, waiting and communication, and the share of the last two.

        Empty before the first step.
        """
        compute_s, for_slowest_s, communication_s = self.step_s
        step_s = compute_s + for_slowest_s + communication_s
        if step_s <= 0:
            return Text()
        first = round(compute_s / step_s * width)
        second = round(min(1.0, (compute_s + for_slowest_s) / step_s) * width)
        parts = ("█" * first, "green"), ("▒" * (second - first), "yellow"), ("░" * (width - second), "dim")
        return Text.assemble(*parts, f" {format_share(1 - compute_s / step_s)}")


def choose_rows(rows: Sequence[RankRow], capacity: int) -> tuple[list[RankRow], list[RankRow]]:
    """Return the rows to draw and the hidden ones. Unless all fit, fewer than `capacity` are drawn."""
    nodes = sorted(
        rows[1:], key=lambda row: (0, 0) if row.is_sick else (1, -round(row.slowness * NUM_GRADES))
    )
    ordered = [*rows[:1], *nodes]
    num_drawn = len(rows) if len(rows) <= capacity else capacity - 1
    return ordered[:num_drawn], ordered[num_drawn:]


def describe_hidden(rows: Sequence[RankRow]) -> str:
    """Return the number and names of ranks by state, the sick ones first. '' for none."""
    by_state = names_by_value((row.node, row.state) for row in sorted(rows, key=lambda row: not row.is_sick))
    states = (f"{','.join(fold_names(names))} {state}" for state, names in by_state.items())
    return f"{len(rows)} more: {'; '.join(states)}" if rows else ""


def show_elapsed(seconds: float) -> str:
    """Return a time that is still running, in whole seconds."""
    return format_seconds(seconds) if seconds >= 100 else f"{math.floor(seconds)} s"


def tabulate(
    rows: Sequence[RankRow], columns: Mapping[str, Callable[[RankRow], str | Text]], width: int
) -> list[Text]:
    """Return the names of the columns and the rows, a line each. Rich's table takes five times as long.

    `columns`: what follows node and state, by the name of the column. Numbers as in `build_table`.
    """
    names = ("node", "state", *columns)
    table: list[list[str | Text]] = [[name.lstrip(NUMBER) for name in names]]
    for row in rows:
        state = Text(row.state, "red" if row.is_sick else "none")
        table.append([make_printable(row.node), state, *(cell(row) for cell in columns.values())])
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in cells] for cells in table]
    widths = [max(text.cell_len for text in column) for column in zip(*texts, strict=True)]
    widths[0] = min(widths[0], max(10, width - sum(widths[1:]) - len(widths)))
    for line in texts:
        for name, text, size in zip(names, line, widths, strict=True):
            text.truncate(size, overflow="ellipsis")
            text.align("right" if name.startswith(NUMBER) else "left", size)
    lines = [Text(" ", no_wrap=True).join(line) for line in texts]
    lines[0].stylize("dim")
    return lines
