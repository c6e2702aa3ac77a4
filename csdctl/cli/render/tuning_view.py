"""A fleet while it is measured: what each machine does, what is waited for, and the steps of the trial."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.fleet_view import WIDE, Column, FleetView, show_elapsed
from csdctl.cli.render.live import draw_waiting, take_totals
from csdctl.cli.render.rank_rows import DONE, TRAINING, RankRow, mean, span
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_rate, format_seconds
from csdctl.worker.protocol.events import EpochEnd, Event, Failed, Finished, Joined, NodeLost, Progress
from csdctl.worker.protocol.probe import ProbeResult
from csdctl.workflows.tune.watch import IDLE, LOADING, MEASURING, SUMMING

WAITED_FOR = {LOADING: "loading TensorFlow", SUMMING: "timing sums", MEASURING: "measuring batch sizes"}
"""What machines do that the others wait for, in words of the headline."""


@dataclass
class TuneRow(RankRow):
    """What one machine does."""

    since_s: float = 0.0
    """When it began with this."""

    @property
    def is_sick(self) -> bool:
        """Whether the machine has left the trial."""
        return self.state in ("lost", "failed")

    @property
    def slowness(self) -> float:
        """Those that the others wait for come first; in the trial, those that wait least."""
        return 1.0 if self.state in WAITED_FOR else self.busy_share


class TuningView(FleetView[TuneRow]):
    """Shows what machines do; a context manager around the measurements, called from any thread."""

    def __init__(
        self,
        console: PrintableConsole,
        machines: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds."""
        now = clock()
        self._rows = {
            name: TuneRow(number, name, state=IDLE, since_s=now) for number, name in enumerate(machines)
        }
        self._num_probes = self._num_rounds = 0
        self._num_active = len(machines)
        self._trial: Mapping[str, int] = {}
        self._step, self._num_steps = 0, 0
        self._stepping_since = now
        super().__init__(console, "tuning", clock=clock)

    def on_machine(self, name: str, doing: str, batch_size: int = 0, samples_per_s: float = 0.0) -> None:
        """Show what machine `name` does."""
        row = self._rows[name]
        self._trial = {}
        row.compute_s = row.wait_s = 0.0
        row.state, row.batch_size, row.since_s = doing, batch_size, self._clock()
        row.rate = samples_per_s or None
        self._num_active = max(self._num_active, len(self._waited_for()))
        self._print_headline_if_due()

    def on_probes(self, results: Mapping[str, ProbeResult | None]) -> None:
        """Count a round, whose results are printed elsewhere."""
        self._num_probes += len(results)
        self._num_rounds += 1
        self._num_active = 0

    def on_trial(self, num_steps: int, batch_sizes: Mapping[str, int]) -> None:
        """Show the steps that all machines take together."""
        self._trial, self._num_steps, self._step = batch_sizes, num_steps, 0
        self._stepping_since = now = self._clock()
        for row in list(self._rows.values()):
            row.state, row.since_s = ("joining" if row.node in batch_sizes else IDLE), now
            row.batch_size, row.rate = batch_sizes.get(row.node, 0), None

    def on_event(self, event: Event) -> None:
        """Show an event of the trial."""
        row = self._rows.get(event.node)
        if row is None:
            return
        if isinstance(event, Joined):
            row.state = TRAINING
            if event.rank == 0:
                self._stepping_since = self._clock()
        elif isinstance(event, Progress | EpochEnd):
            take_totals(row, event)
            if event.rank == 0:
                self._step = event.step if isinstance(event, Progress) else self._num_steps
        elif isinstance(event, Finished):
            row.state = DONE
        elif isinstance(event, NodeLost | Failed):
            row.state = "lost" if isinstance(event, NodeLost) else "failed"
        self._print_headline_if_due()

    def _list_rows(self) -> Sequence[TuneRow]:
        return list(self._rows.values())

    def _waited_for(self) -> list[TuneRow]:
        return [row for row in list(self._rows.values()) if row.state in WAITED_FOR]

    def _done(self) -> tuple[float, float | None]:
        if self._trial:
            return self._step, self._num_steps
        return self._num_active - len(self._waited_for()), self._num_active or None

    def _headline(self) -> str:
        now, waited_for = self._clock(), self._waited_for()
        parts = []
        if self._trial:
            parts.append(f"trial of the plan: step {self._step}/{self._num_steps}")
            if self._step:
                spent_s = now - self._stepping_since
                left_s = spent_s * (self._num_steps - self._step) / self._step
                parts.append(f"{format_seconds(left_s)} left")
        elif waited_for:
            longest = min(waited_for, key=lambda row: row.since_s)
            names = format_node_names(row.node for row in waited_for if row.state == longest.state)
            parts.append(f"{names}: {WAITED_FOR[longest.state]} ({show_elapsed(now - longest.since_s)})")
        else:
            parts.append("choosing what to measure next")
        if self._num_probes:
            parts.append(f"{self._num_probes} probes in {self._num_rounds} rounds")
        parts.append(f"{show_elapsed(self._elapsed_s)} so far")
        return "  ".join(parts)

    def _columns(self, width: int) -> list[Column[TuneRow]]:
        bar_width, now = (20 if width >= WIDE else 12), self._clock()
        columns: list[Column[TuneRow]] = [
            Column("for", lambda row: show_elapsed(now - min(one.since_s for one in row.members)), 6),
            Column("batch", lambda row: span([one.batch_size for one in row.members])),
            Column("samples/s", lambda row: format_rate(mean([one.rate for one in row.members])), 9),
        ]
        if self._trial:
            columns.append(
                Column("waiting", lambda row: draw_waiting(row, bar_width), bar_width + 5, is_right=False)
            )
        return columns
