"""A run while it trains: a live table on a terminal and in a notebook, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.text import Text

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.bottleneck import BottleneckLine
from csdctl.cli.render.fleet_view import WIDE, WIDER, Column, FleetView, draw_bar, show_elapsed
from csdctl.cli.render.rank_rows import (
    DONE,
    READY,
    STARTING,
    TRAINING,
    RankRow,
    ShownRow,
    draw_curve,
    mean,
    span,
)
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import (
    format_bytes,
    format_loss,
    format_metrics,
    format_rate,
    format_seconds,
    format_share,
    name_metrics,
)
from csdctl.worker.protocol.events import (
    EARLY_STOPPING,
    CheckpointSaved,
    EpochEnd,
    Evaluating,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    NodeBack,
    NodeLost,
    Progress,
    Ready,
    Rebalanced,
    WaitingFor,
)
from csdctl.worker.protocol.run_spec import RunSpec

STATES: dict[type[Event], str] = {Ready: READY, NodeBack: "back", Finished: DONE}
"""Of the rank that an event is about."""
STANDSTILLS: dict[type[Event], str] = {LinkLost: "waiting for others", NodeLost: "lost", Failed: "failed"}
"""The same, where it takes no steps."""
SILENT_S = 10.0
"""Without news of any step: the headline says so."""
MAX_POINTS = 2000
RankRowT = TypeVar("RankRowT", bound=RankRow)


class TrainingView(FleetView[RankRow]):
    """Shows the events of a run; use it as a context manager around the run."""

    is_in_notebooks = True

    def __init__(
        self,
        console: PrintableConsole,
        spec: RunSpec,
        steps_per_epoch: int,
        *,
        emulated: bool,
        clock: Callable[[], float] = time.monotonic,
        per_second: float = 2,
    ) -> None:
        """`clock`: seconds, in which the times of the events that are shown are measured.

        `per_second`: how often the view is drawn.
        """
        self._spec = spec
        self._steps_per_epoch = steps_per_epoch
        self._first_step: int | None = None
        self._rows = {rank.rank: RankRow(rank.rank, rank.node, rank.batch_size) for rank in spec.ranks}
        self._curves: dict[str, list[float]] = {"loss": []}
        self._last: Progress | EpochEnd | None = None
        self._last_step = 0
        self._rate: float | None = None
        self._evaluating = ""
        self._step_at = clock()
        self._bottleneck = BottleneckLine([rank.node for rank in spec.ranks])
        title = f"run {spec.run_id}" + (" (emulated fleet)" if emulated else "")
        super().__init__(console, title, clock=clock, per_second=per_second)

    def show(self, event: Event) -> None:
        """Show one event."""
        self._flush_if_due()
        row = self._rows[event.rank]
        if (line := self._bottleneck.add(self._clock(), event)) and self._live is None:
            self._print(line)
        row.state = STATES.get(type(event), row.state)
        if state := STANDSTILLS.get(type(event)):
            row.stand_still(state)
        if isinstance(event, Joined):
            self._show_joined(event)
        elif isinstance(event, Progress | EpochEnd):
            self._show_totals(event, row)
        elif isinstance(event, Rebalanced):
            self._set_batch_sizes(event.batch_sizes)
        elif isinstance(event, Evaluating):
            self._evaluating = f"evaluating {event.num_done:,}/{event.num_samples:,} samples  "
            self._step_at = self._clock()
        if line := self._format_event(event):
            self._print(line)

    def _format_event(self, event: Event) -> str:
        """Return what is printed about an event, apart from steps, epochs and groups."""
        if isinstance(event, Rebalanced):
            return self._format_rebalanced(event)
        if isinstance(event, WaitingFor) and event.nodes:
            return f"waiting for {format_node_names(event.nodes)}"
        if isinstance(event, NodeLost):
            return f"{event.node} is lost, the other ranks continue: {event.message}"
        if isinstance(event, NodeBack):
            return f"{event.node} is back and rejoins at the end of the epoch"
        if isinstance(event, Finished) and event.rank == 0 and event.reason == EARLY_STOPPING:
            return f"stopped early, after epoch {event.epochs}"
        if isinstance(event, CheckpointSaved) and self._live is None:
            return f"checkpoint {event.path}"
        return ""

    def _show_joined(self, event: Joined) -> None:
        """Show that a group of ranks has formed; rank 0 reports for the group."""
        self._rows[event.rank].state = TRAINING
        self._set_batch_sizes(event.batch_sizes)
        self._steps_per_epoch = max(1, event.steps_per_epoch)
        if event.rank != 0:
            return
        if self._first_step is None:
            self._first_step = self._count_steps(event.epoch, event.step)
            self._start = self._clock()
        if event.generation > 1 or event.total_steps:
            lost = f"; {event.num_lost:,} private samples are not read" if event.num_lost else ""
            self._print(
                f"{len(event.batch_sizes)} ranks continue at epoch {event.epoch}, step {event.step}, "
                f"global batch {sum(event.batch_sizes.values())}{lost}"
            )

    def _set_batch_sizes(self, sizes: dict[str, int]) -> None:
        for rank, row in self._rows.items():
            row.batch_size = sizes.get(str(rank), 0)

    def _format_rebalanced(self, event: Rebalanced) -> str:
        sizes = ", ".join(
            f"{self._spec.ranks[int(rank)].node} {size}" for rank, size in event.batch_sizes.items()
        )
        return (
            f"{event.slowest} took {event.slowdown:.2f} times as long as a balanced step; "
            f"batch sizes from step {event.step + 1} of epoch {event.epoch}: {sizes}"
        )

    def _count_steps(self, epoch: int, step: int) -> int:
        return (epoch - 1) * self._steps_per_epoch + step

    def _show_totals(self, event: Progress | EpochEnd, row: RankRow) -> None:
        """Show what a rank has done; a short epoch has only its end."""
        take_totals(row, event)
        self._evaluating, self._step_at = "", self._clock()
        if event.rank != 0:
            return
        self._last = event
        self._last_step = self._steps_per_epoch if isinstance(event, EpochEnd) else event.step
        self._rate = event.global_samples / event.wall_s if event.wall_s else None
        self._add_points(event)
        if isinstance(event, EpochEnd):
            self._print_soon(_format_epoch(event, self._spec.recipe.epochs))
        else:
            self._print_headline_if_due()

    def _add_points(self, event: Progress | EpochEnd) -> None:
        metrics = list(name_metrics(event.accuracy, event.metrics).items())
        for name, value in (("loss", event.loss), *metrics[:1]):
            if value is not None and math.isfinite(value):
                points = self._curves.setdefault(name, [])
                points.append(value)
                if len(points) > MAX_POINTS:  # as many again fit, at half of the resolution
                    points[:] = points[::2]

    def _done_steps(self) -> int:
        return self._count_steps(self._last.epoch, self._last_step) if self._last else 0

    def _headline(self) -> str:
        if self._last is None:
            starting = [row.node for row in self._rows.values() if row.state == STARTING]
            waiting = f"{format_node_names(starting)} loading TensorFlow" if starting else "first step"
            return f"{waiting} ({show_elapsed(self._elapsed_s)})"
        done, total = self._done_steps(), self._steps_per_epoch * self._spec.recipe.epochs
        done_here = max(1, done - (self._first_step or 0))
        left = (self._clock() - self._start) * max(0, total - done) / done_here
        return (
            self._silence()
            + self._evaluating
            + (
                f"epoch {self._last.epoch}/{self._spec.recipe.epochs}  "
                f"step {self._last_step}/{self._steps_per_epoch}  "
                f"{show_elapsed(left)} left  {format_rate(self._rate)} samples/s  "
                f"loss {format_loss(self._last.loss)}"
                f"{format_metrics(self._last.accuracy, self._last.metrics).replace(', ', '  ')}"
            )
        )

    def _silence(self) -> str:
        """Return how long nothing has come, and who is known to be the cause."""
        silent_s = self._clock() - self._step_at
        if silent_s < SILENT_S:
            return ""
        standing = [row.node for row in self._rows.values() if row.is_sick]
        names = f" ({format_node_names(standing, at_most=2)})" if standing else ""
        return f"no step for {show_elapsed(silent_s)}{names}  "

    def _list_rows(self) -> Sequence[RankRow]:
        return list(self._rows.values())

    def _done(self) -> tuple[float, float]:
        return self._done_steps(), self._steps_per_epoch * self._spec.recipe.epochs

    def _details(self, width: int) -> list[Text]:
        line = self._bottleneck.describe(self._clock())
        return [*self._render_curves(width), *([Text(line, style="yellow")] if line else [])]

    def _render_curves(self, width: int) -> list[Text]:
        shown = {name: points for name, points in self._curves.items() if len(points) > 1}
        room = max(10, min(60, width // max(1, len(shown)) - 22))
        parts = [f"{name} {draw_curve(points, room)} {points[-1]:.4g}" for name, points in shown.items()]
        return [Text("   ".join(parts), no_wrap=True)] if parts else []

    def _columns(self, width: int) -> list[Column[RankRow]]:
        bar_width = 20 if width >= WIDE else 12
        columns: list[Column[RankRow]] = [
            Column("batch", lambda row: span([rank.batch_size for rank in row.members])),
            Column("samples/s", lambda row: format_rate(mean([rank.rate for rank in row.members])), 9),
            Column("waiting", lambda row: draw_waiting(row, bar_width), bar_width + 5, is_right=False),
        ]
        if width >= WIDER:
            columns += self._machine_columns()
        if width >= WIDE:
            columns += [
                Column("compute", lambda row: _seconds([rank.compute_s for rank in row.members]), 8),
                Column("wait", lambda row: _seconds([rank.held_s for rank in row.members]), 8),
                Column("sum", lambda row: _seconds([rank.sum_s for rank in row.members]), 8),
            ]
        return columns

    def _machine_columns(self) -> list[Column[RankRow]]:
        """Return memory, and temperature where there is a sensor."""
        columns: list[Column[RankRow]] = []
        rows = self._list_rows()
        if any(row.memory_bytes for row in rows):
            columns.append(
                Column(
                    "memory", lambda row: format_bytes(_largest([one.memory_bytes for one in row.members]))
                )
            )
        if any(row.temperature_c for row in rows):
            columns.append(Column("°C", lambda row: _degrees([one.temperature_c for one in row.members])))
        return columns


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _degrees(values: Sequence[float | None]) -> str:
    hottest = _largest(values)
    return "–" if hottest is None else f"{hottest:.0f}"


def take_totals(row: RankRow, event: Progress | EpochEnd) -> None:
    """Take what a rank reports of its latest steps."""
    row.state = TRAINING
    if event.steps:
        row.compute_s, row.wait_s = event.compute_s / event.steps, event.wait_s / event.steps
        row.others_s = None if event.others_s is None else event.others_s / event.steps
    row.rate = event.samples / event.wall_s if event.wall_s else None
    if isinstance(event, Progress):
        row.memory_bytes, row.temperature_c = event.memory_bytes, event.temperature_c


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


def _seconds(values: Sequence[float]) -> str:
    return format_seconds(mean(values) or None)


def _format_epoch(event: EpochEnd, epochs: int) -> str:
    rate = event.global_samples / event.wall_s if event.wall_s else None
    line = (
        f"epoch {event.epoch}/{epochs}: "
        f"loss {format_loss(event.loss)}{format_metrics(event.accuracy, event.metrics)}, "
        f"{format_rate(rate)} samples/s in {format_seconds(event.wall_s)}"
    )
    if event.validation_loss is None:
        return line
    metrics = format_metrics(event.validation_accuracy, event.validation_metrics)
    return f"{line}; validation loss {format_loss(event.validation_loss)}{metrics}"
