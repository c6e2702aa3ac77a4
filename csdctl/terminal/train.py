"""A training: messages, checks before it, progress of preparing, and what it has come to."""

from collections.abc import Sequence
from contextlib import ExitStack

from csdctl.fleet.checks import Check, Status, fold
from csdctl.reporting.numbers import format_count, format_range
from csdctl.reporting.privacy import Privacy, describe_privacy, plan_privacy
from csdctl.reporting.results import STOPPED, RunSummary
from csdctl.reporting.tables import describe_result
from csdctl.runs.directory import RunDirectory
from csdctl.terminal.prepare import PreparationScreen
from csdctl.terminal.run_view import TrainingView
from csdctl.terminal.streams import Streams, document
from csdctl.terminal.tune import plan_document, render_plan
from csdctl.worker.protocol.events import Event, Ready, event_document
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.preflight.examination import Examination, describe
from csdctl.workflows.preflight.links import judge_sandbox
from csdctl.workflows.train.request import TrainRequest
from csdctl.workflows.train.run import RunStopped
from csdctl.workflows.train.scale import SeriesPoint
from csdctl.workflows.train.train import TrainResult, rehearse_training, run_training
from csdctl.workflows.workspace.event_stream import RunStarted


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


class TrainingScreen(PreparationScreen):
    """Shows one `csdctl train`. The live view opens with the run."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        streams.console.outlives_its_reader = True  # a run ends as the user says
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
        if damaged := [*summary.missing_models, *[run.events.name][: summary.num_breaks]]:
            self.say(f"warning: not as csdctl wrote them: {', '.join(damaged)}; `csdctl report` says more")
        if result.was_complete:
            self.say(f"run {summary.run_id} is complete: nothing to resume")
            self._streams.result_line(document("csdctl.report/1", summary, path=str(run.path)))
        else:  # a callback may have stopped it
            line = f"{describe_result(summary)}; `csdctl report` shows more"
            self._show_end(line, "released", summary, run, is_stopped=summary.state == STOPPED)
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
        run, spec, num_steps = started.run, started.spec, started.steps_per_epoch
        self.run = run
        self._streams.result_line(document("csdctl.train/1", run=run.run_id, path=str(run.path)))
        self.say(f"run {run.run_id}: {format_count(spec.ranks, 'rank')}, {num_steps:,} steps per epoch")
        if rates := started.predicted_range:
            self.say(f"9 of 10 such runs are expected to reach {format_range(rates)} samples/s")
        for line in filter(None, (*describe_repeats(spec), describe_learning_rate(spec))):
            self.say(line)
        if planned := plan_privacy(spec, started.past):
            self._show_privacy(planned, f"after {spec.recipe.epochs} epochs, if nothing is lost, ")
        self._view = self._stack.enter_context(TrainingView(self._streams.views, started))

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


def train_point(streams: Streams, point: SeriesPoint, request: TrainRequest) -> TrainResult:
    """Train one point as `train` does, with its live view. Raises what `train` raises."""
    streams.say(f"{point.kind} scaling, nodes: {point.num_nodes}, global batch {point.plan.global_batch:,}")
    try:
        return TrainingScreen(streams).train(request)
    except RunStopped:
        streams.say("the same command trains the points that are missing")
        raise


def show_training_rehearsal(streams: Streams, request: TrainRequest) -> None:
    """Examine the machines and print the plan that `train` would follow. Raises CsdctlError as it does."""
    rehearsal = rehearse_training(request, TrainingScreen(streams).events)
    strategy, cut = rehearsal.strategy.name, rehearsal.strategy.cut
    if request.batch_size:
        path = "none: --batch-size"
    else:
        plan_path = request.plan_path or streams.project.plan(request.job.name)
        path = str(rehearsal.run.manifest if rehearsal.run else plan_path)
    render_plan(streams.console, rehearsal.plan, path)
    streams.say(f"would train: {strategy}" + (f" after {cut}" if cut else ""))
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
        strategy=strategy,
        cut=cut,
        num_samples=rehearsal.num_samples,
        plan=plan_document(rehearsal.plan, path),
    )
    streams.result(content)
