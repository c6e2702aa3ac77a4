"""What a terminal, or a reader of JSON lines, sees of a training."""

from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType

from csdctl.cli.render.live import TrainingView
from csdctl.cli.render.numbers import format_accuracy, format_bytes, format_rate, format_share
from csdctl.cli.render.privacy import format_epsilon
from csdctl.cli.render.report import report_document
from csdctl.cli.render.shards import format_shards
from csdctl.cli.streams import Streams
from csdctl.fleet.checks import Status, fold
from csdctl.reporting.differential_privacy import Privacy, plan_privacy
from csdctl.reporting.summary import RunSummary
from csdctl.runs.directory import RunDirectory
from csdctl.shipping.deliver import Delivery
from csdctl.worker.protocol.events import Event
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.preflight.doctor import Examination, describe
from csdctl.workflows.train.train import RunObserver, RunStopped


def show_preflight(streams: Streams, examination: Examination) -> None:
    """A line for each amber check and one for the hello; raises when something is red."""
    for check, machines in fold(examination.checks):
        if check.status == Status.WARN:
            streams.say(f"amber: {', '.join(machines)}: {describe(check)}")
            if check.remedy:
                streams.say(f"  → {check.remedy}")
    examination.check_before_training()
    for check in examination.checks:
        if check.check == "mpi":
            streams.say(f"preflight: {check.found}")


class TrainingScreen:
    """Shows one training; the live view opens when the ranks start."""

    def __init__(self, streams: Streams, *, emulated: bool) -> None:
        self._streams = streams
        self._emulated = emulated
        self._stack = ExitStack()
        self._view: TrainingView | None = None
        self._run: RunDirectory | None = None

    def __enter__(self) -> "TrainingScreen":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def watcher(self) -> RunObserver:
        """The callbacks that `train` calls."""
        return RunObserver(self._started, self._delivered, self._event)

    def finish(self, summary: RunSummary) -> None:
        """What came out in two lines; the whole is what `csdctl report` shows."""
        self._stack.close()
        path = self._path()
        efficiency = (
            "" if summary.efficiency is None else f" ({format_share(summary.efficiency)} of the ranks alone)"
        )
        self._streams.say(
            f"done: {format_rate(summary.samples_per_s)} samples/s{efficiency}, "
            f"validation accuracy {format_accuracy(summary.validation_accuracy)}; `csdctl report` shows more"
        )
        if summary.privacy:
            self._say_privacy(summary.privacy, "released: ")
        self._streams.say(f"run directory: {path}")
        self._streams.result_line(report_document(summary, path))

    def stopped(self, stopped: RunStopped) -> None:
        """The run was asked to stop: what is kept, and how to go on."""
        self._stack.close()
        self._streams.say("stopped; the state of the last completed step is kept")
        if stopped.summary.privacy:
            self._say_privacy(stopped.summary.privacy, "released so far: ")
        self._streams.say(f"run directory: {self._path()}")
        self._streams.say(f"to go on: csdctl train --resume {stopped.run_id}")
        self._streams.result_line(report_document(stopped.summary, self._path()))

    def _path(self) -> str:
        assert self._run is not None
        return str(self._run.path)

    def _started(self, run: RunDirectory, spec: RunSpec, steps_per_epoch: int) -> None:
        self._run = run
        self._streams.result_line({"schema": "csdctl.train/1", "run": run.run_id, "path": str(run.path)})
        self._streams.say(f"run {run.run_id}: {len(spec.ranks)} ranks, {steps_per_epoch} steps an epoch")
        for line in format_shards(spec):
            self._streams.say(line)
        events = (event for _, event in run.read_events()) if run.events.exists() else ()
        if planned := plan_privacy(spec, events):
            self._say_privacy(planned, f"after {spec.recipe.epochs} epochs, if nothing is lost, ")
        self._view = self._stack.enter_context(
            TrainingView(self._streams.console, spec, steps_per_epoch, emulated=self._emulated)
        )

    def _say_privacy(self, privacy: Privacy, when: str) -> None:
        for line in format_epsilon(privacy):
            self._streams.say(when + line)

    def _delivered(self, node: str, delivery: Delivery) -> None:
        if delivery.num_sent:
            self._streams.say(f"{node}: {delivery.num_sent} files sent ({format_bytes(delivery.bytes_sent)})")

    def _event(self, event: Event) -> None:
        self._streams.result_line({"event": type(event).__name__, **asdict(event)})
        if self._view:
            self._view.show(event)
