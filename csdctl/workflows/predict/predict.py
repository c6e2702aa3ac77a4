"""`predict`: run a trained model over samples where they are stored, and bring back the results.

Each machine keeps its results by content. It sends rows of numbers, never samples or their names.
"""

import csv
import difflib
import io
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import IO, Any

import numpy as np

from csdctl.documents import MAX_JSON_BYTES, check_output, load_text
from csdctl.errors import CsdctlError, InputError, PartialError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.compatibility import LOGITS, plain_name, show_shape
from csdctl.job.model import Job, check_keras_file, load_job
from csdctl.notify import warn
from csdctl.reporting.results import COMPLETED, FAILED, load_run_status, read_results
from csdctl.runs.directory import ProjectDirectory, find_run, has_model
from csdctl.shipping.worker_calls import fetch_results
from csdctl.transport.many import Outcome, errors_of, run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol import features as protocol
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.durable_files import replacing
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, VALUES, ResultRule
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.worker.protocol.run_spec import LAST_MODEL
from csdctl.workflows.data.compile import ModelCompiler, as_prefix, files_of
from csdctl.workflows.data.deploy import deploy_files
from csdctl.workflows.data.files import SerializedModel, whole
from csdctl.workflows.data.prepare import Prepared, extract_on, load_prepared, prepare_in
from csdctl.workflows.train.plan import default_runtime
from csdctl.workflows.train.strategies import MAX_HEADER_BYTES
from csdctl.workflows.workspace.event_stream import EventStream, OnProgress
from csdctl.workflows.workspace.workspace import Workspace, open_workspace

CSV, NPZ = ".csv", ".npz"
CLASSES, SCORES, EMBEDDINGS = "classes", "scores", "embeddings"
PRIVATE, PUBLIC, VALIDATION, ALL = "private", "public", "validation", "all"
DEFAULT_JOB = Path("job.yaml")
MAX_SHOWN = 5
"""Layers that a message names."""
MAX_ROW_VALUES = 1 << 40
DOING = "predicting"


@dataclass(frozen=True)
class ResultBlock:
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


def write_results(path: Path, blocks: Sequence[ResultBlock], names: Sequence[str]) -> None:
    """Write all rows in the order of `blocks`, with the `names` of the classes, if known. Raises OSError."""
    with replacing(path) as file:
        if path.suffix == NPZ:
            np.savez(file, **_arrays(blocks, names))
            return
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        for number, block in enumerate(blocks):
            columns = _columns(block, names)
            if not number:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=False))
        text.detach()


def _columns(block: ResultBlock, names: Sequence[str]) -> dict[str, Iterable[Any]]:
    """Return columns of plain values by name, as endless as `repeat`. Vectors have one for each number."""
    columns: dict[str, Iterable[Any]] = {
        "data": repeat(block.data),
        "node": repeat(block.node),
        "row": block.rows,
    }
    for name, array in block.fields.items():
        values = array.reshape(len(block), math.prod(array.shape[1:]))
        # The shortest float that float32 reads as the same.
        convert: Callable[[Any], Any] = int if values.dtype.kind == "i" else lambda value: float(str(value))
        if array.ndim > 1:
            columns |= {f"{name}_{number}": map(convert, column) for number, column in enumerate(values.T)}
            continue
        columns[name] = map(convert, array)
        if names and name.rpartition(".")[2] == "class":
            name_of = dict(enumerate(names))  # a model may have more classes than the data
            columns[f"{name}_name"] = [name_of.get(int(number), "") for number in array]
    return columns


def _arrays(blocks: Sequence[ResultBlock], names: Sequence[str]) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "data": np.array([block.data for block in blocks for _ in block.rows], "U"),
        "node": np.array([block.node for block in blocks for _ in block.rows], "U"),
        "row": np.concatenate([block.rows for block in blocks]),
        "class_names": np.array(list(names), "U"),
    }
    fields = {name: [block.fields[name] for block in blocks] for name in blocks[0].fields}
    return arrays | {name: np.concatenate(parts) for name, parts in fields.items()}


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
    if output.suffix not in (CSV, NPZ):
        suffix = output.suffix or "nothing"
        raise InputError(f"--output {output} ends in {suffix!r}", remedy=f"one of {CSV}, {NPZ}")
    check_output(output, "--output", force=force)
    file, job_path, manifest = find_model(model, job, ProjectDirectory(directory))
    loaded = load_job(job_path)
    chosen, fleet = choose_data(on, loaded), load_fleet()
    return PredictRequest(
        loaded, file, fleet, directory, output, on=chosen, want=want, layer=layer, manifest=manifest
    )


def find_model(
    model: str, job: Path | None, project: ProjectDirectory
) -> tuple[Path, Path, Mapping[str, Any]]:
    """Return .keras file, job file and manifest of a run, or of such a file. Raises InputError."""
    if model.endswith(".keras"):
        path = (project.root / Path(model).expanduser()).resolve()
        if not os.path.isfile(path):
            raise InputError(
                f"model file {path} does not exist", remedy="name a .keras file that exists, or a run"
            )
        check_keras_file(path)
        return path, job or DEFAULT_JOB, {}
    run = find_run(project, model, warn)
    if run.model.with_suffix(".weights.h5").is_file():
        raise InputError(
            f"run {run.run_id} has saved weights alone, because its model has no get_config",
            remedy=f'in Python: csdctl.load_run("{run.run_id}").model().predict(…)',
        )
    if not has_model(run.model):
        reason, remedy = "it has not finished", "use another run"
        with suppress(InputError):
            status = load_run_status(run).status
            if status.state == COMPLETED:
                what = "damaged or of another run" if run.model.exists() else "gone"
                reason = f"it has completed, but the file is {what}"
            elif status.state == FAILED:
                reason = f"it failed: {read_results(run).summary.failures[0]}"
        newest = (name for name in reversed(project.run_ids()) if has_model(project.runs / name / LAST_MODEL))
        if latest := next(newest, ""):  # has_model reads the whole file
            remedy = f"use the latest run with a model: {latest}"
        raise InputError(
            f"run {run.run_id} has no model.keras: {reason}",
            remedy=f"continue it with `csdctl train --resume {run.run_id}`, or {remedy}",
        )
    manifest = run.load_manifest()
    described = manifest.get("job")
    written = described.get("path") if isinstance(described, dict) else None
    of_run = project.root / written if isinstance(written, str) else DEFAULT_JOB
    return run.model.resolve(), job or of_run, manifest


def choose_data(on: str | None, job: Job) -> tuple[str, ...]:
    """Return the data sets to predict, in the order of the rows. Default: private, else public."""
    present = {PUBLIC: True, VALIDATION: bool(job.data.validation), PRIVATE: bool(job.data.private)}
    if on == ALL:
        return tuple(name for name, is_present in present.items() if is_present)
    if on is None:
        return (PRIVATE if job.data.private else PUBLIC,)
    if not present[on]:
        raise InputError(
            f"{job.path} has no {on} data", remedy=f"add data.{on} to it, or choose other data with --on"
        )
    return (on,)


def build_rules(info: ModelInfo, want: str) -> tuple[ResultRule, ...]:
    """Return what is kept of each output. Raises InputError where there is no class to keep."""
    if want == EMBEDDINGS:
        return (ResultRule("", VALUES),)
    if want != CLASSES:
        return tuple(ResultRule(output.name, VALUES) for output in info.outputs)
    return tuple(_rule_of_classes(output, info) for output in info.outputs)


def _rule_of_classes(output: OutputInfo, info: ModelInfo) -> ResultRule:
    of_loss = LOGITS.get(plain_name(output.loss), VALUES)
    kind = output.activation if output.activation in (SOFTMAX, SIGMOID) else of_loss
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


@dataclass(frozen=True)
class PredictResult:
    """Number of rows that were predicted, and the rows that are missing."""

    output: Path
    num_rows: int
    num_computed: int
    """Rows that no earlier call had computed."""
    num_rows_of: dict[str, int]
    """Rows by the machine that computed them."""
    missing: dict[str, CsdctlError]
    """Nodes whose rows are missing, and why."""
    num_missing: dict[str, int]
    """Missing rows by node, where the number is known."""
    elapsed_s: float

    def check(self) -> None:
        """Raise PartialError if rows are missing."""
        if not self.missing:
            return
        numbers = {name: f" ({count:,})" for name, count in self.num_missing.items()}
        nodes = ", ".join(name + numbers.get(name, "") for name in self.missing)
        reasons = "".join(f"\n  {error}" for error in self.missing.values())
        raise PartialError(
            f"private rows of {nodes} are missing; {self.output} has the other {self.num_rows:,}{reasons}",
            remedy="fix these nodes, and run the same command with --force: it computes only missing rows",
        )


def predict(request: PredictRequest, events: EventStream) -> PredictResult:
    """Predict, and write the rows to `request.output`. The result names missing ones.

    Raises InputError if model and data do not fit, CsdctlError if there is no row at all.
    """
    began = time.monotonic()
    with open_workspace(
        request.directory, request.fleet, "predict", is_locking=True, say=events.say, min_nodes=1
    ) as space:
        if space.unreachable:
            events.say(f"continuing without {', '.join(space.unreachable)}, which cannot be reached")
        record = load_prepared(space.project, request.job)
        prepared = prepare_in(space, request.model_job, events, is_trained=False)
        rules = build_rules(prepared.model.info, request.want)
        if request.layer:
            check_layer(request.layer, prepared.model)
        data, worker = prepared.public, prepared.worker
        compiler = ModelCompiler(request.model_job, prepared.model, data, worker, space, say=events.say)
        prepared = replace(prepared, model=compiler.forward(request.layer))
        blocks, failed = Prediction(request, prepared, space, rules).run(events)
        missing: dict[str, CsdctlError] = {}
        if PRIVATE in request.on:
            errors, holding = space.unreachable | failed, request.fleet.names_without_servers
            missing = {name: error for name, error in errors.items() if name in holding}
        if missing and not any(map(len, blocks)):
            outcomes = {name: Outcome[None](name, error=error) for name, error in missing.items()}
            values_or_raise(outcomes, DOING)
        names = request.manifest.get("classes")
        write_results(
            request.output, blocks, names if isinstance(names, list) else [*prepared.public.class_counts]
        )
    num_rows_of: Counter[str] = Counter()
    for block in blocks:
        num_rows_of[block.node] += len(block)
    num_private = (record.num_private if record else {}) | prepared.num_private
    return PredictResult(
        output=request.output,
        num_rows=num_rows_of.total(),
        num_computed=sum(block.num_computed for block in blocks),
        num_rows_of=dict(num_rows_of),
        missing=missing,
        num_missing={name: num_private[name] for name in missing if name in num_private},
        elapsed_s=time.monotonic() - began,
    )


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
        return RemoteCommandError(f"{DOING}: {problem}", node=self.machine)


@dataclass(frozen=True)
class Prediction:
    """The predictions of one call."""

    request: PredictRequest
    prepared: Prepared
    space: Workspace
    rules: tuple[ResultRule, ...]

    def run(self, events: EventStream) -> tuple[list[ResultBlock], dict[str, CsdctlError]]:
        """Return the results, host first, and the errors of nodes. Raises the error of the host."""
        host_data = {PUBLIC: self.prepared.public, VALIDATION: self.prepared.validation}
        on = self.request.on
        of_host = [Part(data, HOST_NAME, info) for data, info in host_data.items() if info and data in on]
        parts = {HOST_NAME: of_host} if of_host else {}
        if PRIVATE in on:
            parts |= {node: [Part(PRIVATE, node, info)] for node, info in self.prepared.private.items()}
        labels = [part.label for of_machine in parts.values() for part in of_machine]
        with events.working(DOING, labels) as on_progress:

            def on_machine(name: str) -> list[ResultBlock]:
                if name != HOST_NAME:
                    files = {name: [self.prepared.worker, *files_of(self.prepared.model)]}
                    deploy_files(files, self.space.fleet, self.space.sessions, events)
                return [self._predict(part, on_progress) for part in parts[name]]

            outcomes = run_on_all({name: name for name in parts}, on_machine)
        failed = errors_of(outcomes)
        if HOST_NAME in failed:
            raise failed[HOST_NAME]
        return [block for outcome in outcomes.values() for block in outcome.value or ()], failed

    def _predict(self, part: Part, on_progress: OnProgress) -> ResultBlock:
        space, worker, machine = self.space, self.prepared.worker, part.machine
        spec = protocol.ExtractSpec(
            whole(part.info),
            protocol.RESULT_STORE,
            as_prefix(self.prepared.model),
            default_runtime(machine, space.fleet, space.facts),
            self.rules,
            layer=self.request.layer,
        )
        note = partial(on_progress, part.label)
        extracted = extract_on(space, machine, worker, spec, note, doing=DOING)
        (info,) = extracted.parts
        dtype = self._check_dtype(info, part)
        num_bytes = part.info.num_samples * dtype.itemsize + MAX_HEADER_BYTES
        traffic = TrafficClass[self.request.want.upper()] if part.data == PRIVATE else TrafficClass.PUBLIC
        send = protocol.SendSpec(Path(info.path).name, info.images_sha256, num_bytes)
        session, python = space.sessions[machine], space.fleet.python_of(machine)
        with tempfile.TemporaryFile(dir=space.project.state) as file:
            fetch_results(session, python, worker.path, send, file, traffic_class=traffic, doing=DOING)
            records = map_rows(file, part, dtype)
        fields = {name: records[name] for name in records.dtype.names}
        return ResultBlock(part.data, machine, np.arange(len(records)), fields, extracted.num_computed)

    def _check_dtype(self, info: DatasetInfo, part: Part) -> Any:
        names = [name for rule in self.rules for name in rule.fields]
        expected = {name: "int32" if name.endswith("class") else "float32" for name in names}
        fields = info.inputs
        is_as_asked = {name: dtype for name, (dtype, _) in fields.items()} == expected and not any(
            shape for name, (_, shape) in fields.items() if not name.endswith("value")
        )
        if info.num_samples != part.info.num_samples or info.sample_shape or not is_as_asked:
            raise part.refuse(
                f"received {info.num_samples} rows of {', '.join(fields)}, "
                f"expected {part.info.num_samples} of {', '.join(expected)}"
            )
        if math.prod(size for _, shape in fields.values() for size in shape) > MAX_ROW_VALUES:
            raise part.refuse("received rows that are too large")
        return np.dtype([(name, dtype, tuple(shape)) for name, (dtype, shape) in fields.items()])


def map_rows(file: IO[bytes], part: Part, dtype: Any) -> Any:
    """Map the records of a fetched file. Raises RemoteCommandError for any other content.

    Its header must be the one that they have. Another machine's is not parsed: numpy reads it as Python.
    """
    num_rows, header = part.info.num_samples, io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_rows,)}
    np.lib.format.write_array_header_1_0(header, described)
    file.seek(0)
    received, start = file.read(len(header.getvalue())), len(header.getvalue())
    num_bytes = file.seek(0, os.SEEK_END) - start
    if received != header.getvalue() or num_bytes != num_rows * dtype.itemsize:
        raise part.refuse(f"received a file with other content, expected {num_rows} rows of {dtype}")
    return np.memmap(file, dtype, "r", start, (num_rows,)) if num_bytes else np.empty(num_rows, dtype)
