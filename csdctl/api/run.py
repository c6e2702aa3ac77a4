"""Tuning and training from Python, and a run's results."""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csdctl.api.job import Job
from csdctl.cli.render.training import TrainingScreen
from csdctl.cli.render.tuning import TuningScreen
from csdctl.cli.streams import Streams
from csdctl.fleet.model import Fleet
from csdctl.reporting.summary import RunSummary, summarize_run
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.private import STATE_DIRECTORY, check_private
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.events import EpochEnd
from csdctl.workflows.train.options import TrainOptions
from csdctl.workflows.train.session import TrainRequest, run_training
from csdctl.workflows.tune.options import TuneOptions
from csdctl.workflows.tune.tune import tune_job
from csdctl.workflows.workspace.partial_failure import choose_fleet


@dataclass(frozen=True)
class Run:
    """One training run."""

    directory: RunDirectory

    @property
    def id(self) -> str:
        """The run's id, as in `csdctl report ID`."""
        return self.directory.run_id

    @property
    def history(self) -> dict[str, list[float]]:
        """Loss and metrics of each epoch by name, as Keras' `History.history`: loss, accuracy, val_loss, …"""
        history: dict[str, list[float]] = defaultdict(list)
        nodes = [rank["node"] for rank in self.directory.load_manifest()["plan"]["ranks"]]
        for event in self.directory.read_events(nodes):
            if isinstance(event, EpochEnd) and event.rank == 0:
                found: dict[str, Any] = {"loss": event.loss, **event.metrics}
                found["val_loss"] = event.validation_loss
                found |= {f"val_{name}": value for name, value in event.validation_metrics.items()}
                for name, value in found.items():
                    if value is not None:
                        history[name].append(value)
        return dict(history)

    def model(self, custom_objects: dict[str, Any] | None = None) -> Any:
        """Return the trained model, compiled; `custom_objects` as keras.models.load_model takes them."""
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import keras

        return keras.models.load_model(self.directory.model, custom_objects=custom_objects)

    def report(self) -> RunSummary:
        """Return the results that `csdctl report` shows."""
        return summarize_run(self.directory)


def tune(job: Job, fleet: Fleet | str | Path = "fleet.yaml", options: TuneOptions | None = None) -> Plan:
    """Measure the machines of `fleet`, save the plan with the highest throughput, and return it.

    Raises CsdctlError; its text says what to do.
    """
    with _session(job) as streams:
        saved = tune_job(
            job.load(), _load(fleet), streams.directory, options or TuneOptions(), TuningScreen(streams)
        )
        return saved.plan


def train(
    job: Job,
    fleet: Fleet | str | Path = "fleet.yaml",
    *,
    batch_size: int | None = None,
    resume: str | None = None,
    options: TrainOptions | None = None,
) -> Run:
    """Train `job` on `fleet` and return the run; without a plan and without `batch_size`, tune before.

    Files are written below `.csdctl` in the job's directory. Raises CsdctlError, and RunStopped when it is
    interrupted; the state of the last step is kept, and `resume` (an id, or "latest") continues from it.
    """
    loaded, chosen = job.load(), _load(fleet)
    with _session(job) as streams:
        project = ProjectDirectory(streams.directory)
        if batch_size is None and resume is None and not project.plan(loaded.name).exists():
            tune_job(loaded, chosen, streams.directory, TuneOptions(), TuningScreen(streams))
        request = TrainRequest(
            loaded, chosen, streams.directory, options or TrainOptions(), None, batch_size, resume
        )
        with TrainingScreen(streams, emulated=chosen.emulated) as screen:
            result = run_training(request, screen)
            screen.finish(result)
    return Run(result.directory)


@contextmanager
def _session(job: Job) -> Iterator[Streams]:
    """Work in the job's directory, with files for this user alone."""
    directory = job.path.parent.resolve()
    before = os.umask(0o077)
    try:
        check_private(directory / STATE_DIRECTORY)
        yield Streams(directory=directory)
    finally:
        os.umask(before)


def _load(fleet: Fleet | str | Path) -> Fleet:
    return fleet if isinstance(fleet, Fleet) else choose_fleet(Path(fleet))
