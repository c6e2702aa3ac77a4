"""A training: messages, checks before it, progress of preparing, and the live view."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from csdctl.fleet.checks import Check, Status, fold
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import (
    format_count,
    format_loss,
    format_metrics,
    format_range,
    format_rate,
    format_seconds,
)
from csdctl.reporting.privacy import Privacy, describe_privacy, plan_privacy
from csdctl.reporting.results import STOPPED, RunSummary
from csdctl.reporting.series import Bottleneck, SeriesBuilder, find_bottleneck
from csdctl.reporting.tables import describe_result
from csdctl.reporting.tally import Amounts, Tally
from csdctl.runs.directory import RunDirectory
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.prepare import PreparationScreen
from csdctl.terminal.report import report_document
from csdctl.terminal.streams import Streams
from csdctl.terminal.tune import plan_document, render_plan
from csdctl.terminal.view import (
    STARTING,
    WIDE,
    Columns,
    RankRow,
    View,
    choose_rows,
    describe_rest,
    show_elapsed,
    tabulate,
)
from csdctl.worker.protocol.events import (
    EARLY_STOPPING,
    CheckpointSaved,
    EpochEnd,
    Evaluating,
    Event,
    Finished,
    Joined,
    NodeBack,
    NodeLost,
    Progress,
    Ready,
    Rebalanced,
    WaitingFor,
    Warned,
    event_document,
)
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.preflight.doctor import Examination, describe, judge_sandbox
from csdctl.workflows.train.run import RunStopped
from csdctl.workflows.train.scale import Point
from csdctl.workflows.train.train import TrainRequest, TrainResult, rehearse_training, run_training
from csdctl.workflows.workspace.event_stream import RunStarted

INTERVAL_S, INTERVAL_SHARE = 5.0, 1 / 64
"""Minimum interval between two searches for a bottleneck, and the same as a share of the run so far. The
figures of a long run change slowly, and a new watcher reads all of its events."""


def describe_repeats(spec: RunSpec) -> list[str]:
    """Return how often nodes read their private samples, if more than once an epoch."""
    lines = []
    for rank in (rank for rank in spec.ranks if rank.num_repeated):
        different = rank.num_private - rank.num_repeated
        weight = f", each with weight {rank.weight:.2f}" if rank.weight != 1.0 else ""
        lines.append(
            f"{rank.node}: {different:,} private samples are read "
            f"{rank.num_private / different:.2f} times an epoch{weight}"
        )
    return lines


def describe_learning_rate(spec: RunSpec) -> str:
    """Return the learning rate after the warm-up, and what it follows from. '' with a schedule."""
    recipe, size = spec.recipe, sum(rank.batch_size for rank in spec.ranks)
    if recipe.schedule or not recipe.learning_rate:
        return ""
    rate, limit = recipe.scale_rate(recipe.learning_rate, size), recipe.max_learning_rate
    reason = f"{recipe.learning_rate:g} × {size}/{recipe.reference_batch}"
    shown = "recipe.max_learning_rate" if limit is None else f"{limit:g}"
    return f"learning rate {rate:.2g} ({reason}; limit: {shown})"


class TrainingView(View):
    """Shows the events of a run: a live table on a terminal, lines elsewhere. A context manager."""

    def __init__(
        self,
        console: PrintableConsole,
        spec: RunSpec,
        steps_per_epoch: int,
        *,
        emulated: bool,
        past: Iterable[Event] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`past`: events of the run that are not shown, but belong to its rates and totals.

        `clock`: seconds, in which the times of the events that are shown are measured.
        """
        self._spec = spec
        self._steps_per_epoch = steps_per_epoch
        self._tally = Tally()
        for event in past:
            self._tally.add(event)
        self._rows = {rank.rank: RankRow(rank.node, batch_size=rank.batch_size) for rank in spec.ranks}
        self._last: Progress | EpochEnd | None = None
        self._last_step = 0
        self._rate: float | None = None
        self._evaluating = ""
        self._step_at = clock()
        self._series = SeriesBuilder([rank.node for rank in spec.ranks])
        self._first_event_s = self._looked_at = math.nan
        self._bottleneck: Bottleneck | None = None
        self._title = f"run {spec.run_id}" + (" (emulated fleet)" if emulated else "")
        self._clock = clock
        self._start = self._printed_at = clock()
        super().__init__(console, self._render)

    def show(self, event: Event) -> None:
        """Show one event."""
        row = self._rows[event.rank]
        self._find_bottleneck(event)
        if isinstance(event, Joined):
            self._show_joined(event)
        report = self._tally.add(event)
        row.take(event, report)
        if isinstance(event, Progress | EpochEnd):
            self._show_totals(event, report)
        elif isinstance(event, Rebalanced):
            self._set_batch_sizes(event.batch_sizes)
        elif isinstance(event, Evaluating):
            self._evaluating = f"evaluating {event.num_done:,}/{event.num_samples:,} samples  "
            self._step_at = self._clock()
        if line := self._format_event(event):
            self._print(line)

    def _find_bottleneck(self, event: Event) -> None:
        """Look for whom the others wait now and then. Without a terminal, print what has changed."""
        now = self._clock()
        if math.isnan(self._first_event_s):
            self._first_event_s = self._looked_at = now
        self._series.add(now, event)
        if now - self._looked_at < max(INTERVAL_S, INTERVAL_SHARE * (now - self._first_event_s)):
            return
        self._looked_at, before = now, self._bottleneck
        self._bottleneck = found = find_bottleneck(self._series.build(), is_now=True)
        is_same = before and found and (before.rank, before.cause) == (found.rank, found.cause)
        if found and not is_same and self._live is None:
            self._print(self._describe_bottleneck())

    def _describe_bottleneck(self) -> str:
        """Return whom the others have lately waited for, as a line. Nothing where they did not wait."""
        bottleneck = self._bottleneck
        if bottleneck is None or bottleneck.rank is None:
            return f"link: {bottleneck.why}" if bottleneck else ""
        node, lost_s = self._spec.ranks[bottleneck.rank].node, format_seconds(bottleneck.lost_s)
        return f"others waited {lost_s} for {node} ({bottleneck.cause}): {bottleneck.why}"

    def _format_event(self, event: Event) -> str:
        """Return what is printed about an event, apart from steps, epochs and who takes part."""
        if isinstance(event, Rebalanced):
            return self._format_rebalanced(event)
        if isinstance(event, WaitingFor) and event.nodes:
            return f"waiting for {format_node_names(event.nodes)}"
        if isinstance(event, Warned):
            return f"warning: {event.node}: {event.message}" + f"\n  → {event.remedy}" * bool(event.remedy)
        if isinstance(event, NodeLost):
            return f"{event.node} is lost: {event.message}" + f"\n  → {event.remedy}" * bool(event.remedy)
        if isinstance(event, NodeBack):
            return f"{event.node} is back"
        if isinstance(event, Finished) and event.rank == 0 and event.reason == EARLY_STOPPING:
            return f"stopped early, after epoch {event.epochs}"
        if isinstance(event, CheckpointSaved) and self._live is None:
            return f"checkpoint {event.path}"
        return ""

    def _show_joined(self, event: Joined) -> None:
        """Show who takes part from here on."""
        self._set_batch_sizes(event.batch_sizes)
        for rank in map(int, event.batch_sizes):
            self._rows[rank].join()
        self._steps_per_epoch = max(1, event.steps_per_epoch)
        num_repeated = self._tally.steps - event.total_steps
        if not event.is_start or event.total_steps or num_repeated > 0:
            lost = f"; {event.num_lost:,} private samples are not read" if event.num_lost else ""
            if num_repeated > 0:
                lost += (
                    f"; {format_count(num_repeated, 'step')} {'are' if num_repeated > 1 else 'is'} repeated"
                )
            stopped_s = self._series.stopped_s * event.is_start
            lost += f"; they waited for {format_seconds(stopped_s)}" if stopped_s else ""
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

    def _show_totals(self, event: Progress | EpochEnd, report: Amounts | None) -> None:
        """Show what a rank has done. A short epoch has only its end."""
        self._evaluating, self._step_at = "", self._clock()
        if event.rank != 0:
            return
        self._last = event
        if isinstance(event, Progress):
            self._steps_per_epoch = max(self._steps_per_epoch, event.step)
        self._last_step = self._steps_per_epoch if isinstance(event, EpochEnd) else event.step
        if report and report.steps:
            self._rate = report.throughput
        if isinstance(event, EpochEnd):
            self._print(_format_epoch(event, self._spec.recipe.epochs, self._tally.epoch))
        elif self._live is None and self._clock() - self._printed_at >= INTERVAL_S:
            self._printed_at = self._clock()
            self._print(self._headline())

    def _headline(self) -> str:
        if self._last is None:
            starting = [row.node for row in self._rows.values() if row.state == STARTING]
            waiting = f"{format_node_names(starting)} loading TensorFlow" if starting else "first step"
            return f"{waiting} ({show_elapsed(self._clock() - self._start)})"
        done, total = self._done()
        reported = self._tally.ranks[0]
        left = max(0.0, total - done) * reported.wall_s / max(1, reported.steps)
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
        if silent_s < 10.0:
            return ""
        standing = [row.node for row in self._rows.values() if row.is_sick]
        names = f" ({format_node_names(standing, at_most=2)})" if standing else ""
        return f"no step for {show_elapsed(silent_s)}{names}  "

    def _done(self) -> tuple[float, float]:
        ended = (self._last.epoch - 1) * self._steps_per_epoch if self._last else 0
        return ended + self._last_step, self._steps_per_epoch * self._spec.recipe.epochs

    def _render(self) -> RenderableType:
        width, height = self._console.size
        done, total = self._done()
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total, completed=done, width=min(width, 100)))
        details = self._details()
        num_lines = sum(max(1, math.ceil(line.cell_len / width)) for line in details)
        # Beside the rows: title, headline, bar, names of the columns, and two lines that stay free below.
        rows, rest = choose_rows(list(self._rows.values()), max(3, height - 6 - num_lines))
        lines = [self._title, self._headline(), describe_rest(rest)]
        title, headline, others = (Text(line, no_wrap=True, overflow="ellipsis") for line in lines)
        title.stylize("bold")
        table = tabulate(rows, self._columns(width), width)
        return Group(title, headline, bar, *details, *table, *([others] if rest else []))

    def _details(self) -> list[Text]:
        """Return lines between the bar and the rows."""
        line = self._describe_bottleneck()
        return [Text(line, style="yellow")] if line else []

    def _columns(self, width: int) -> Columns:
        """Return the columns after node and state, for a terminal of `width`."""
        columns: dict[str, Callable[[RankRow], str | Text]] = {
            ">batch": lambda row: str(row.batch_size or "–"),
            ">samples/s": lambda row: format_rate(row.rate),
            "waiting": lambda row: row.draw_waiting(20 if width >= WIDE else 12),
        }
        if width >= WIDE:
            columns[">compute"] = lambda row: format_seconds(row.compute_s or None)
            columns[">wait"] = lambda row: format_seconds(row.held_s or None)
            columns[">sum"] = lambda row: format_seconds(row.sum_s or None)
        return columns


def _format_epoch(event: EpochEnd, epochs: int, done: Amounts) -> str:
    """Return the line of an epoch that has ended. `done`: all reports of rank 0 in it."""
    line = (
        f"epoch {event.epoch}/{epochs}: "
        f"loss {format_loss(event.loss)}{format_metrics(event.accuracy, event.metrics)}, "
        f"{format_rate(done.throughput)} samples/s in {format_seconds(done.wall_s)}"
    )
    if event.learning_rate is not None:
        line += f", learning rate {event.learning_rate:.2g}"
    if event.validation_loss is None:
        return line
    metrics = format_metrics(event.validation_accuracy, event.validation_metrics)
    return f"{line}; validation loss {format_loss(event.validation_loss)}{metrics}"


class TrainingScreen(PreparationScreen):
    """Shows one `csdctl train`. The live view opens with the run."""

    def __init__(self, streams: Streams, *, emulated: bool) -> None:
        super().__init__(streams)
        streams.console.outlives_its_reader = True  # a run ends as the user says
        self._emulated = emulated
        self._stack = ExitStack()
        self._view: TrainingView | None = None
        self._amber: set[tuple[str, str]] = set()
        """Machines that were warned of, and what was found."""
        self.run: RunDirectory | None = None
        """The run; None before it has started."""

    def train(self, request: TrainRequest) -> TrainResult:
        """Train, and show the results. Raises what `run_training` raises."""
        with self._stack:
            try:
                result = run_training(request, self.events)
            except RunStopped as stopped:
                assert self.run is not None
                line = "stopped; the state of the last completed step is kept"
                self._show_end(line, "released so far", stopped.summary, self.run, is_stopped=True)
                raise
        summary, run = result.summary, result.directory
        if result.was_complete:
            self.say(f"run {summary.run_id} is complete: nothing to resume")
            self._streams.result_line(report_document(summary, str(run.path)))
        else:  # a callback may have stopped it
            is_stopped = summary.state == STOPPED
            line = f"{describe_result(summary)}; `csdctl report` shows more"
            self._show_end(line, "released", summary, run, is_stopped=is_stopped)
        return result

    def show(self, event: object) -> None:
        """Show one event of the training."""
        if isinstance(event, Event):
            self._show_event(event)
        elif isinstance(event, Examination):
            self._show_examination(event)
        elif isinstance(event, RunStarted):
            self._show_start(event)
        else:
            super().show(event)

    def _show_examination(self, examination: Examination) -> None:
        """Show a line for each amber check, and the times of sums unless something is red."""
        for check, machines in fold(examination.checks):
            if check.status == Status.WARN:
                self._say_amber(machines, check)
        if examination.red or examination.overdue:
            return
        for check in examination.checks:
            if check.check == "sum":
                self.say(f"preflight: {check.found}")

    def _say_amber(self, machines: Sequence[str], check: Check) -> None:
        self._amber |= {(machine, check.found) for machine in machines}
        self.say(f"amber: {', '.join(machines)}: {describe(check)}")
        if check.remedy:
            self.say(f"  → {check.remedy}")

    def _show_start(self, started: RunStarted) -> None:
        """Show the run, and open the live view."""
        run, spec, num_steps = started.run, started.spec, started.steps_per_epoch
        self.run = run
        self._streams.result_line({"schema": "csdctl.train/1", "run": run.run_id, "path": str(run.path)})
        self.say(f"run {run.run_id}: {format_count(spec.ranks, 'rank')}, {num_steps:,} steps per epoch")
        if rates := started.predicted_range:
            self.say(f"9 of 10 such runs are expected to reach {format_range(rates)} samples/s")
        for line in filter(None, (*describe_repeats(spec), describe_learning_rate(spec))):
            self.say(line)
        past = run.read_events([rank.node for rank in spec.ranks]) if run.events.exists() else ()
        if planned := plan_privacy(spec, past):
            self._show_privacy(planned, f"after {spec.recipe.epochs} epochs, if nothing is lost, ")
        self._view = self._stack.enter_context(
            TrainingView(self._streams.views, spec, num_steps, emulated=self._emulated, past=past)
        )

    def _show_event(self, event: Event) -> None:
        self._streams.result_line(event_document(event))
        if isinstance(event, Ready) and event.sandbox.obstacle:
            check = judge_sandbox(event.node, event.sandbox)
            if (event.node, check.found) not in self._amber:
                self._say_amber([event.node], check)
        if self._view:
            self._view.show(event)

    def _show_end(
        self, line: str, released: str, summary: RunSummary, run: RunDirectory, *, is_stopped: bool
    ) -> None:
        """Show what a run has come to, below its live view, and how to resume one that was stopped."""
        self._stack.close()
        self.say(line)
        if summary.privacy:
            self._show_privacy(summary.privacy, f"{released}: ")
        self.say(f"run directory: {run.path}")
        if is_stopped:
            self.say(f"to resume: csdctl train --resume {summary.run_id}")
        self._streams.result_line(report_document(summary, str(run.path)))

    def _show_privacy(self, privacy: Privacy, when: str) -> None:
        for line in describe_privacy(privacy):
            self.say(when + line)


def train_point(streams: Streams, point: Point, request: TrainRequest) -> TrainResult:
    """Train one point as `train` does, with its live view. Raises what `train` raises."""
    streams.say(f"{point.kind} scaling, nodes: {point.num_nodes}, global batch {point.plan.global_batch:,}")
    try:
        return TrainingScreen(streams, emulated=request.fleet.emulated).train(request)
    except RunStopped:
        streams.say("the same command trains the points that are missing")
        raise


def show_training_rehearsal(streams: Streams, request: TrainRequest) -> None:
    """Examine the machines and print the plan that `train` would follow. Raises CsdctlError as it does."""
    found = rehearse_training(request, TrainingScreen(streams, emulated=request.fleet.emulated).events)
    if request.batch_size:
        path = "none: --batch-size"
    else:
        plan_path = request.plan_path or streams.project.plan(request.job.name)
        path = str(found.run.manifest if found.run else plan_path)
    render_plan(streams.console, found.plan, path)
    behind = f" after {found.cut}" if found.cut else ""
    streams.say(f"would train: {found.strategy}{behind}")
    if found.run:
        streams.say(f"would resume run {found.run.run_id}")
    if found.num_samples is None:
        streams.say("the data of this job has not been prepared yet")
    else:
        streams.say(f"{found.num_samples:,} samples when this job was last prepared")
    streams.say("dry run: nothing was prepared or trained")
    document = {
        "schema": "csdctl.train.dry-run/1",
        "resume": found.run.run_id if found.run else None,
        "strategy": found.strategy,
        "cut": found.cut,
        "num_samples": found.num_samples,
        "plan": plan_document(found.plan, path),
    }
    streams.result(document)
