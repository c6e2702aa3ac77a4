"""`predict`: run a trained model over samples where they are stored, and bring back the results.

Each machine keeps its results by content, and continues them after an interruption. What it sends are rows
of numbers: of private samples neither the samples nor their names.
"""

import csv
import difflib
import io
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from csdctl import documents
from csdctl.documents import MAX_JSON_BYTES, load_text, write_atomically
from csdctl.errors import CsdctlError, InputError, PartialError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.compatibility import LOGITS, plain_name, show_shape
from csdctl.job.model import Job, check_keras_file, load_job
from csdctl.reporting.results import COMPLETED, FAILED, load_run_status, read_results
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.shipping.worker_calls import fetch_results
from csdctl.transport.many import Outcome, errors_of, run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.features import (
    RESULT_STORE,
    SIGMOID,
    SOFTMAX,
    VALUES,
    Extracted,
    ExtractSpec,
    ResultRule,
    SendSpec,
)
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.workflows.data.compile import ModelCompiler, as_prefix, files_of
from csdctl.workflows.data.files import SerializedModel, deploy_files, whole
from csdctl.workflows.data.prepare import Prepared, check_info, load_prepared, prepare_in
from csdctl.workflows.train.features import MAX_HEADER_BYTES, check_parts
from csdctl.workflows.train.plan import default_runtime
from csdctl.workflows.workspace.event_stream import EventStream, OnProgress
from csdctl.workflows.workspace.workspace import Workspace, call_machine, open_workspace

CSV, NPZ = ".csv", ".npz"
DEFAULT_JOB = Path("job.yaml")
MAX_SHOWN = 5
_DOING = "predicting"
_PARSING = threading.Lock()
"""numpy parses a header as Python, and the parser of CPython 3.11 may fail in two threads (gh-106905)."""


@dataclass(frozen=True)
class Block:
    """Results of one data set of one machine."""

    data: str
    node: str
    rows: Any
    """The number of each sample in its data set there, shape (n,), ascending."""
    fields: Mapping[str, Any]
    """Values that were asked for by name, each of shape (n, …)."""
    num_computed: int = 0
    """Rows that no earlier call had computed."""

    def __len__(self) -> int:
        return len(self.rows)


def check_output(path: Path, *, force: bool = True) -> None:
    """Raise InputError for a file that cannot be written, or its suffix."""
    if path.suffix not in WRITERS:
        raise InputError(
            f"--output {path} ends in {path.suffix or 'nothing'!r}", remedy=f"one of {', '.join(WRITERS)}"
        )
    documents.check_output(path, "--output", force=force)


def write_results(path: Path, blocks: Sequence[Block], names: Sequence[str]) -> None:
    """Write all rows in the order of `blocks`. `names` are those of the classes, none if unknown.

    Raises OSError.
    """
    with write_atomically(path) as file:
        WRITERS[path.suffix](file, blocks, names)


def _write_csv(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    for number, block in enumerate(blocks):
        columns = _columns(block, names)
        if not number:
            writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=False))
    text.detach()


def _columns(block: Block, names: Sequence[str]) -> dict[str, Iterable[Any]]:
    """Return columns of plain values by name, as endless as `repeat`. Vectors have one for each number."""
    columns: dict[str, Iterable[Any]] = {
        "data": repeat(block.data),
        "node": repeat(block.node),
        "row": block.rows,
    }
    for name, array in block.fields.items():
        values = array.reshape(len(block), math.prod(array.shape[1:]))
        # The shortest float that float32 reads as the same.
        convert: Callable[[Any], Any] = int if values.dtype.kind == "i" else lambda one: float(str(one))
        if array.ndim > 1:
            columns |= {f"{name}_{number}": map(convert, column) for number, column in enumerate(values.T)}
            continue
        columns[name] = map(convert, array)
        if names and name.rpartition(".")[2] == "class":
            named = dict(enumerate(names))  # a model may have more classes than the data
            columns[f"{name}_name"] = [named.get(int(number), "") for number in array]
    return columns


def _write_npz(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    import numpy as np

    arrays: dict[str, Any] = {
        "data": np.array([block.data for block in blocks for _ in range(len(block))], "U"),
        "node": np.array([block.node for block in blocks for _ in range(len(block))], "U"),
        "row": np.concatenate([block.rows for block in blocks]),
        "class_names": np.array(list(names), "U"),
    }
    for name in blocks[0].fields:
        arrays[name] = np.concatenate([block.fields[name] for block in blocks])
    np.savez(file, **arrays)


WRITERS: dict[str, Callable[[BinaryIO, Sequence[Block], Sequence[str]], None]] = {
    CSV: _write_csv,
    NPZ: _write_npz,
}


CLASSES, SCORES, EMBEDDINGS = "classes", "scores", "embeddings"
PRIVATE, PUBLIC, VALIDATION, ALL = "private", "public", "validation", "all"


@dataclass(frozen=True)
class PredictRequest:
    """Request of one prediction. `check_request` has checked it."""

    job: Job
    """Job as written, whose data is read."""
    model: Path
    """The .keras file."""
    fleet: Fleet
    directory: Path
    output: Path
    on: tuple[str, ...]
    """PUBLIC, VALIDATION, PRIVATE: in the order of the rows."""
    want: str
    layer: str = ""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Of the run that has trained the model; {} for a file."""

    @property
    def model_job(self) -> Job:
        """The job with the trained model in place of its own, for no training."""
        rate = self.job.recipe.learning_rate or 0.001  # nothing is learnt, but compile() wants one
        recipe = replace(self.job.recipe, augment="", learning_rate=rate)
        trained = self.manifest.get("recipe")
        if isinstance(trained, dict) and "input_range" in trained:  # job.yaml may have another one now
            recipe = replace(recipe, input_range=trained["input_range"] and tuple(trained["input_range"]))
        code = self.job.code_roots
        model = str(self.model)
        private = self.job.data.private and replace(self.job.data.private, noise=None)
        data = replace(self.job.data, private=private)
        return replace(self.job, model=model, model_args={}, code=code, recipe=recipe, data=data)


def check_request(
    model: str,
    job: Path | None,
    load_fleet: Callable[[], Fleet],
    directory: Path,
    *,
    on: str | None,
    want: str,
    layer: str,
    output: Path,
    force: bool = False,
) -> PredictRequest:
    """Return the request. Raises InputError for whatever no machine is needed to find, the fleet last."""
    if want == EMBEDDINGS and not layer:
        raise InputError("embeddings are the output of a layer", remedy="name it with --layer")
    if layer and want != EMBEDDINGS:
        raise InputError(
            f"--layer is only used for embeddings, received --want {want}", remedy="add --want embeddings"
        )
    check_output(output, force=force)
    file, job_path, manifest = find_model(model, job, ProjectDirectory(directory))
    loaded = load_job(job_path)
    data = choose_data(on, loaded)
    return PredictRequest(loaded, file, load_fleet(), directory, output, data, want, layer, manifest)


def find_model(
    model: str, job: Path | None, project: ProjectDirectory
) -> tuple[Path, Path, Mapping[str, Any]]:
    """Return the .keras file, the job file, and the manifest of the run. `model` is such a file, or a run.

    Raises InputError.
    """
    if model.endswith(".keras"):
        path = (project.root / Path(model).expanduser()).resolve()
        if not os.path.isfile(path):
            raise InputError(
                f"model file {path} does not exist", remedy="name a .keras file that exists, or a run"
            )
        check_keras_file(path)
        return path, job or DEFAULT_JOB, {}
    run = project.find_run(model)
    if run.model.with_suffix(".weights.h5").is_file():
        raise InputError(
            f"run {run.run_id} has saved weights alone, because its model has no get_config",
            remedy=f'in Python: csdctl.load_run("{run.run_id}").model().predict(…)',
        )
    if not run.model.is_file():
        reason, other = "it has not finished", "use another run"
        with suppress(InputError):
            state = load_run_status(run).state
            if state == COMPLETED:
                reason = "it has completed, but the file is gone"
            elif state == FAILED:
                reason = f"it failed: {read_results(run).summary.failures[0]}"
        if named := [name for name in project.run_ids() if RunDirectory(project.runs / name).model.is_file()]:
            other = f"use the latest run with a model: {named[-1]}"
        raise InputError(
            f"run {run.run_id} has no model.keras: {reason}",
            remedy=f"continue it with `csdctl train --resume {run.run_id}`, or {other}",
        )
    manifest = run.load_manifest()
    described = manifest.get("job")
    written = described.get("path") if isinstance(described, dict) else None
    of_run = project.root / written if isinstance(written, str) else DEFAULT_JOB
    return run.model.resolve(), job or of_run, manifest


def choose_data(on: str | None, job: Job) -> tuple[str, ...]:
    """Return the data sets to predict, in the order of the rows. Default: private, else public."""
    present = {PUBLIC: True, VALIDATION: bool(job.data.validation), PRIVATE: bool(job.data.private)}
    wanted: Sequence[str] = (PUBLIC, VALIDATION, PRIVATE)
    if on is None:
        wanted = [PRIVATE if job.data.private else PUBLIC]
    elif on != ALL:
        wanted = [on]
        if not present[on]:
            raise InputError(
                f"{job.path} has no {on} data", remedy=f"add data.{on} to it, or choose other data with --on"
            )
    return tuple(name for name in wanted if present[name])


def build_rules(info: ModelInfo, want: str) -> tuple[ResultRule, ...]:
    """Return what is kept of each output. Raises InputError where there is no class to keep."""
    if want == EMBEDDINGS:
        return (ResultRule("", VALUES),)
    if want != CLASSES:
        return tuple(ResultRule(output.name, VALUES) for output in info.outputs)
    return tuple(_rule_of_classes(output, info) for output in info.outputs)


def _rule_of_classes(output: OutputInfo, info: ModelInfo) -> ResultRule:
    kind = output.activation if output.activation in (SOFTMAX, SIGMOID) else ""
    of_loss = LOGITS.get(plain_name(output.loss), VALUES)
    kind = kind or of_loss
    if kind == SIGMOID and of_loss != SOFTMAX and output.is_known and output.shape[-1:] > (1,):
        raise InputError(
            f"{output.name or info.name} has {output.shape[-1]} probabilities that do not exclude each other",
            remedy="ask for all of them with --want scores",
        )
    if kind != VALUES and output.is_known and len(output.shape) > 1:
        raise InputError(
            f"{output.name or info.name} has outputs of shape {show_shape(output.shape)}, not one class for "
            "each sample",
            remedy="ask for all of them with --want scores",
        )
    return ResultRule(output.name, kind, output.from_logits and kind != VALUES)


def check_layer(layer: str, model: SerializedModel) -> None:
    """Raise InputError unless the model's graph has this layer. The nodes are not asked."""
    architecture = json.loads(load_text(model.architecture.source, max_bytes=MAX_JSON_BYTES))
    names = [layer["config"]["name"] for layer in architecture.get("config", {}).get("layers", [])]
    if layer in names:
        return
    near = difflib.get_close_matches(layer, names, MAX_SHOWN) or names[-MAX_SHOWN:]
    raise InputError(
        f"{model.info.name} has no layer {layer!r} in its graph",
        remedy=f"one of its layers, such as {', '.join(near)}"
        if near
        else "only models with a graph of layers, functional or sequential, have embeddings",
    )


@dataclass
class PredictResult:
    """Number of rows that were predicted, and the rows that are missing."""

    output: Path
    num_rows: int = 0
    num_computed: int = 0
    """Rows that no earlier call had computed."""
    num_rows_of: dict[str, int] = field(default_factory=dict)
    """Rows by the machine that computed them."""
    missing: dict[str, CsdctlError] = field(default_factory=dict)
    """Nodes whose rows are missing, and why."""
    num_missing: dict[str, int] = field(default_factory=dict)
    """Missing rows by node, where the number is known."""
    elapsed_s: float = 0.0

    def check(self) -> None:
        """Raise PartialError if rows are missing."""
        if not self.missing:
            return
        nodes = ", ".join(
            f"{name} ({self.num_missing[name]:,})" if name in self.num_missing else name
            for name in self.missing
        )
        reasons = "".join(f"\n  {error}" for error in self.missing.values())
        raise PartialError(
            f"private rows of {nodes} are missing; {self.output} has the other {self.num_rows:,}{reasons}",
            remedy="fix these nodes, and run the same command with --force: it computes only missing rows",
        )


def predict(request: PredictRequest, events: EventStream) -> PredictResult:
    """Predict, and write what there is to `request.output`. What is missing is in the result.

    Raises InputError if model and data do not fit, CsdctlError if there is no row at all.
    """
    began = time.monotonic()
    say, root = events.say, request.directory
    with open_workspace(root, request.fleet, "predict", is_locking=True, say=say, min_nodes=1) as space:
        absent = space.unreachable
        if absent:
            say(f"continuing without {', '.join(absent)}, which cannot be reached")
        record = load_prepared(space.project, request.job)
        num_private = dict(record.num_private) if record else {}
        prepared = prepare_in(space, request.model_job, events, is_trained=False)
        num_private |= prepared.num_private
        rules = build_rules(prepared.model.info, request.want)
        if request.layer:
            check_layer(request.layer, prepared.model)
        files = prepared.model, prepared.public, prepared.worker
        model = ModelCompiler(request.model_job, *files, space, events.say).forward(request.layer)
        prepared = replace(prepared, model=model)
        with tempfile.TemporaryDirectory(".predict", dir=space.project.state) as directory:
            prediction = _Prediction(request, prepared, space, rules, Path(directory), events)
            found, failed = prediction.run(list_parts(request, prepared))
            result = PredictResult(request.output, num_computed=sum(one.num_computed for one in found))
            for one in found:
                result.num_rows += len(one)
                result.num_rows_of[one.node] = result.num_rows_of.get(one.node, 0) + len(one)
            if PRIVATE in request.on:
                holding = request.fleet.names_without_servers
                result.missing = {name: error for name, error in (absent | failed).items() if name in holding}
                result.num_missing = {
                    name: num_private[name] for name in result.missing if name in num_private
                }
            if result.missing and not result.num_rows:
                outcomes = {name: Outcome[None](name, error=error) for name, error in result.missing.items()}
                values_or_raise(outcomes, _DOING)
            names = request.manifest.get("classes")
            if not isinstance(names, list):
                names = list(prepared.public.class_counts)
            write_results(request.output, found, names)
            result.elapsed_s = time.monotonic() - began
            return result


@dataclass(frozen=True)
class Part:
    """A data set that one machine predicts, where it is stored."""

    data: str
    """PUBLIC, VALIDATION or PRIVATE."""
    machine: str
    info: DatasetInfo

    @property
    def label(self) -> str:
        """The name for the progress."""
        return self.machine if self.data == PRIVATE else self.data

    def refuse(self, problem: str) -> RemoteCommandError:
        """Return the error for results that are not what was asked for."""
        return RemoteCommandError(f"{_DOING}: {problem}", node=self.machine)


def list_parts(request: PredictRequest, prepared: Prepared) -> list[Part]:
    """Return the data sets in the order of the rows: those of the host before those of the nodes."""
    of_host = {PUBLIC: prepared.public, VALIDATION: prepared.validation}
    return [
        *(Part(data, HOST_NAME, info) for data, info in of_host.items() if info and data in request.on),
        *(Part(PRIVATE, node, info) for node, info in prepared.private.items() if PRIVATE in request.on),
    ]


@dataclass(frozen=True)
class _Prediction:
    """The predictions of one call."""

    request: PredictRequest
    prepared: Prepared
    space: Workspace
    rules: tuple[ResultRule, ...]
    directory: Path
    events: EventStream

    def run(self, parts: list[Part]) -> tuple[list[Block], dict[str, CsdctlError]]:
        """Return the results in the order of `parts`, and the errors of nodes. Raises that of the host."""
        by_machine: dict[str, list[Part]] = {}
        for part in parts:
            by_machine.setdefault(part.machine, []).append(part)
        fleet, sessions = self.space.fleet, self.space.sessions
        with self.events.working(_DOING, [part.label for part in parts]) as on_progress:

            def on_machine(name: str) -> list[Block]:
                if name != HOST_NAME:
                    files = {name: [self.prepared.worker, *files_of(self.prepared.model)]}
                    deploy_files(files, fleet, sessions, self.events)
                return [self._predict(part, on_progress) for part in by_machine[name]]

            outcomes = run_on_all({name: name for name in by_machine}, on_machine)
        failed = errors_of(outcomes)
        if HOST_NAME in failed:
            raise failed[HOST_NAME]
        return [found for name in by_machine for found in outcomes[name].value or ()], failed

    def _predict(self, part: Part, on_progress: OnProgress) -> Block:
        import numpy as np

        request, prepared, space = self.request, self.prepared, self.space
        runtime, model = default_runtime(part.machine, space.fleet, space.facts), as_prefix(prepared.model)
        spec = ExtractSpec(whole(part.info), RESULT_STORE, model, runtime, self.rules, request.layer)

        note = partial(on_progress, part.label)
        extracted = call_machine(
            space, part.machine, prepared.worker, "extract", spec, Extracted, note, doing=_DOING
        )
        check_parts(extracted, 1, part.machine, _DOING)
        (info,) = extracted.parts
        check_info(info, part.machine, _DOING, may_be_empty=True)
        dtype = self._check_dtype(info, part)
        target = self.directory / f"{part.data}-{quote(part.machine, safe='')}.npy"
        num_bytes = part.info.num_samples * dtype.itemsize + MAX_HEADER_BYTES
        wanted = SendSpec(Path(info.path).name, info.images_sha256, num_bytes)
        traffic = TrafficClass[request.want.upper()] if part.data == PRIVATE else TrafficClass.PUBLIC
        session, python = space.sessions[part.machine], space.fleet.python_of(part.machine)
        with target.open("wb") as file:
            fetch_results(session, python, prepared.worker.path, wanted, file, traffic, doing=_DOING)
        records = _load(target, part, dtype)
        fields = {name: records[name] for name in records.dtype.names}
        return Block(part.data, part.machine, np.arange(len(records)), fields, extracted.num_computed)

    def _check_dtype(self, info: DatasetInfo, part: Part) -> Any:
        """Return the type of a row. Raises RemoteCommandError if it is not what was asked for."""
        import numpy as np

        expected = {
            name: ("float32" if name.endswith(("value", "probability")) else "int32")
            for rule in self.rules
            for name in rule.fields
        }
        found = info.inputs
        is_as_asked = {name: dtype for name, (dtype, _) in found.items()} == expected and not any(
            shape for name, (_, shape) in found.items() if not name.endswith("value")
        )
        if info.num_samples != part.info.num_samples or info.sample_shape or not is_as_asked:
            raise part.refuse(
                f"received {info.num_samples} rows of {', '.join(found)}, "
                f"expected {part.info.num_samples} of {', '.join(expected)}"
            )
        if math.prod(size for _, shape in found.values() for size in shape) > 1 << 40:
            raise part.refuse("received rows that are too large")
        return np.dtype([(name, dtype, tuple(shape)) for name, (dtype, shape) in found.items()])


def _load(path: Path, part: Part, dtype: Any) -> Any:
    """Return the mapped records of a fetched file. Raises RemoteCommandError for any other content."""
    import numpy as np

    try:
        with _PARSING:
            records = np.load(path, mmap_mode="r" if part.info.num_samples else None, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, and passes on all of its errors
        problem = f"received results that cannot be read: {type(error).__name__}"
        raise part.refuse(problem) from None
    if records.shape != (part.info.num_samples,) or records.dtype != dtype:
        problem = (
            f"received {records.dtype} of shape {records.shape}, expected {dtype} of {part.info.num_samples}"
        )
        raise part.refuse(problem)
    return records
