"""The output of `csdctl train`: messages, preflight, progress of preparing, live view."""

from contextlib import ExitStack
from types import TracebackType

from csdctl.cli.render.live import TrainingView
from csdctl.cli.render.preparing import PreparationScreen
from csdctl.cli.render.privacy import format_epsilon
from csdctl.cli.render.report import REACHABLE, report_document
from csdctl.cli.render.shards import format_shards
from csdctl.cli.streams import Streams
from csdctl.fleet.checks import Status, fold
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_bytes, format_loss, format_metrics, format_rate, format_share
from csdctl.reporting.privacy import Privacy, plan_privacy
from csdctl.runs.directory import RunDirectory
from csdctl.shipping.deliver import Delivery
from csdctl.worker.protocol.events import Event, event_document
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.preflight.doctor import Examination, describe
from csdctl.workflows.train.run import RunStopped
from csdctl.workflows.train.train import TrainResult


class TrainingScreen(PreparationScreen):
    """Shows one `csdctl train`; a context manager that closes the live view, which opens with the run."""

    def __init__(self, streams: Streams, *, emulated: bool) -> None:
        super().__init__(streams)
        self._emulated = emulated
        self._stack = ExitStack()
        self._view: TrainingView | None = None
        self.run: RunDirectory | None = None
        """The run, once it is there."""

    def __enter__(self) -> "TrainingScreen":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def on_preflight(self, examination: Examination) -> None:
        """Show a line for each amber check, and the MPI check unless something is red."""
        for check, machines in fold(examination.checks):
            if check.status == Status.WARN:
                self.say(f"amber: {format_node_names(machines)}: {describe(check)}")
                if check.remedy:
                    self.say(f"  → {check.remedy}")
        if examination.red or examination.overdue:
            return
        for check in examination.checks:
            if check.check == "allreduce":
                self.say(f"preflight: {check.found}")

    def on_start(self, run: RunDirectory, spec: RunSpec, num_steps: int) -> None:
        """Show the run and its shards, and open the live view."""
        self.run = run
        self._streams.result_line({"schema": "csdctl.train/1", "run": run.run_id, "path": str(run.path)})
        self.say(f"run {run.run_id}: {len(spec.ranks)} ranks, {num_steps} steps per epoch")
        for line in format_shards(spec):
            self.say(line)
        events = run.read_events([rank.node for rank in spec.ranks]) if run.events.exists() else ()
        if planned := plan_privacy(spec, events):
            self._show_privacy(planned, f"after {spec.recipe.epochs} epochs, if nothing is lost, ")
        self._view = self._stack.enter_context(
            TrainingView(self._streams.views, spec, num_steps, emulated=self._emulated)
        )

    def on_delivery(self, node: str, delivery: Delivery) -> None:
        """Show what was sent to a node."""
        if delivery.num_sent:
            self.say(f"{node}: {delivery.num_sent} files sent ({format_bytes(delivery.bytes_sent)})")

    def on_event(self, event: Event) -> None:
        """Show one event."""
        self._streams.result_line(event_document(event))
        if self._view:
            self._view.show(event)

    def finish(self, result: TrainResult) -> None:
        """Show the results in a few lines; `csdctl report` shows all of them."""
        self._stack.close()
        summary, path = result.summary, str(result.directory.path)
        if result.was_complete:
            self.say(f"run {summary.run_id} is complete: nothing to resume")
            self._streams.result_line(report_document(summary, path))
            return
        efficiency = (
            ""
            if summary.efficiency is None or summary.strategy not in REACHABLE
            else f" ({format_share(summary.efficiency)} of what {REACHABLE[summary.strategy]})"
        )
        validation = format_metrics(summary.validation_accuracy, summary.validation_metrics)
        reached = validation.replace(", ", ", validation ", 1) or f", loss {format_loss(summary.loss)}"
        self.say(
            f"done: {format_rate(summary.samples_per_s)} samples/s{efficiency}{reached}; "
            "`csdctl report` shows more"
        )
        if summary.privacy:
            self._show_privacy(summary.privacy, "released: ")
        self.say(f"run directory: {path}")
        if summary.state == "stopped":  # by a callback
            self._say_resume(summary.run_id)
        self._streams.result_line(report_document(summary, path))

    def stopped(self, stopped: RunStopped) -> None:
        """Show that the run has stopped, and how to resume it."""
        self._stack.close()
        assert self.run is not None
        self.say("stopped; the state of the last completed step is kept")
        if stopped.summary.privacy:
            self._show_privacy(stopped.summary.privacy, "released so far: ")
        self.say(f"run directory: {self.run.path}")
        self._say_resume(stopped.run_id)
        self._streams.result_line(report_document(stopped.summary, str(self.run.path)))

    def _say_resume(self, run_id: str) -> None:
        self.say(f"to resume: csdctl train --resume {run_id}")

    def _show_privacy(self, privacy: Privacy, when: str) -> None:
        for line in format_epsilon(privacy):
            self.say(when + line)
