"""The Python interface: the workflows of the command line, for scripts and notebooks.

A function works in the current directory, as the command line does, so that `csdctl report` and the like find
what Python has written, and the other way round. Errors name arguments, not options of the command line.
"""

import importlib
import inspect
import json
import os
import re
import runpy
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import yaml
from pydantic import InstanceOf
from pydantic_core import to_jsonable_python

from csdctl.documents import check_values, load_json
from csdctl.errors import CsdctlError as CsdctlError
from csdctl.errors import InputError
from csdctl.fleet import model as fleets
from csdctl.job import model as jobs
from csdctl.reporting.results import RunSummary
from csdctl.reporting.series import epoch_results
from csdctl.runs.directory import LATEST, ProjectDirectory, RunDirectory, has_model
from csdctl.runs.private import STATE_DIRECTORY, check_private
from csdctl.supervision.event_callbacks import STOP as STOP
from csdctl.supervision.event_callbacks import Callback
from csdctl.supervision.run_setup import Patience as Patience
from csdctl.terminal.fleet import render_fleet
from csdctl.terminal.nodes import CountView
from csdctl.terminal.prepare import PreparationScreen, render_prepared
from csdctl.terminal.streams import Streams
from csdctl.terminal.train import TrainingScreen
from csdctl.terminal.tune import render_plan, show_verified
from csdctl.transport.session import MAX_QUOTED_CHARS
from csdctl.tuning.plan import Plan, load_plan
from csdctl.tuning.search import Limits as Limits
from csdctl.worker.protocol.datasets import INPUT, OUTPUT, as_inputs, is_position, name_of_position
from csdctl.worker.protocol.durable_files import make_directory, replacing, save_text, sync
from csdctl.worker.protocol.events import EpochEnd
from csdctl.worker.protocol.json_codec import BatchSize, ProtocolError, from_dict
from csdctl.worker.protocol.model_info import BUILDER, BuildSpec, find_unsaved
from csdctl.worker.protocol.recipe import EarlyStopping as EarlyStopping
from csdctl.worker.protocol.recipe import ReduceOnPlateau as ReduceOnPlateau
from csdctl.workflows.data.prepare import Prepared, prepare_fleet
from csdctl.workflows.discovery.discover import DiscoverResult
from csdctl.workflows.discovery.discover import discover as discover_machines
from csdctl.workflows.reporting.report import report as report_run
from csdctl.workflows.runs.manage import look_at
from csdctl.workflows.train.plan import find_changes
from csdctl.workflows.train.request import TrainOptions as TrainOptions
from csdctl.workflows.train.request import TrainRequest
from csdctl.workflows.train.run import RunStopped as RunStopped
from csdctl.workflows.train.verify import Verification, run_verification
from csdctl.workflows.tune.tune import TuneOptions as TuneOptions
from csdctl.workflows.tune.tune import tune_job
from csdctl.workflows.workspace.workspace import choose_fleet

if TYPE_CHECKING:
    from csdctl.transport.fabric_group import FleetGroup


LOADER = '''"""Reads the arrays of a job that was made in Python."""

import numpy as np


def _part(arrays, kind):
    names = [name for name in arrays.files if name == kind or name.startswith(kind + "/")]
    if names == [kind]:
        return arrays[kind]
    return {name.partition("/")[2]: arrays[name] for name in names}


def load(path):
    with np.load(path, allow_pickle=False) as arrays:
        parts = [_part(arrays, kind) for kind in ("x", "y", "w")]
    parts = [part for part in parts if len(part)]
    return tuple(parts) if len(parts) > 1 else parts[0]
'''
KINDS = ("x", "y", "w")
POSITIONS = {"x": INPUT, "y": OUTPUT}
FROM_MODEL = "# Written by csdctl.Job.from_model.\n"
FIT_ARGUMENTS = {
    "validation_data": "use validation=(x, y)",
    "batch_size": "pass it to csdctl.train",
    "validation_split": "divide the arrays: (x[:n], y[:n]) as data, validation=(x[n:], y[n:])",
    "callbacks": "use early_stopping=csdctl.EarlyStopping(); functions: csdctl.train(callbacks=…)",
}
"""Arguments of Keras' fit that from_model does not have, and what to do instead."""


class Fleet(fleets.Fleet):
    """The host and its nodes, as written in fleet.yaml.

    `nodes` have `name`, `address`, `port`, `user`, `key`, `python`, `groups` and `jump`. `machines` are all
    names, the host first. `node(name)` returns one node. `network`, `emulated` and `path` describe
    the file.
    """

    def connections(
        self, *, command_deadline_s: float | None = 600.0, connect_deadline_s: float = 10.0
    ) -> "FleetGroup":
        """Return a Fabric ThreadingGroup of the nodes. Use it as a context manager.

        Connections open when they are first used, with the addresses, keys, jump hosts and accepted host keys
        of csdctl. A command is ended, with its processes, after `command_deadline_s` seconds unless
        `run(…, timeout=…)` says otherwise. An output is kept up to 1 MiB.
        """
        from csdctl.transport.fabric_group import open_group

        return open_group(
            self,
            directory=Path.cwd(),
            connect_deadline_s=connect_deadline_s,
            command_deadline_s=command_deadline_s,
        )


FleetOrPath = fleets.Fleet | str | Path


@contextmanager
def open_session() -> Iterator[Streams]:
    """Work in the current directory, with files for only this user."""
    before = os.umask(0o077)
    try:
        # Not by the arguments of a user's program.
        streams = Streams()
        check_private(streams.directory / STATE_DIRECTORY)
        yield streams
    finally:
        os.umask(before)


def as_job(job: "JobOrPath") -> "Job":
    """Return a job, loaded if it is a path. Raises InputError."""
    if not isinstance(job, Job | str | Path):
        problem = f"received {type(job).__name__} as job, expected a path or a csdctl.Job"
        raise InputError(problem, remedy="make a job of a model: csdctl.Job.from_model(model, x, y)")
    return job if isinstance(job, Job) else Job(Path(job).expanduser())


def _as_list(value: Any) -> list[Any]:
    """Return the elements of a sequence. A text, a path or a function is one element."""
    return [value] if isinstance(value, str | Path) or callable(value) else list(value)


def as_fleet(fleet: FleetOrPath) -> fleets.Fleet:
    """Return a fleet, loaded if it is a path."""
    return fleet if isinstance(fleet, fleets.Fleet) else load_fleet(fleet)


def load_fleet(
    path: str | Path = "fleet.yaml", *, limit: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Fleet:
    """Return the fleet of fleet.yaml: all its nodes, or those that are selected.

    `limit` and `exclude` are lists of node names, ranges such as "csd[0-7]", or groups. Where a fleet is
    expected, a path does as well. Raises InputError.
    """
    return Fleet(**vars(choose_fleet(Path(path).expanduser(), _as_list(limit), _as_list(exclude))))


@dataclass(frozen=True)
class Job:
    """A training job, read from a job.yaml: `Job("job.yaml")`. Raises InputError when it cannot be used."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        self.load()

    @classmethod
    def from_model(
        cls,
        model: Any,
        data: Any,
        y: Any = None,
        *,
        validation: Any = None,
        directory: str | Path = "csdctl-job",
        code: str | Path | Sequence[str | Path] = (),
        input_range: tuple[float, float] | None = None,
        **recipe: Any,
    ) -> Self:
        """Write model, data and job.yaml to `directory`, and return the job. (model, x, y) is possible, too.

        `model`: a Keras model. Loss, optimizer and metrics of its compile() are used, and its train_step. The
        arguments of its own constructor and compile() must be attributes with the same names. `data` and
        `validation`: x, (x, y) or (x, y, sample_weight), each an array, or a dict, list or tuple of arrays
        for several inputs or outputs. An iterable of such batches, as a tf.data.Dataset, or the path of data
        as job.yaml takes it. All of it is public: for private data, write job.yaml. `directory`: a second job
        needs another one. `code`: files and packages with the model's own layers, losses and metrics.
        `input_range`: scales uint8 arrays. None leaves them as they are. `recipe`: as in job.yaml, such as
        epochs=5 or early_stopping=csdctl.EarlyStopping(patience=3). Without it, one epoch. The learning rate
        is compile()'s, times the global batch size / `reference_batch` (256). Pass the batch size that
        it was chosen for, such as reference_batch=32. The command line takes the job too:
        `csdctl train csdctl-job/job.yaml`.

        Raises InputError when the job cannot be used.
        """
        for key in FIT_ARGUMENTS.keys() & recipe.keys():
            raise InputError(f"from_model has no argument `{key}`", remedy=FIT_ARGUMENTS[key])
        recipe = {"epochs": 1, **{key: _plain(value, key) for key, value in recipe.items()}}
        path = Path(directory).expanduser()
        written = path / "job.yaml"
        if written.exists() and not written.read_text(errors="replace").startswith(FROM_MODEL):
            raise InputError(
                f"{written} exists, and is not of Job.from_model", remedy="use another directory"
            )
        save = getattr(model, "save", None)
        if not callable(save):
            raise InputError(f"received {type(model).__name__} as model, expected a Keras model")
        given = {"train": data if y is None else (data, y), "validation": validation}
        judged = None if "loss" in recipe else model
        parts = {name: _check_data(part, name, judged) for name, part in given.items() if part is not None}
        entries = {name.replace("train", "public"): entry for name, (entry, _) in parts.items()}
        content: dict[str, Any] = {
            "name": path.resolve().name or "job",
            "model": "model.keras",
            "data": {**entries, "input_range": list(input_range) if input_range else None},
            "recipe": recipe,
        }
        files = [Path(file).absolute() for file in _as_list(code)]
        make_directory(path)
        with tempfile.TemporaryDirectory(dir=path) as new:  # nothing is replaced by a job that is refused
            draft = Path(new)
            with _revivable(model):
                save(draft / "model.keras")
                _check_saved(model, draft / "model.keras")
            _check_importable(draft / "model.keras", files)
            config = importlib.import_module("keras").config
            settings = {name: getattr(config, name)() for name in ("floatx", "epsilon", "image_data_format")}
            save_text(draft / "keras.json", json.dumps(settings))
            for name, (_, arrays) in parts.items():
                if arrays:
                    with replacing(draft / f"{name}.npz") as file:
                        np.savez(file, **arrays)  # type: ignore[arg-type]
                    save_text(draft / "data.py", LOADER)
            job = draft / "job.yaml"
            content |= {"code": [str(file) for file in files]} if files else {}
            save_text(job, FROM_MODEL + yaml.safe_dump(content, sort_keys=False))
            try:
                cls(job)
            except InputError as error:  # in terms of the arguments
                message = re.sub(rf"{re.escape(str(job))}(:\d+)?: |recipe\.", "", error.message)
                error.message = message.replace("unknown key", "from_model has no argument")
                error.remedy = error.remedy.replace(f"fix {job}", "change or omit it")
                raise
            if written.exists():
                with open_session() as streams:
                    streams.say(f"the job in {path} is replaced, also that of earlier Job objects")
            for name in sorted(os.listdir(draft), key=job.name.__eq__):  # job.yaml last
                sync(draft / name)
                (draft / name).replace(path / name)
            sync(path)
        return cls(written)

    def load(self) -> jobs.Job:
        """Return the job as the workflows take it. Raises InputError."""
        return jobs.load_job(self.path)


JobOrPath = Job | str | Path


def _check_importable(saved: Path, code: Sequence[Path]) -> None:
    """Raise InputError for a part of the saved model that the program defines itself, and no file."""
    with zipfile.ZipFile(saved) as archive:
        text = archive.read("config.json").decode()
    in_files = [jobs.defined_names(file) for file in jobs.python_files(code)]
    for name in re.findall(r'"(?:class_name|config)": "(\w+)"', text):
        module = getattr(getattr(sys.modules["__main__"], name, None), "__module__", "")
        is_own = module == "__main__" and not any(names is None or name in names for names in in_files)
        if is_own or name == "__lambda__":
            what = name.replace("__lambda__", "a lambda")
            problem = f"{what} of the model is defined in the notebook or script: nodes cannot import it"
            remedy = 'write a function or layer to a file (%%writefile my.py), import it, pass code=["my.py"]'
            raise InputError(problem, remedy=remedy)


def _check_saved(model: Any, saved: Path) -> None:
    """Raise InputError for what was set on variables of the model, which no file has."""
    lost = ""
    with suppress(Exception):  # of code that Keras does not know here, and lambdas
        load = importlib.import_module("keras").models.load_model
        lost = find_unsaved(model, load(saved, compile=False))
    if lost:
        raise InputError(lost, remedy="pass it to the layer, or use job.yaml with `model: FILE.py:FUNCTION`")


@contextmanager
def _revivable(model: Any) -> Iterator[None]:
    """Let `save` write the arguments of constructor and compile() of a class without get_config()."""
    kind, base = type(model), getattr(sys.modules.get("keras"), "Model", None)
    kept: dict[str, Any] = {}
    for method, getter in (("__init__", "get_config"), ("compile", "get_compile_config")):
        if base is None or not isinstance(model, base) or getattr(kind, method) is getattr(base, method):
            continue
        if getattr(kind, getter) is getattr(base, getter):
            of_layers = {"name": model.name, "trainable": model.trainable, "dtype": model.dtype_policy}
            defaults = model.get_compile_config() if method == "compile" else of_layers
            kept[getter] = _arguments(model, method, defaults)
    for getter, arguments in kept.items():
        setattr(model, getter, lambda arguments=arguments: arguments)
    try:
        yield
    finally:
        for getter in kept:
            delattr(model, getter)


def _arguments(model: Any, method: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method: attributes of the model, else the `defaults` that Keras has."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(getattr(model, method)).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            arguments = {**defaults, **arguments}
        elif name in defaults and (not hasattr(model, name) or "metrics" in name):
            arguments[name] = defaults[name]
        elif hasattr(model, name):
            arguments[name] = getattr(model, name)
        else:
            raise InputError(
                f"{method}() of {type(model).__name__} takes {name}, which is not an attribute of the model",
                remedy=f"keep it: self.{name} = {name}; or write job.yaml, with `model: FILE.py:FUNCTION`",
            )
    return arguments


def _plain(value: Any, name: str) -> Any:
    """Return a value of the recipe as YAML can hold it. Raises InputError for objects."""

    def convert(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise InputError(
            f"received {type(value).__name__} as {name}, expected a value of job.yaml",
            remedy="pass loss, optimizer and metrics to model.compile(); csdctl has its own EarlyStopping",
        )

    return to_jsonable_python(value, fallback=convert)


def _check_data(data: Any, name: str, model: Any) -> tuple[dict[str, str], dict[str, np.ndarray[Any, Any]]]:
    """Return an entry of job.yaml, and arrays with which the model has a loss, {} for a path."""
    if isinstance(data, str | Path):
        path = Path(data).expanduser().resolve()
        if not path.exists():
            raise InputError(f"the {name} data {path} does not exist", remedy="pass a path, or arrays")
        return {"path": str(path)}, {}
    arrays = _name_arrays(_collect(data), name)
    _check_loss(model, arrays, name)
    return {"path": f"{name}.npz", "function": "data.py:load"}, arrays


def _check_loss(model: Any, arrays: Mapping[str, np.ndarray[Any, Any]], name: str) -> None:
    """Raise InputError when the model has no loss of the samples with the extreme values of each array.

    A model that is not compiled, or whose own train_step takes the batch, is not judged.
    """
    base = getattr(sys.modules.get("keras"), "Model", None)
    is_plain = base and isinstance(model, base) and type(model).train_step is base.train_step
    if not is_plain or not model.compiled or not model.loss:
        return
    if not any(key[0] == "y" for key in arrays):
        raise InputError(f"the {name} data has no labels, which the loss needs", remedy="pass (x, y)")
    rows: set[int] = set()
    for array in arrays.values():
        rows |= {int(place) * len(array) // array.size for place in (array.argmin(), array.argmax())}
    samples = {
        key: array[sorted(rows)].astype("f4" if array.dtype == "u1" else array.dtype)
        for key, array in arrays.items()
    }
    batch = []
    for kind in KINDS:
        parts = {key.partition("/")[2]: array for key, array in samples.items() if key[0] == kind}
        is_list = all(is_position(part, POSITIONS.get(kind, kind)) for part in parts)
        batch.append(list(parts.values()) if parts and is_list else parts.get("", parts or None))
    try:
        model.test_on_batch(*batch)
    except Exception as error:
        model.test_function = None  # of a first call that failed, Keras can make no second one
        text = re.sub(r"\x1b\[\d*m| \[\[.*", "", " ".join(str(error).partition("Arguments rec")[0].split()))
        reason = text.rpartition("most recent call last): ")[2][-MAX_QUOTED_CHARS:]
        raise InputError(
            f"Keras cannot compute the loss of the {name} data: {reason}",
            remedy="model.evaluate(x, y) must work; fix the data, the model or its loss",
        ) from error
    finally:
        model.reset_metrics()


def _collect(data: Any) -> tuple[Any, ...]:
    """Return (x,), (x, y) or (x, y, sample_weight) of all samples. Batches are joined."""
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return tuple(data)
    if isinstance(data, Mapping) or hasattr(data, "shape"):
        return (data,)
    if not isinstance(data, Iterable):
        raise InputError(
            f"received {type(data).__name__} as data, expected x, (x, y), (x, y, sample_weight), batches "
            "of them, or a path"
        )
    cardinality = getattr(data, "cardinality", None)  # of a tf.data.Dataset; -1: infinite
    if cardinality is not None and int(cardinality()) == -1:
        raise InputError("the data set is infinite", remedy="make it finite: dataset.take(number)")
    batches = [tuple(batch) if isinstance(batch, tuple | list) else (batch,) for batch in data]
    if not batches or len({len(batch) for batch in batches}) != 1 or len(batches[0]) not in (1, 2, 3):
        raise InputError("the data yields no batches of x, (x, y) or (x, y, sample_weight)")
    return tuple(importlib.import_module("keras").tree.map_structure(_join, *batches))


def _join(*parts: Any) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(part) for part in parts]
    if len({array.shape[1:] for array in arrays}) > 1:
        raise InputError("batches have samples of different shapes", remedy="pad all of them to one length")
    if not arrays[0].ndim:
        raise InputError("the data yields single samples, expected batches", remedy="add .batch(32)")
    return np.concatenate(arrays)


def _name_arrays(parts: tuple[Any, ...], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of x, y and w by name. Raises InputError unless they are numbers."""
    values: dict[str, Any] = {}
    for kind, part in zip(KINDS, parts, strict=False):
        if isinstance(part, Mapping):
            values |= {f"{kind}/{key}": value for key, value in part.items()}
        elif isinstance(part, tuple | list) and all(hasattr(value, "shape") for value in part):
            position = POSITIONS.get(kind, kind)
            values |= {f"{kind}/{name_of_position(position, i)}": value for i, value in enumerate(part)}
        elif part is not None:
            values[kind] = part
    arrays = {key: np.asarray(value) for key, value in values.items()}
    types = {key: "masked" if np.ma.is_masked(values[key]) else arrays[key].dtype for key in values}
    if wrong := [
        f"{key} is {kind}" for key, kind in types.items() if getattr(kind, "kind", "") not in [*"buif"]
    ]:
        remedy = "convert it: x.astype(np.float32); labels: y = np.unique(y, return_inverse=True)[1]; "
        remedy += "masked values: x.filled(0)"
        raise InputError(f"the {name} data is not numbers: {', '.join(wrong)}", remedy=remedy)
    lengths = {key: len(array) if array.ndim else 0 for key, array in arrays.items()}
    if not all(lengths.values()):
        raise InputError(f"the {name} data is empty", remedy="pass at least one sample")
    if len(set(lengths.values())) != 1:
        numbers = ", ".join(f"{key} has {length:,}" for key, length in lengths.items())
        problem = f"the {name} data has arrays with different numbers of samples: {numbers}"
        remedy = "make them equal; a tf.data.Dataset without batches needs .batch(32)"
        raise InputError(problem, remedy=remedy)
    return arrays


def _build(run: RunDirectory) -> Any:
    project = run.path.parents[2]
    architecture = load_json(run.spec)["architecture"]
    content = json.loads((project / architecture).read_text())
    if BUILDER not in content:
        raise ProtocolError("no function built it")
    spec: BuildSpec = from_dict(BuildSpec, content[BUILDER])
    file, _, name = spec.reference.rpartition(":")
    model = getattr(_import_file(Path(file)), name)(**spec.arguments)
    if spec.sample_shapes:  # a subclassed model has its weights once it is called
        samples = {name: np.zeros((2, *shape), dtype) for name, (dtype, shape) in spec.sample_shapes.items()}
        model(as_inputs(samples))
    return model


def _import_file(path: Path) -> Any:
    """Import the user's file with the modules beside it. Once, so that its classes stay the same."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or ".").resolve() == path.resolve():
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    if loaded is None:
        return importlib.import_module(path.stem)
    return SimpleNamespace(**runpy.run_path(str(path)))  # beside a library of that name


def discover(fleet: FleetOrPath = "fleet.yaml") -> DiscoverResult:
    """Collect, show and save the hardware and software of all machines: `.facts` and `.failed` by machine.

    Machines that cannot be reached raise nothing.
    """
    chosen = as_fleet(fleet)
    with open_session() as streams:
        with CountView(streams.console, "probing", len(chosen.machines)) as view:
            result = discover_machines(chosen, directory=streams.directory, on_done=view.take)
        render_fleet(streams.console, result, verbose=False)
    return result


def prepare(job: JobOrPath, fleet: FleetOrPath = "fleet.yaml") -> Prepared:
    """Convert model and data of `job` where they are stored. Compare the hashes of what is prepared already.

    `tune`, `train` and `verify` prepare what is missing by themselves. Raises InputError when model and data
    do not fit together.
    """
    loaded, chosen = as_job(job).load(), as_fleet(fleet)
    with open_session() as streams:
        prepared = prepare_fleet(loaded, chosen, streams.directory, PreparationScreen(streams).events)
        render_prepared(streams.console, prepared)
    return prepared


def tune(job: JobOrPath, fleet: FleetOrPath = "fleet.yaml", options: TuneOptions | None = None) -> Plan:
    """Measure the machines of `fleet`, save the plan with the highest throughput, and return it."""
    options = check_values(options or TuneOptions(), InstanceOf[TuneOptions], "options", remedy="")
    loaded, chosen = as_job(job).load(), as_fleet(fleet)
    with open_session() as streams:
        plan = tune_job(loaded, chosen, streams.directory, options, PreparationScreen(streams).events)
        path = streams.project.plan(loaded.name)
        render_plan(streams.console, plan, str(path.relative_to(streams.directory)))
    return plan


def verify(job: JobOrPath, fleet: FleetOrPath = "fleet.yaml") -> Verification:
    """Compare the gradient of all ranks with the gradient of Keras, and show their distance.

    Raises RunError when they differ by more than rounding explains.
    """
    loaded, chosen = as_job(job).load(), as_fleet(fleet)
    with open_session() as streams:
        request = TrainRequest(loaded, chosen, streams.directory, TrainOptions())
        verification = run_verification(request, PreparationScreen(streams).events)
        show_verified(streams, verification, emulated=chosen.emulated)
    verification.check()
    return verification


@dataclass(frozen=True, repr=False)
class Run:
    """One training run. `report` has its figures, as `csdctl report` shows them."""

    directory: RunDirectory

    @property
    def id(self) -> str:
        """The run's id, as in `csdctl report ID`."""
        return self.directory.run_id

    @property
    def history(self) -> dict[str, list[float]]:
        """Loss and metrics of each epoch by name, as Keras' `History.history`: loss, accuracy, val_loss, …"""
        nodes = self.directory.read_manifest().nodes
        epochs = {  # a resumed run may repeat an epoch
            event.epoch: event
            for event in self.directory.read_events(nodes)
            if isinstance(event, EpochEnd) and event.rank == 0
        }
        history: dict[str, list[float]] = defaultdict(list)
        for _, event in sorted(epochs.items()):
            for name, value in epoch_results(event).items():
                history[name].append(value)
        return dict(history)

    def model(self, custom_objects: dict[str, Any] | None = None, *, best: bool = False) -> Any:
        """Return the trained model, compiled. `custom_objects` as keras.models.load_model takes them.

        A model that Keras could not save is built by the job's function, from its file as it is now, and
        gets the weights of the run. `best`: the model of the best epoch, by validation loss or by what early
        stopping monitors. Only runs with validation data have it. Raises InputError when the run has no such
        model, or when it cannot be built again.
        """
        path = self.directory.best_model if best else self.directory.model
        never = "it ended before its first epoch, or the job has no validation data"
        remedy = never if best else f"resume it: csdctl.train(…, resume={self.id!r})"
        weights = path.with_suffix(".weights.h5")
        if not has_model(path):
            problem = f"run {self.id} has no {path.name}, or one that is damaged or of another run"
            raise InputError(problem, remedy=remedy)
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import keras

        try:
            if path.exists():
                return keras.models.load_model(path, custom_objects=custom_objects)
            model = _build(self.directory)
            model.load_weights(weights)
        except Exception as error:  # of any kind: the user's code
            by_hand = f"build the model as the job did, and call model.load_weights({str(weights)!r})"
            raise InputError(
                f"the model of run {self.id} cannot be built again: {(str(error).splitlines() or [''])[0]}",
                remedy="pass its own classes: run.model({'AE': AE})" if path.exists() else by_hand,
            ) from error
        return model

    def report(self) -> RunSummary:
        """Return the results that `csdctl report` shows."""
        return report_run(self.directory).summary

    def __repr__(self) -> str:
        status = vars(look_at(self.directory))
        return "<Run {run_id}: {state}, epoch {epoch} of {epochs}>".format(**status)


def load_run(run_id: str = LATEST, directory: str | Path = ".") -> Run:
    """Return a run by its id, or the latest one, of the `.csdctl` in `directory`.

    Raises InputError for a run that does not exist.
    """
    project = ProjectDirectory(Path(directory).absolute())
    return Run(project.find_run(run_id))


def train(
    job: JobOrPath,
    fleet: FleetOrPath = "fleet.yaml",
    *,
    batch_size: int | None = None,
    resume: str | None = None,
    callbacks: Sequence[Callback] = (),
    options: TrainOptions | None = None,
) -> Run:
    """Train `job` on `fleet` and return the run. Without `batch_size` and a plan that fits it, tune first.

    `batch_size`: of every rank, in place of a plan. `resume`: the id of a run to continue, or "latest".
    `callbacks`: functions that get every event of the run as a dict, each in a thread of its own. One that
    returns `csdctl.STOP` ends the run cleanly, and `train` returns it.

    Raises CsdctlError, and RunStopped, which is a KeyboardInterrupt, when it is interrupted: the ranks finish
    their step, model and state are saved, and `resume` continues from there.
    """
    options = check_values(options or TrainOptions(), InstanceOf[TrainOptions], "options", remedy="")
    if batch_size is not None:
        batch_size = check_values(
            batch_size, BatchSize, "batch_size", remedy="pass the batch size of one rank"
        )
    loaded, chosen = as_job(job).load(), as_fleet(fleet)
    options = replace(options, callbacks=(*options.callbacks, *_as_list(callbacks)))
    with open_session() as streams:
        path = streams.project.plan(loaded.name)
        needs_plan = batch_size is None and resume is None
        if needs_plan and not (path.exists() and not find_changes(load_plan(path), loaded, {})):
            tune(job, chosen)
        request = TrainRequest(
            job=loaded,
            fleet=chosen,
            directory=streams.directory,
            options=options,
            batch_size=batch_size,
            resume=resume,
        )
        result = TrainingScreen(streams).train(request)
    return Run(result.directory)
