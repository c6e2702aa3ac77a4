"""The live view of a run: totals, the bottleneck, and a row for each rank.

Where the terminal has no room for all ranks, those that fail have rows first, then the slowest. One line
names the remaining ones by state, so that every failing rank is seen.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from csdctl.fleet.names import fold_names, format_node_names, names_by_value
from csdctl.notify import make_printable
from csdctl.reporting.numbers import (
    format_count,
    format_loss,
    format_metrics,
    format_rate,
    format_seconds,
    format_share,
)
from csdctl.reporting.series import Bottleneck, SeriesBuilder, find_bottleneck
from csdctl.reporting.tally import Amounts
from csdctl.terminal.console import NUMBER, PrintableConsole, View
from csdctl.worker.protocol import events
from csdctl.worker.protocol.events import EpochEnd, Event, Joined, Progress
from csdctl.workflows.workspace.event_stream import RunStarted

INTERVAL_S, INTERVAL_SHARE = 5.0, 1 / 64
"""Minimum interval between two searches for a bottleneck, and the same as a share of the run so far."""
OUTCOMES = {events.COMPARED: "to compare", events.KEPT: "kept", events.TAKEN_BACK: "taken back"}
"""Words for what follows a trial of batch sizes."""
SILENCE_S = 10.0
"""From this many seconds without a step on, the view says so."""
WIDE = 100
"""Columns of a terminal from which on rows have more values."""
NUM_GRADES = 20
"""Grades of slowness: rows of one grade keep their order, so that the view does not flicker."""
STARTING, READY, TRAINING, DONE = "starting", "ready", "training", "done"
LOST, FAILED = "lost", "failed"
STATES: dict[type[Event], str] = {
    events.Ready: READY,
    Joined: TRAINING,
    Progress: TRAINING,
    EpochEnd: TRAINING,
    events.Finished: DONE,
    events.NodeLost: LOST,
    events.Failed: FAILED,
    events.NodeBack: TRAINING,
}
"""State of a rank after an event about it."""


@dataclass
class RankRow:
    """The progress of one rank."""

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
        """Seconds of a step: computing, waiting for the slowest rank (or for all), communication."""
        report, steps = self.report, max(1, self.report.steps)
        for_slowest_s = report.wait_s if report.others_s is None else min(report.others_s, report.wait_s)
        return report.compute_s / steps, for_slowest_s / steps, (report.wait_s - for_slowest_s) / steps

    @property
    def slowness(self) -> float:
        """Compute time as a share of a step: the rank that waits least is the slowest."""
        return self.report.compute_s / self.report.step_s if self.report.step_s else 0.0

    def draw_waiting(self, width: int) -> Text:
        """Return a bar of computing, waiting and communication, and the share of the last two."""
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

    `columns`: what follows node and state, by name, as in `build_table`.
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


class TrainingView(View):
    """Shows the events of a run: a live table on a terminal, lines elsewhere. A context manager."""

    def __init__(
        self, console: PrintableConsole, started: RunStarted, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: seconds, in which the times of the events that are shown are measured."""
        self._spec, self._steps_per_epoch, self._clock = started.spec, started.steps_per_epoch, clock
        self._title = f"run {started.spec.run_id}" + (" (emulated fleet)" if started.emulated else "")
        self._rows = {rank.rank: RankRow(rank.node, rank.batch_size) for rank in self._spec.ranks}
        self._series = SeriesBuilder([rank.node for rank in self._spec.ranks])
        self._tally = self._series.tally
        for event in started.past:  # belongs to rates and totals
            self._tally.add(event)
        self._latest: Progress | EpochEnd | None = None
        """The latest report of rank 0."""
        self._step = 0
        """The step of that report in its epoch."""
        self._evaluating = ""
        self._bottleneck: Bottleneck | None = None
        self._first_event_s = self._looked_at = math.nan
        self._start = self._step_at = self._printed_at = clock()
        super().__init__(console, self._render)

    def show(self, event: Event) -> None:
        """Show one event."""
        now, num_steps = self._clock(), self._tally.steps
        report = self._series.add(now, event)
        self._rows[event.rank].take(event, report)
        self._find_bottleneck(now)
        if isinstance(event, Joined | events.Rebalanced):
            for rank, row in self._rows.items():
                row.batch_size = event.batch_sizes.get(str(rank), 0)
                # Of a rank that was lost, its return is reported.
                if isinstance(event, Joined) and str(rank) in event.batch_sizes and not row.is_sick:
                    row.state = TRAINING
        if isinstance(event, Joined):
            self._steps_per_epoch = max(1, event.steps_per_epoch)
        elif isinstance(event, Progress | EpochEnd):
            self._show_totals(event)
        elif isinstance(event, events.Evaluating):
            self._evaluating = f"evaluating {event.num_done:,}/{event.num_samples:,} samples  "
            self._step_at = now
        if line := self._format_event(event, num_steps):
            self._print(line)

    def _find_bottleneck(self, now: float) -> None:
        if math.isnan(self._first_event_s):
            self._first_event_s = self._looked_at = now
        if now - self._looked_at < max(INTERVAL_S, INTERVAL_SHARE * (now - self._first_event_s)):
            return
        self._looked_at, before = now, self._bottleneck
        self._bottleneck = after = find_bottleneck(self._series.build(), is_now=True)
        is_same = before and after and (before.rank, before.cause) == (after.rank, after.cause)
        if after and not is_same and self._live is None:
            self._print(self._describe_bottleneck())

    def _describe_bottleneck(self) -> str:
        bottleneck = self._bottleneck
        if bottleneck is None or bottleneck.rank is None:
            return f"link: {bottleneck.why}" if bottleneck else ""
        node, lost_s = self._spec.ranks[bottleneck.rank].node, format_seconds(bottleneck.lost_s)
        return f"others waited {lost_s} for {node} ({bottleneck.cause}): {bottleneck.why}"

    def _format_event(self, event: Event, num_steps: int) -> str:
        """Return what is printed about an event besides progress. `num_steps`: steps of the run before it."""
        if isinstance(event, Joined):
            return self._format_joined(event, num_steps)
        if isinstance(event, events.Rebalanced):
            return self._format_rebalanced(event)
        if isinstance(event, events.WaitingFor) and event.nodes:
            return f"waiting for {format_node_names(event.nodes)}"
        if isinstance(event, events.Warned | events.NodeLost):
            what = f"{event.node} is lost" if isinstance(event, events.NodeLost) else f"warning: {event.node}"
            return f"{what}: {event.message}" + f"\n  → {event.remedy}" * bool(event.remedy)
        if isinstance(event, events.NodeBack):
            return f"{event.node} is back"
        if isinstance(event, events.Finished) and event.rank == 0 and event.reason == events.EARLY_STOPPING:
            return f"stopped early, after epoch {event.epochs}"
        if isinstance(event, events.CheckpointSaved) and self._live is None:
            return f"checkpoint {event.path}"
        return ""

    def _format_rebalanced(self, event: events.Rebalanced) -> str:
        sizes = [f"{self._spec.ranks[int(rank)].node} {size}" for rank, size in event.batch_sizes.items()]
        since = f"batch sizes from step {event.step + 1} of epoch {event.epoch}: {', '.join(sizes)}"
        if event.gain is None:
            tried = "trying " * (event.outcome == events.TRIED)
            return (
                f"{event.slowest} took {event.slowdown:.2f} times as long as a balanced step; {tried}{since}"
            )
        length = f"{abs(event.gain):.1%} {'shorter' if event.gain > 0 else 'longer'}"
        if event.outcome == events.TAKEN_BACK and event.gain > 0:
            length += ", within their noise"
        return f"steps are {length}; {OUTCOMES.get(event.outcome, event.outcome)}: {since}"

    def _format_joined(self, event: Joined, num_steps: int) -> str:
        """Return who takes part from here on. '' at the start of a run."""
        num_repeated = num_steps - event.total_steps
        if event.is_start and not event.total_steps and num_repeated <= 0:
            return ""
        parts = [
            f"{len(event.batch_sizes)} ranks continue at epoch {event.epoch}, step {event.step}, "
            f"global batch {sum(event.batch_sizes.values())}"
        ]
        if event.num_lost:
            parts.append(f"{event.num_lost:,} private samples are not read")
        if num_repeated > 0:
            parts.append(
                f"{format_count(num_repeated, 'step')} {'are' if num_repeated > 1 else 'is'} repeated"
            )
        if event.is_start and self._series.stopped_s:
            parts.append(f"they waited for {format_seconds(self._series.stopped_s)}")
        return "; ".join(parts)

    def _show_totals(self, event: Progress | EpochEnd) -> None:
        self._evaluating, self._step_at = "", self._clock()
        if event.rank != 0:
            return
        self._latest = event
        if isinstance(event, Progress):
            self._steps_per_epoch = max(self._steps_per_epoch, event.step)
        self._step = self._steps_per_epoch if isinstance(event, EpochEnd) else event.step
        if isinstance(event, EpochEnd):
            self._print(_format_epoch(event, self._spec.recipe.epochs, self._tally.epoch))
        elif self._live is None and self._clock() - self._printed_at >= INTERVAL_S:
            self._printed_at = self._clock()
            self._print(self._headline())

    def _headline(self) -> str:
        if self._latest is None:
            starting = [row.node for row in self._rows.values() if row.state == STARTING]
            waiting = f"{format_node_names(starting)} loading TensorFlow" if starting else "first step"
            return f"{waiting} ({show_elapsed(self._clock() - self._start)})"
        num_done, num_steps = self._count_steps()
        reports, rate = self._tally.ranks[0], self._rows[0].report.throughput
        left_s = max(0.0, num_steps - num_done) * reports.wall_s / max(1, reports.steps)
        metrics = format_metrics(self._latest.accuracy, self._latest.metrics).replace(", ", "  ")
        silence, silent_s = "", self._clock() - self._step_at
        if silent_s >= SILENCE_S:
            sick = [row.node for row in self._rows.values() if row.is_sick]
            names = f" ({format_node_names(sick, at_most=2)})" if sick else ""
            silence = f"no step for {show_elapsed(silent_s)}{names}  "
        return (
            f"{silence}{self._evaluating}epoch {self._latest.epoch}/{self._spec.recipe.epochs}  "
            f"step {self._step}/{self._steps_per_epoch}  {show_elapsed(left_s)} left  "
            f"{format_rate(rate)} samples/s  loss {format_loss(self._latest.loss)}{metrics}"
        )

    def _count_steps(self) -> tuple[int, int]:
        ended = (self._latest.epoch - 1) * self._steps_per_epoch if self._latest else 0
        return ended + self._step, self._steps_per_epoch * self._spec.recipe.epochs

    def _render(self) -> RenderableType:
        width, height = self._console.size
        num_done, num_steps = self._count_steps()
        bar = Table.grid()
        bar.add_row(ProgressBar(total=num_steps, completed=num_done, width=min(width, 100)))
        bottleneck = Text(self._describe_bottleneck(), style="yellow")
        num_lines = math.ceil(bottleneck.cell_len / width)
        # Beside the rows: title, headline, bar, names of the columns, and two lines that stay free below.
        rows, hidden = choose_rows(list(self._rows.values()), max(3, height - 6 - num_lines))
        lines = [self._title, self._headline(), describe_hidden(hidden)]
        title, headline, more = (Text(line, no_wrap=True, overflow="ellipsis") for line in lines)
        title.stylize("bold")
        table = tabulate(rows, _choose_columns(width), width)
        return Group(title, headline, bar, *[bottleneck][:num_lines], *table, *[more][: len(hidden)])


def _choose_columns(width: int) -> dict[str, Callable[[RankRow], str | Text]]:
    columns: dict[str, Callable[[RankRow], str | Text]] = {
        ">batch": lambda row: str(row.batch_size or "–"),
        ">samples/s": lambda row: format_rate(row.report.own_throughput),
        "waiting": lambda row: row.draw_waiting(20 if width >= WIDE else 12),
    }
    if width >= WIDE:
        columns[">compute"] = lambda row: format_seconds(row.step_s[0] or None)
        columns[">wait"] = lambda row: format_seconds(row.step_s[1] or None)
        columns[">sum"] = lambda row: format_seconds(row.step_s[2] or None)
    return columns


def _format_epoch(event: EpochEnd, epochs: int, reports: Amounts) -> str:
    line = (
        f"epoch {event.epoch}/{epochs}: "
        f"loss {format_loss(event.loss)}{format_metrics(event.accuracy, event.metrics)}, "
        f"{format_rate(reports.throughput)} samples/s in {format_seconds(reports.wall_s)}"
    )
    if event.learning_rate is not None:
        line += f", learning rate {event.learning_rate:.2g}"
    if event.validation_loss is None:
        return line
    metrics = format_metrics(event.validation_accuracy, event.validation_metrics)
    return f"{line}; validation loss {format_loss(event.validation_loss)}{metrics}"
