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
from csdctl.reporting.tally import Amounts
from csdctl.runs.directory import RunDirectory
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.prepare import PreparationScreen
from csdctl.terminal.streams import Streams, document
from csdctl.terminal.tune import plan_document, render_plan
from csdctl.terminal.view import (
    STARTING,
    TRAINING,
    RankRow,
    View,
    choose_rows,
    describe_hidden,
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
from csdctl.workflows.preflight.examination import Examination, describe
from csdctl.workflows.preflight.links import judge_sandbox
from csdctl.workflows.train.request import TrainRequest
from csdctl.workflows.train.run import RunStopped
from csdctl.workflows.train.scale import Point
from csdctl.workflows.train.train import TrainResult, rehearse_training, run_training
from csdctl.workflows.workspace.event_stream import RunStarted

INTERVAL_S, INTERVAL_SHARE = 5.0, 1 / 64
"""Minimum interval between two searches for a bottleneck, and the same as a share of the run so far. The
figures of a long run change slowly, and a new watcher reads all of its events."""
SILENCE_S = 10.0
"""From this many seconds without a step on, the view says so."""
WIDE = 100
"""Columns of a terminal from which on rows have more values."""


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
    limited = "recipe.max_learning_rate" if limit is None else f"{limit:g}"
    return f"learning rate {rate:.2g} ({reason}; limit: {limited})"


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
        self._spec, self._steps_per_epoch, self._clock = spec, steps_per_epoch, clock
        self._title = f"run {spec.run_id}" + (" (emulated fleet)" if emulated else "")
        self._rows = {rank.rank: RankRow(rank.node, rank.batch_size) for rank in spec.ranks}
        self._series = SeriesBuilder([rank.node for rank in spec.ranks])
        self._tally = self._series.tally
        for event in past:
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
        if isinstance(event, Joined | Rebalanced):
            for rank, row in self._rows.items():
                row.batch_size = event.batch_sizes.get(str(rank), 0)
                # Of a rank that was lost, its return is reported.
                if isinstance(event, Joined) and str(rank) in event.batch_sizes and not row.is_sick:
                    row.state = TRAINING
        if isinstance(event, Joined):
            self._steps_per_epoch = max(1, event.steps_per_epoch)
        elif isinstance(event, Progress | EpochEnd):
            self._show_totals(event)
        elif isinstance(event, Evaluating):
            self._evaluating = f"evaluating {event.num_done:,}/{event.num_samples:,} samples  "
            self._step_at = now
        if line := self._format_event(event, num_steps):
            self._print(line)

    def _find_bottleneck(self, now: float) -> None:
        """Look for whom the others wait now and then. Without a terminal, print what has changed."""
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
        """Return whom the others have lately waited for, as a line. Nothing where they did not wait."""
        bottleneck = self._bottleneck
        if bottleneck is None or bottleneck.rank is None:
            return f"link: {bottleneck.why}" if bottleneck else ""
        node, lost_s = self._spec.ranks[bottleneck.rank].node, format_seconds(bottleneck.lost_s)
        return f"others waited {lost_s} for {node} ({bottleneck.cause}): {bottleneck.why}"

    def _format_event(self, event: Event, num_steps: int) -> str:
        """Return what is printed about an event besides progress. `num_steps`: steps of the run before it."""
        if isinstance(event, Joined):
            return self._format_joined(event, num_steps)
        if isinstance(event, Rebalanced):
            sizes = [f"{self._spec.ranks[int(rank)].node} {size}" for rank, size in event.batch_sizes.items()]
            return (
                f"{event.slowest} took {event.slowdown:.2f} times as long as a balanced step; "
                f"batch sizes from step {event.step + 1} of epoch {event.epoch}: {', '.join(sizes)}"
            )
        if isinstance(event, WaitingFor) and event.nodes:
            return f"waiting for {format_node_names(event.nodes)}"
        if isinstance(event, Warned | NodeLost):
            what = f"{event.node} is lost" if isinstance(event, NodeLost) else f"warning: {event.node}"
            return f"{what}: {event.message}" + f"\n  → {event.remedy}" * bool(event.remedy)
        if isinstance(event, NodeBack):
            return f"{event.node} is back"
        if isinstance(event, Finished) and event.rank == 0 and event.reason == EARLY_STOPPING:
            return f"stopped early, after epoch {event.epochs}"
        if isinstance(event, CheckpointSaved) and self._live is None:
            return f"checkpoint {event.path}"
        return ""

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
        """Show what a rank has done. A short epoch has only its end."""
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
        """Return the steps that are done, and the steps of all epochs."""
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
    """Return the columns after node and state, for a terminal of `width`."""
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
    """Return the line of an epoch that has ended. `reports`: all of rank 0 in it."""
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
            self._streams.result_line(document("csdctl.report/1", summary, path=str(run.path)))
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
        self._streams.result_line(document("csdctl.train/1", run=run.run_id, path=str(run.path)))
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
        self._streams.result_line(document("csdctl.report/1", summary, path=str(run.path)))

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
    rehearsal = rehearse_training(request, TrainingScreen(streams, emulated=request.fleet.emulated).events)
    if request.batch_size:
        path = "none: --batch-size"
    else:
        plan_path = request.plan_path or streams.project.plan(request.job.name)
        path = str(rehearsal.run.manifest if rehearsal.run else plan_path)
    render_plan(streams.console, rehearsal.plan, path)
    streams.say(f"would train: {rehearsal.strategy}" + (f" after {rehearsal.cut}" if rehearsal.cut else ""))
    if rehearsal.run:
        streams.say(f"would resume run {rehearsal.run.run_id}")
    if rehearsal.num_samples is None:
        streams.say("the data of this job has not been prepared yet")
    else:
        streams.say(f"{rehearsal.num_samples:,} samples when this job was last prepared")
    streams.say("dry run: nothing was prepared or trained")
    content = document(
        "csdctl.train.dry-run/1",
        resume=rehearsal.run.run_id if rehearsal.run else None,
        strategy=rehearsal.strategy,
        cut=rehearsal.cut,
        num_samples=rehearsal.num_samples,
        plan=plan_document(rehearsal.plan, path),
    )
    streams.result(content)
