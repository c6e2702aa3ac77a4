"""What comes before training, training from Python, and a run's results and trained model."""

import importlib
import json
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from csdctl.api.fleet import FleetOrPath, as_fleet, open_session
from csdctl.api.job import Job
from csdctl.api.options import TrainOptions, TuneOptions
from csdctl.errors import InputError, RunError
from csdctl.reporting.results import RunSummary, read_results
from csdctl.runs.directory import LATEST, ProjectDirectory, RunDirectory
from csdctl.supervision.event_callbacks import Callback
from csdctl.terminal.fleet import DiscoverView, render_fleet
from csdctl.terminal.prepare import PreparationScreen, PreparingView, render_prepared
from csdctl.terminal.report import report_of
from csdctl.terminal.train import TrainingScreen
from csdctl.terminal.tune import TuningScreen, render_plan, render_verified
from csdctl.terminal.view import render_bundle
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.datasets import as_inputs
from csdctl.worker.protocol.events import EpochEnd
from csdctl.worker.protocol.json_codec import ProtocolError, from_dict
from csdctl.worker.protocol.model_info import BUILDER, BuildSpec
from csdctl.workflows.data.prepare import Prepared, prepare_fleet
from csdctl.workflows.discovery.discover import DiscoverResult
from csdctl.workflows.discovery.discover import discover as discover_machines
from csdctl.workflows.train.train import TrainRequest
from csdctl.workflows.train.verify import Verification, judge, run_verification
from csdctl.workflows.tune.tune import tune_job


def load_model(path: Path, run: RunDirectory, custom_objects: dict[str, Any] | None, remedy: str) -> Any:
    """Return the model of `run` in `path`, a .keras file, or in the .weights.h5 file in its place.

    Raises InputError, with `remedy` when there is neither, or when the model cannot be built again.
    """
    weights = path.with_suffix(".weights.h5")
    if not path.exists() and not weights.exists():
        raise InputError(f"run {run.run_id} has no {path.name}", remedy=remedy)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras

    if path.exists():
        return keras.models.load_model(path, custom_objects=custom_objects)
    try:
        spec = _find_builder(run)
        model = _build(spec)
        model.load_weights(weights)
    except Exception as error:  # of any kind: the user's code
        raise InputError(
            f"run {run.run_id} has only weights, and its model cannot be built again: {error}",
            remedy=f"build the model as the job did, and call model.load_weights({str(weights)!r})",
        ) from error
    return model


def _find_builder(run: RunDirectory) -> BuildSpec:
    """Return how the ranks built the model; raises OSError, ValueError or ProtocolError."""
    project = run.path.parents[2]
    architecture = json.loads(run.spec.read_text())["architecture"]
    content = json.loads((project / architecture).read_text())
    if BUILDER not in content:
        raise ProtocolError("no function built it")
    spec: BuildSpec = from_dict(BuildSpec, content[BUILDER])
    return spec


def _build(spec: BuildSpec) -> Any:
    """Return the model of the user's function, with all its weights; raises whatever that raises."""
    file, _, name = spec.reference.rpartition(":")
    model = getattr(_import_file(Path(file)), name)(**spec.arguments)
    if spec.sample_shapes:  # a subclassed model has its weights once it is called
        samples = {name: np.zeros((2, *shape), dtype) for name, (dtype, shape) in spec.sample_shapes.items()}
        model(as_inputs(samples))
    return model


def _import_file(path: Path) -> Any:
    """Import the user's file with the modules beside it; once, so that its classes stay the same."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or ".").resolve() == path.resolve():
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    if loaded is None:
        return importlib.import_module(path.stem)
    return SimpleNamespace(**runpy.run_path(str(path)))  # beside a library of that name


def discover(fleet: FleetOrPath = "fleet.yaml") -> DiscoverResult:
    """Collect the hardware and software of all machines, show and save it.

    `.facts` of the result has it by machine, `.failed` the errors of the machines that could not be reached;
    they are not raised.
    """
    chosen = as_fleet(fleet)
    with open_session() as streams:
        with DiscoverView(streams.console, len(chosen.machines)) as view:
            result = discover_machines(chosen, directory=streams.directory, on_done=view.take)
        render_fleet(streams.console, result, verbose=False)
    return result


def prepare(job: Job, fleet: FleetOrPath = "fleet.yaml") -> Prepared:
    """Convert model and data of `job` where they lie, and compare with its hashes what was prepared before.

    `tune`, `train` and `verify` prepare what is missing by themselves. Raises InputError when model and data
    do not fit together.
    """
    loaded, chosen = job.load(), as_fleet(fleet)
    with open_session() as streams:
        with PreparingView(streams.views) as view:
            prepared = prepare_fleet(
                loaded,
                chosen,
                directory=streams.directory,
                say=streams.say,
                on_progress=view.show,
            )
        render_prepared(streams.console, prepared)
    return prepared


def tune(job: Job, fleet: FleetOrPath = "fleet.yaml", options: TuneOptions | None = None) -> Plan:
    """Measure the machines of `fleet`, save the plan with the highest throughput, and return it."""
    loaded, chosen = job.load(), as_fleet(fleet)
    with open_session() as streams:
        screen = TuningScreen(streams)
        plan = tune_job(loaded, chosen, streams.directory, options or TuneOptions(), screen)
        path = streams.project.plan(loaded.name)
        render_plan(streams.console, plan, str(path.relative_to(streams.directory)))
    return plan


def verify(job: Job, fleet: FleetOrPath = "fleet.yaml") -> Verification:
    """Compare the gradient of all ranks with that of one process, and show how far apart they are.

    Raises RunError when they differ by more than rounding explains.
    """
    loaded, chosen = job.load(), as_fleet(fleet)
    with open_session() as streams:
        request = TrainRequest(loaded, chosen, streams.directory, TrainOptions())
        found = run_verification(request, PreparationScreen(streams))
        verdict = judge(found.result, found.nodes)
        render_verified(streams.console, found.result, verdict, found.nodes, emulated=chosen.emulated)
    found.check_features()
    if not verdict.is_equal:
        raise RunError(verdict.text, remedy=verdict.remedy)
    return found


REPORT_COLUMNS = 110


@dataclass(frozen=True)
class Run:
    """One training run. A notebook shows it as the report of `csdctl report`."""

    directory: RunDirectory

    @property
    def id(self) -> str:
        """The run's id, as in `csdctl report ID`."""
        return self.directory.run_id

    @property
    def history(self) -> dict[str, list[float]]:
        """Loss and metrics of each epoch by name, as Keras' `History.history`: loss, accuracy, val_loss, …"""
        nodes = [rank["node"] for rank in self.directory.load_manifest()["plan"]["ranks"]]
        epochs = {  # a resumed run may repeat an epoch
            event.epoch: event
            for event in self.directory.read_events(nodes)
            if isinstance(event, EpochEnd) and event.rank == 0
        }
        history: dict[str, list[float]] = defaultdict(list)
        for _, event in sorted(epochs.items()):
            found: dict[str, Any] = {"loss": event.loss, **event.metrics}
            found["val_loss"] = event.validation_loss
            found |= {f"val_{name}": value for name, value in event.validation_metrics.items()}
            for name, value in found.items():
                if value is not None:
                    history[name].append(value)
        return dict(history)

    def model(self, custom_objects: dict[str, Any] | None = None, *, best: bool = False) -> Any:
        """Return the trained model, compiled; `custom_objects` as keras.models.load_model takes them.

        A model that Keras could not save is built by the job's function, from its file as it is now, and
        gets the weights of the run. `best`: the model of the best epoch, by validation loss or by what early
        stopping monitors; only runs with validation data have it. Raises InputError when the run has no such
        model, or when it cannot be built again.
        """
        path = self.directory.best_model if best else self.directory.model
        remedy = "give the job validation data" if best else "resume it: csdctl.train(…, resume=ID)"
        return load_model(path, self.directory, custom_objects, remedy)

    def report(self) -> RunSummary:
        """Return the results that `csdctl report` shows."""
        return read_results(self.directory).summary

    def _repr_html_(self) -> str:
        return render_bundle(report_of(read_results(self.directory)), REPORT_COLUMNS)["text/html"]


def load_run(run_id: str = LATEST, directory: str | Path = ".") -> Run:
    """Return a run by its id, or the latest one, of the `.csdctl` in `directory`.

    Raises InputError for a run that does not exist.
    """
    project = ProjectDirectory(Path(directory).absolute())
    return Run(project.find_run(run_id))


def train(
    job: Job,
    fleet: FleetOrPath = "fleet.yaml",
    *,
    batch_size: int | None = None,
    resume: str | None = None,
    callbacks: Sequence[Callback] = (),
    options: TrainOptions | None = None,
) -> Run:
    """Train `job` on `fleet` and return the run; without a plan and without `batch_size`, tune before.

    `batch_size`: of every rank, in place of a plan. `resume`: the id of a run to continue, or "latest".
    `callbacks`: functions that get every event of the run as a dict, each in a thread of its own; one that
    returns `csdctl.STOP` ends the run in order, and `train` returns it.

    Raises CsdctlError, and RunStopped, which is a KeyboardInterrupt, when it is interrupted: the ranks finish
    their step, model and state are saved, and `resume` continues from there.
    """
    loaded, chosen = job.load(), as_fleet(fleet)
    chosen_options = options or TrainOptions()
    chosen_options = replace(chosen_options, callbacks=(*chosen_options.callbacks, *callbacks))
    with open_session() as streams:
        has_plan = streams.project.plan(loaded.name).exists()
        if batch_size is None and resume is None and not has_plan:
            tune(job, chosen)
        request = TrainRequest(loaded, chosen, streams.directory, chosen_options, None, batch_size, resume)
        result = TrainingScreen(streams, emulated=chosen.emulated).train(request)
    return Run(result.directory)
