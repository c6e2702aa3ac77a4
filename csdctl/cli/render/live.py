"""A run while it trains: a live table on a terminal and in a notebook, plain lines elsewhere."""

import time
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.view import View, live_on
from csdctl.reporting.numbers import format_accuracy, format_loss, format_rate, format_seconds, format_share
from csdctl.reporting.privacy import describe_inversion
from csdctl.worker.protocol.events import (
    EARLY_STOPPING,
    CheckpointSaved,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Inverted,
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

PLAIN_INTERVAL_S = 5.0


@dataclass
class _RankRow:
    state: str = "starting"
    compute_s: float = 0.0
    wait_s: float = 0.0
    rate: float | None = None


class TrainingView(View):
    """Shows the events of a run; use it as a context manager around the run."""

    def __init__(
        self, console: PrintableConsole, spec: RunSpec, steps_per_epoch: int, *, emulated: bool
    ) -> None:
        self._console = console
        self._spec = spec
        self._steps_per_epoch = steps_per_epoch
        self._batch_sizes = {rank.rank: rank.batch_size for rank in spec.ranks}
        self._first_step: int | None = None
        self._title = f"run {spec.run_id}" + (" (emulated fleet)" if emulated else "")
        self._rows = {rank.rank: _RankRow() for rank in spec.ranks}
        self._last: Progress | EpochEnd | None = None
        self._last_step = 0
        self._rate: float | None = None
        self._start = self._printed_at = time.monotonic()
        self._live = live_on(console, self._render)
        super().__init__(self._live)

    def show(self, event: Event) -> None:
        """Show one event."""
        row = self._rows[event.rank]
        if isinstance(event, Ready):
            row.state = "ready"
        elif isinstance(event, Joined):
            self._show_joined(event)
        elif isinstance(event, Progress):
            self._show_totals(event, event.step, row)
            self._print_headline_if_due(event)
        elif isinstance(event, EpochEnd):
            self._show_totals(event, self._steps_per_epoch, row)
            if event.rank == 0:
                self._print(_format_epoch(event, self._spec.recipe.epochs))
        elif isinstance(event, Rebalanced):
            self._set_batch_sizes(event.batch_sizes)
            self._print(self._format_rebalanced(event))
        elif isinstance(event, LinkLost):
            row.state = "waiting for other ranks"
        elif isinstance(event, WaitingFor) and event.nodes:
            self._print(f"waiting for {', '.join(event.nodes)}")
        elif isinstance(event, NodeLost):
            row.state = "lost"
            self._print(f"{event.node} is lost, the other ranks continue: {event.message}")
        elif isinstance(event, NodeBack):
            row.state = "back"
            self._print(f"{event.node} is back and rejoins at the end of the epoch")
        elif isinstance(event, Finished):
            row.state = "done"
            if event.rank == 0 and event.reason == EARLY_STOPPING:
                self._print(f"stopped early, after epoch {event.epochs}")
        elif isinstance(event, Failed):
            row.state = "failed"
        elif isinstance(event, Inverted):
            self._print(f"activations: {describe_inversion(event)}")
        elif isinstance(event, CheckpointSaved) and self._live is None:
            self._print(f"checkpoint {event.path}")

    def _show_joined(self, event: Joined) -> None:
        """Show that a group of ranks has formed; rank 0 reports for the group."""
        self._rows[event.rank].state = "training"
        self._set_batch_sizes(event.batch_sizes)
        self._steps_per_epoch = max(1, event.steps_per_epoch)
        if event.rank != 0:
            return
        if self._first_step is None:
            self._first_step = self._count_steps(event.epoch, event.step)
            self._start = time.monotonic()
        if event.generation > 1 or event.total_steps:
            lost = f"; {event.num_lost:,} private samples are not read" if event.num_lost else ""
            self._print(
                f"{len(event.batch_sizes)} ranks continue at epoch {event.epoch}, step {event.step}, "
                f"global batch {sum(event.batch_sizes.values())}{lost}"
            )

    def _set_batch_sizes(self, sizes: dict[str, int]) -> None:
        self._batch_sizes = {int(rank): size for rank, size in sizes.items()}

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

    def _show_totals(self, event: Progress | EpochEnd, step: int, row: _RankRow) -> None:
        """Show what a rank has done up to `step` of an epoch; a short epoch has only its end."""
        row.state = "training"
        if event.steps:
            row.compute_s, row.wait_s = event.compute_s / event.steps, event.wait_s / event.steps
        row.rate = event.samples / event.wall_s if event.wall_s else None
        if event.rank == 0:
            self._last, self._last_step = event, step
            self._rate = event.global_samples / event.wall_s if event.wall_s else None

    def _print_headline_if_due(self, event: Progress) -> None:
        is_due = time.monotonic() - self._printed_at >= PLAIN_INTERVAL_S
        if event.rank == 0 and self._live is None and is_due:
            self._printed_at = time.monotonic()
            self._print(self._headline())

    def _print(self, line: str) -> None:
        target = self._live.console if self._live else self._console
        target.print(line, soft_wrap=True)

    def _done_steps(self) -> int:
        return self._count_steps(self._last.epoch, self._last_step) if self._last else 0

    def _headline(self) -> str:
        if self._last is None:
            starting = sum(row.state == "starting" for row in self._rows.values())
            waiting = (
                f"{starting} of {len(self._rows)} ranks are loading TensorFlow" if starting else "first step"
            )
            return f"{waiting} ({format_seconds(time.monotonic() - self._start)})"
        done, total = self._done_steps(), self._steps_per_epoch * self._spec.recipe.epochs
        done_here = max(1, done - (self._first_step or 0))
        left = (time.monotonic() - self._start) * max(0, total - done) / done_here
        return (
            f"epoch {self._last.epoch}/{self._spec.recipe.epochs}  "
            f"step {self._last_step}/{self._steps_per_epoch}  "
            f"loss {format_loss(self._last.loss)}  accuracy {format_accuracy(self._last.accuracy)}  "
            f"{format_rate(self._rate)} samples/s  {format_seconds(left)} left"
        )

    def _render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("rank", justify="right")
        table.add_column("node")
        for column in ("batch size", "compute", "waiting", "share", "samples/s"):
            table.add_column(column, justify="right")
        table.add_column("")
        for rank in self._spec.ranks:
            row = self._rows[rank.rank]
            step_s = row.compute_s + row.wait_s
            table.add_row(
                str(rank.rank),
                rank.node,
                str(self._batch_sizes.get(rank.rank, "")),
                format_seconds(row.compute_s or None),
                format_seconds(row.wait_s or None),
                format_share(row.wait_s / step_s if step_s else None),
                format_rate(row.rate),
                row.state,
            )
        total = self._steps_per_epoch * self._spec.recipe.epochs
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=self._done_steps(), width=60))
        return Group(Text(self._title, style="bold"), Text(self._headline()), bar, table)


def _format_epoch(event: EpochEnd, epochs: int) -> str:
    rate = event.global_samples / event.wall_s if event.wall_s else None
    line = (
        f"epoch {event.epoch}/{epochs}: "
        f"loss {format_loss(event.loss)}, accuracy {format_accuracy(event.accuracy)}, "
        f"{format_rate(rate)} samples/s in {format_seconds(event.wall_s)}"
    )
    if event.validation_accuracy is None:
        return line
    loss, accuracy = format_loss(event.validation_loss), format_accuracy(event.validation_accuracy)
    return f"{line}; validation loss {loss}, accuracy {accuracy}"
