"""The base of live views of many machines: progress, time left, and a row for each machine.

All machines have a row where there is room. Otherwise the sick and the slowest have rows, and the others
share one. No row hides a sick machine: those are listed first, by name. Columns are as wide as their
values; names are cut.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from csdctl.fleet.names import fold_names
from csdctl.notify import make_printable
from csdctl.reporting.numbers import format_seconds, format_share
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.view import View, live_on
from csdctl.worker.protocol.events import EpochEnd, Progress

STARTING, READY, TRAINING, DONE = "starting", "ready", "training", "done"
WELL = (STARTING, READY, TRAINING, DONE)
BLOCKS = "▁▂▃▄▅▆▇█"
MIN_SLOWEST = 3
"""Number of slowest machines that have rows of their own where not all fit."""
NUM_GRADES = 20
"""Grades of slowness: rows of one grade keep their order, so that the view does not flicker."""
WIDE, WIDER = 100, 120
"""Columns of a terminal from which on rows have more values."""
NUM_AROUND = 6
"""Title, headline, bar, names of the columns, and two lines that stay free below."""
PLAIN_INTERVAL_S = 5.0
LINES_INTERVAL_S = 1.0
STATE_STYLES = {"lost": "red", "failed": "red"}
MIN_NAME = 10


class Row(Protocol):
    """What one machine does."""

    node: str
    state: str

    @property
    def is_sick(self) -> bool:
        """Whether the machine does not do what it should."""

    @property
    def slowness(self) -> float:
        """Slowness, 0…1; rows are ordered by it, the slowest first."""

    @property
    def kind(self) -> Hashable:
        """Machines of one kind can be one row."""


RowT = TypeVar("RowT", bound=Row)


@dataclass
class RankRow:
    """What one rank does."""

    rank: int
    node: str
    batch_size: int = 0
    state: str = STARTING
    compute_s: float = 0.0
    """Seconds of computing in a step."""
    wait_s: float = 0.0
    """Seconds of waiting in a step, communication included."""
    others_s: float | None = None
    """The part of wait_s until the slowest rank had computed; None: unknown."""
    rate: float | None = None
    """Rate in samples/s."""
    memory_bytes: int | None = None
    temperature_c: float | None = None

    def take(self, event: Progress | EpochEnd) -> None:
        """Take what the rank reports of its latest steps."""
        self.state = TRAINING
        if event.steps:
            self.compute_s, self.wait_s = event.compute_s / event.steps, event.wait_s / event.steps
            self.others_s = None if event.others_s is None else event.others_s / event.steps
        self.rate = event.samples / event.wall_s if event.wall_s else None
        if isinstance(event, Progress):
            self.memory_bytes, self.temperature_c = event.memory_bytes, event.temperature_c

    def stand_still(self, state: str) -> None:
        """Show a state in which no steps are taken."""
        self.state, self.rate = state, None
        self.compute_s = self.wait_s = 0.0

    @property
    def held_s(self) -> float:
        """Seconds of a step spent waiting for the slowest rank; all of wait_s where the part is unknown."""
        return self.wait_s if self.others_s is None else min(self.others_s, self.wait_s)

    @property
    def sum_s(self) -> float:
        """Seconds of a step spent in communication."""
        return self.wait_s - self.held_s

    @property
    def busy_share(self) -> float:
        """Compute time as a share of a step, 0…1."""
        step_s = self.compute_s + self.wait_s
        return self.compute_s / step_s if step_s else 0.0

    @property
    def is_sick(self) -> bool:
        """Whether the rank does not train."""
        return self.state not in WELL

    @property
    def slowness(self) -> float:
        """Slowness, 0…1: the rank that waits least is the slowest."""
        return self.busy_share

    @property
    def kind(self) -> Hashable:
        """Ranks with one batch size are alike."""
        return self.state, self.batch_size


RankRowT = TypeVar("RankRowT", bound=RankRow)


@dataclass(frozen=True)
class ShownRow(Generic[RowT]):
    """A row of the view: one machine, or several that are alike."""

    name: str
    state: str
    members: Sequence[RowT]


def choose_rows(rows: Sequence[RowT], capacity: int, *, is_first_on_top: bool = True) -> list[ShownRow[RowT]]:
    """Return at most `capacity` rows, but as many as there are kinds of sick machines."""
    top, others = (rows[:1], rows[1:]) if is_first_on_top else ((), rows)
    sick: dict[str, list[RowT]] = defaultdict(list)
    for row in others:
        if row.is_sick:
            sick[row.state].append(row)
    well = sorted(
        (row for row in others if not row.is_sick), key=lambda row: -round(row.slowness * NUM_GRADES)
    )
    num_sick = sum(len(found) for found in sick.values())
    is_whole = len(rows) <= capacity
    are_listed = is_whole or num_sick + 2 + MIN_SLOWEST <= capacity
    shown = [fold([row]) for row in top]
    for found in sick.values():
        shown += [fold([row]) for row in found] if are_listed else [fold(found)]
    if is_whole:
        return shown + [fold([row]) for row in well]
    room = max(0, capacity - len(shown) - 1)
    shown += [fold([row]) for row in well[:room]]
    rest: dict[Hashable, list[RowT]] = defaultdict(list)
    for row in well[room:]:
        rest[row.kind].append(row)
    if len(shown) + len(rest) <= capacity:
        return [*shown, *(fold(alike) for alike in rest.values())]
    return [*shown, fold(well[room:])] if well[room:] else shown


def fold(members: Sequence[RowT]) -> ShownRow[RowT]:
    """Return one row for `members`: names as ranges, all states."""
    names = ",".join(fold_names(sorted((row.node for row in members), key=_by_number)))
    return ShownRow(
        names if len(members) == 1 else f"{len(members)} more: {names}",
        ", ".join(dict.fromkeys(row.state for row in members)),
        tuple(members),
    )


def _by_number(name: str) -> tuple[str, int, str]:
    """Order csd2 before csd10."""
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0), name


def span(values: Sequence[int]) -> str:
    """Return whole numbers as one or as a range; a dash for 0 alone."""
    return (
        "–"
        if not max(values)
        else "–".join(str(value) for value in dict.fromkeys((min(values), max(values))))
    )


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def draw_curve(values: Sequence[float], width: int) -> str:
    """Return values as a curve of `width` characters at most; the latest are at the right."""
    if len(values) > width:  # means of as many values each
        bounds = [round(index * len(values) / width) for index in range(width + 1)]
        values = [fmean(values[start:stop]) for start, stop in pairwise(bounds)]
    low, high = min(values), max(values)
    step = high - low or 1.0
    return "".join(BLOCKS[round((value - low) / step * (len(BLOCKS) - 1))] for value in values)


def draw_shares(shares: Sequence[float], width: int) -> list[int]:
    """Return the characters of each part of a bar of `width`; what `shares` leave of 1 is the last part."""
    ends = [round(min(1.0, sum(shares[: number + 1])) * width) for number in range(len(shares))]
    return [stop - start for start, stop in pairwise([0, *ends, width])]


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """One value of every row."""

    name: str
    cell: Callable[[ShownRow[RowT]], str | Text]
    width: int = 0
    """Minimum width; 0: as wide as its values."""
    is_right: bool = True


class FleetView(View, ABC, Generic[RowT]):
    """A live table on a terminal, plain lines elsewhere; a context manager."""

    is_first_on_top = True
    is_in_notebooks = False
    """Whether the view is drawn in a notebook, where it stays; elsewhere it is removed at the end."""

    def __init__(
        self,
        console: PrintableConsole,
        title: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        per_second: float = 2,
    ) -> None:
        """`clock`: seconds, in which all that is shown is measured; `per_second`: how often it is drawn."""
        self._clock = clock
        self._console = console
        self._title = title
        self._start = self._printed_at = self._clock()
        is_left_out = console.is_notebook and not self.is_in_notebooks
        self._pending: list[str] = []
        self._flushed_at = -math.inf
        self._live = None if is_left_out else live_on(console, self._render, per_second=per_second)
        super().__init__(self._live)

    @abstractmethod
    def _list_rows(self) -> Sequence[RowT]:
        """Return all machines, in order."""

    @abstractmethod
    def _headline(self) -> str:
        """Return what is being done, and the time left."""

    @abstractmethod
    def _done(self) -> tuple[float, float | None]:
        """Return how much is done, and of how much; None: unknown."""

    @abstractmethod
    def _columns(self, width: int) -> list[Column[RowT]]:
        """Return the columns after name and state, for a terminal of `width`."""

    def _details(self, width: int) -> list[Text]:
        """Return lines between the bar and the rows."""
        return []

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._start

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        super().__exit__(error_type, error, trace)

    def _print(self, line: str) -> None:
        self._pending.append(line)
        self._flush()

    def _print_soon(self, line: str) -> None:
        """Print one of many lines: together with others, as every printing draws the view again."""
        self._pending.append(line)
        self._flush_if_due()

    def _flush_if_due(self) -> None:
        if self._live is None or time.monotonic() - self._flushed_at >= LINES_INTERVAL_S:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        target = self._live.console if self._live else self._console
        target.print("\n".join(self._pending), soft_wrap=True)
        self._pending.clear()
        self._flushed_at = time.monotonic()

    def _print_headline_if_due(self) -> None:
        if self._live is None and self._clock() - self._printed_at >= PLAIN_INTERVAL_S:
            self._printed_at = self._clock()
            self._print(self._headline())

    def _render(self) -> RenderableType:
        width, height = self._console.size
        completed, total = self._done()
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=completed, width=min(width, 100), pulse=total is None))
        details = self._details(width)
        num_lines = sum(max(1, math.ceil(line.cell_len / width)) for line in details)
        capacity = max(3, height - NUM_AROUND - num_lines)
        rows = choose_rows(self._list_rows(), capacity, is_first_on_top=self.is_first_on_top)
        return Group(
            Text(self._title, style="bold", no_wrap=True, overflow="ellipsis"),
            Text(self._headline(), no_wrap=True, overflow="ellipsis"),
            bar,
            *details,
            *(_tabulate(rows, self._columns(width), width) if rows else []),
        )


def _tabulate(rows: Sequence[ShownRow[RowT]], columns: Sequence[Column[RowT]], width: int) -> list[Text]:
    """Return the names of the columns and the rows, a line each: Rich's own table takes six times as long."""
    cells = [[_text(column.cell(row)) for column in columns] for row in rows]
    states = [Text(row.state, style=_style(row)) for row in rows]
    names = [make_printable(row.name) for row in rows]
    widths = [
        max(column.width, len(column.name), *(cell.cell_len for cell in found))
        for column, found in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    state_width = max(len("state"), *(state.cell_len for state in states))
    room = width - sum(widths) - state_width - len(widths) - 1
    name_width = min(max(len("node"), *map(cell_len, names)), max(MIN_NAME, room))
    are_right = [False, False, *(column.is_right for column in columns)]
    sizes = [name_width, state_width, *widths]
    header = [Text("node"), Text("state"), *(Text(column.name) for column in columns)]
    lines = [_join(header, sizes, are_right)]
    lines[0].stylize("dim")
    for name, state, found in zip(names, states, cells, strict=True):
        lines.append(_join([_cut(name, name_width), state, *found], sizes, are_right))
    return lines


def _join(cells: Sequence[Text], sizes: Sequence[int], are_right: Sequence[bool]) -> Text:
    """Return cells as one line, each as wide as its column."""
    line = Text(no_wrap=True)
    for cell, size, is_right in zip(cells, sizes, are_right, strict=True):
        space = " " * (size - cell.cell_len)
        line.append_text(Text(space) if is_right else cell)
        line.append_text(cell if is_right else Text(space))
        line.append(" ")
    return line


def _cut(name: str, width: int) -> Text:
    return Text(name if cell_len(name) <= width else set_cell_size(name, width - 1) + "…")


def _style(row: ShownRow[RowT]) -> str:
    is_sick = any(member.is_sick for member in row.members)
    return STATE_STYLES.get(row.state, "yellow" if is_sick else "none")


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def show_elapsed(seconds: float) -> str:
    """Return a time that is still running, in whole seconds."""
    return format_seconds(seconds) if seconds >= 100 else f"{math.floor(seconds)} s"


def draw_bar(
    shares: Sequence[float], width: int, after: str = "", styles: Sequence[str] = ("green",)
) -> Text:
    """Return a bar of `width`: its parts in `styles`, what is left of 1 dimmed, and the text `after` it.

    Parts differ without colours, too.
    """
    *parts, rest = draw_shares(shares, width)
    drawn = [(mark * count, style) for mark, count, style in zip("█▒", parts, styles, strict=False)]
    return Text.assemble(*drawn, ("░" * rest, "dim"), after)


def draw_waiting(row: ShownRow[RankRowT], width: int) -> Text:
    """Return a bar of computing, waiting for others and the sum, and the share of the last two.

    Empty before the first step.
    """
    compute_s, held_s, sum_s = (
        mean(values) or 0.0
        for values in zip(*((rank.compute_s, rank.held_s, rank.sum_s) for rank in row.members), strict=True)
    )
    step_s = compute_s + held_s + sum_s
    if step_s <= 0:
        return Text()
    shares = compute_s / step_s, held_s / step_s
    return draw_bar(shares, width, f" {format_share(1 - shares[0])}", ("green", "yellow"))
