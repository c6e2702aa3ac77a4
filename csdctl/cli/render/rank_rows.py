"""Machines as rows of a live view: all where there is room, else the sick, the slowest, and the rest as one.

No row hides a sick one: those are listed first, by name.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Generic, Protocol, TypeVar

from csdctl.fleet.names import fold_names

STARTING, READY, TRAINING, DONE = "starting", "ready", "training", "done"
WELL = (STARTING, READY, TRAINING, DONE)
BLOCKS = "▁▂▃▄▅▆▇█"
MIN_SLOWEST = 3
"""Of the machines that do not fit, the slowest so many have rows of their own."""
NUM_GRADES = 20
"""Of slowness: rows that hardly differ keep their order, and the view stays still."""


class Row(Protocol):
    """What one machine does."""

    node: str
    state: str

    @property
    def is_sick(self) -> bool:
        """Whether the machine does not do what it should."""

    @property
    def slowness(self) -> float:
        """What rows are ordered by, 0…1; the slowest first."""

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
    """Of a step."""
    wait_s: float = 0.0
    others_s: float | None = None
    """Of wait_s: until the slowest rank had computed."""
    rate: float | None = None
    """Samples/s."""
    memory_bytes: int | None = None
    temperature_c: float | None = None

    def stand_still(self, state: str) -> None:
        """Show a state in which no steps are taken."""
        self.state, self.rate = state, None
        self.compute_s = self.wait_s = 0.0

    @property
    def held_s(self) -> float:
        """Of a step: waiting for the slowest rank; for all of the sum where that is not known."""
        return self.wait_s if self.others_s is None else min(self.others_s, self.wait_s)

    @property
    def sum_s(self) -> float:
        """Of a step: communication."""
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
        """Who waits least is the slowest."""
        return self.busy_share

    @property
    def kind(self) -> Hashable:
        """Ranks with one batch size are alike."""
        return self.state, self.batch_size


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
