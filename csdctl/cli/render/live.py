"""A run while it goes on: a live view on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from csdctl.cli.render.numbers import show_accuracy, show_loss, show_rate, show_seconds, show_share
from csdctl.worker.contract import Checkpointed, EpochEnd, Event, Failed, Finished, Progress, Ready, RunSpec

PLAIN_INTERVAL_S = 5.0


@dataclass
class _RankLine:
    state: str = "starting"
    compute_s: float = 0.0
    wait_s: float = 0.0
    rate: float | None = None


class TrainingView:
    """Shows events as they come; use as a context manager around the run."""

    def __init__(self, console: Console, spec: RunSpec, *, emulated: bool) -> None:
        self._console = console
        self._spec = spec
        self._title = f"run {spec.run_id}" + (" (emulated fleet)" if emulated else "")
        self._ranks = {rank.rank: _RankLine() for rank in spec.ranks}
        self._last: Progress | None = None
        self._rate: float | None = None
        self._began = self._said = time.monotonic()
        self._live = (
            Live(get_renderable=self._view, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> "TrainingView":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Take one event in."""
        line = self._ranks[event.rank]
        if isinstance(event, Ready):
            line.state = "ready"
            if all(one.state != "starting" for one in self._ranks.values()):
                self._began = time.monotonic()
        elif isinstance(event, Progress):
            self._progress(event, line)
        elif isinstance(event, EpochEnd) and event.rank == 0:
            self._print(_epoch_line(event, self._spec.recipe.epochs))
        elif isinstance(event, Finished):
            line.state = "done"
        elif isinstance(event, Failed):
            line.state = "failed"
        elif isinstance(event, Checkpointed) and self._live is None:
            self._print(f"checkpoint {event.path}")

    def _progress(self, event: Progress, line: _RankLine) -> None:
        line.state = "training"
        line.compute_s, line.wait_s = event.compute_s / event.steps, event.wait_s / event.steps
        line.rate = event.samples / event.wall_s if event.wall_s else None
        if event.rank == 0:
            self._last = event
            self._rate = event.global_samples / event.wall_s if event.wall_s else None
            if self._live is None and time.monotonic() - self._said >= PLAIN_INTERVAL_S:
                self._said = time.monotonic()
                self._print(self._headline())

    def _print(self, line: str) -> None:
        target = self._live.console if self._live else self._console
        target.print(line, markup=False, soft_wrap=True)

    def _done_steps(self) -> int:
        return (self._last.epoch - 1) * self._spec.steps_per_epoch + self._last.step if self._last else 0

    def _headline(self) -> str:
        if self._last is None:
            starting = sum(line.state == "starting" for line in self._ranks.values())
            waiting = (
                f"{starting} of {len(self._ranks)} ranks are loading TensorFlow" if starting else "first step"
            )
            return f"{waiting} ({show_seconds(time.monotonic() - self._began)})"
        done, total = self._done_steps(), self._spec.steps_per_epoch * self._spec.recipe.epochs
        left = (time.monotonic() - self._began) * (total - done) / done
        return (
            f"epoch {self._last.epoch}/{self._spec.recipe.epochs}  "
            f"step {self._last.step}/{self._spec.steps_per_epoch}  "
            f"loss {show_loss(self._last.loss)}  accuracy {show_accuracy(self._last.accuracy)}  "
            f"{show_rate(self._rate)} images/s  {show_seconds(left)} left"
        )

    def _view(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("rank", justify="right")
        table.add_column("node")
        for column in ("batch size", "compute", "waiting", "share", "images/s"):
            table.add_column(column, justify="right")
        table.add_column("")
        for rank in self._spec.ranks:
            line = self._ranks[rank.rank]
            both = line.compute_s + line.wait_s
            table.add_row(
                str(rank.rank),
                rank.node,
                str(rank.batch_size),
                show_seconds(line.compute_s or None),
                show_seconds(line.wait_s or None),
                show_share(line.wait_s / both if both else None),
                show_rate(line.rate),
                line.state,
            )
        total = self._spec.steps_per_epoch * self._spec.recipe.epochs
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=self._done_steps(), width=60))
        return Group(Text(self._title, style="bold"), Text(self._headline()), bar, table)


def _epoch_line(event: EpochEnd, epochs: int) -> str:
    rate = event.global_samples / event.wall_s if event.wall_s else None
    line = (
        f"epoch {event.epoch}/{epochs}: "
        f"loss {show_loss(event.loss)}, accuracy {show_accuracy(event.accuracy)}, "
        f"{show_rate(rate)} images/s in {show_seconds(event.wall_s)}"
    )
    if event.validation_accuracy is None:
        return line
    loss, accuracy = show_loss(event.validation_loss), show_accuracy(event.validation_accuracy)
    return f"{line}; validation loss {loss}, accuracy {accuracy}"
