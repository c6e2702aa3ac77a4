"""`init`: a first job.yaml from a look at a model and its data, with the reasons as comments.

Worker programs do the looking: `build` for the model, `look` for the data. `record` runs a training script up
to its call of `fit`. No node is contacted.
"""

import ast
import hashlib
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from csdctl.documents import check_output
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.compatibility import LOGITS, check_compatibility, describe_arrays, plain_name, show_shape
from csdctl.job.model import HostData, Job, find_imported, model_reference, parse_job, python_files
from csdctl.notify import Say, make_printable
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile
from csdctl.shipping.worker_calls import call_worker
from csdctl.transport.local import LocalSession
from csdctl.transport.program import within
from csdctl.worker.protocol import datasets as protocol
from csdctl.worker.protocol.datasets import DataLook, DatasetInfo, PrepareSpec, equals
from csdctl.worker.protocol.durable_files import save_text
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo, ScriptFit, ScriptRequest
from csdctl.workflows.data.files import SerializedModel, serialize_model, shapes_of, store_worker
from csdctl.workflows.data.prepare import add_function, first_spec, follow
from csdctl.workflows.workspace.event_stream import OnProgress

DEFAULT_SIZE = (224, 224)
"""Height and width that most models of keras.applications were made for."""
MAX_COLUMN = 110
SPARSE, MSE = "sparse_categorical_crossentropy", "mean_squared_error"
SCRIPT_DEADLINE_S = 3600.0
"""Maximum time of a script up to its call of `fit`."""
WRITTEN = 'written by `csdctl init`."""'
"""The end of the first line of a file of functions."""
FUNCTIONS = '''\
"""Model and data of {name}, {WRITTEN}

from csdctl.worker.compute.script import run_to_fit

fit = run_to_fit({script}, {options}, globals(), "{sha256}")
build, training_data, validation_data = fit.build, fit.training_data, fit.validation_data
{imports}'''
"""The file of functions for a training script."""
TRAINS = re.compile(rb"^(\w+ *= *)?\w*model\w*\.fit\(", re.MULTILINE)
"""A line that calls `fit` of a model when its file is imported."""


@dataclass(frozen=True)
class Sources:
    """Model, data and code of a job. Paths relative to the job file, or absolute."""

    model: str
    public: dict[str, str]
    """Entry of job.yaml: `path`, and `function`."""
    validation: dict[str, str] | None = None
    private: str = ""
    """A path on each node; '' for none."""
    model_args: dict[str, Any] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe from the arguments of `fit` in a script, {} without a script."""


@dataclass(frozen=True)
class Looks:
    """Properties of a model, its data, and a script."""

    model: ModelInfo
    public: DataLook
    validation: DataLook | None = None
    notes: tuple[tuple[int, str], ...] = ()
    """Parts of the script that are not in the job, by line."""
    misfit: InputError | None = None
    """Why model and data do not fit together. None if they do."""


@dataclass(frozen=True)
class LossChoice:
    """The loss of one output, and why. `from_logits` None: unknown."""

    name: str
    from_logits: bool | None
    reason: str


def is_any_size(model: ModelInfo) -> bool:
    """Return whether the size of the pictures that a model takes is not known from the model."""
    return len(model.input_shape) != 3 or 0 in model.input_shape


def choose_picture_shape(
    model: ModelInfo, pictures: protocol.PictureSizes | None
) -> tuple[tuple[int, ...], str]:
    """Return height, width and channels of pictures, and why, for a model that takes any size."""
    channels = (model.input_shape[2] if len(model.input_shape) == 3 else 3) or 3
    if pictures and pictures.smallest == pictures.largest:
        return (*pictures.smallest, channels), "the size of all images that were inspected"
    return (*DEFAULT_SIZE, channels), "a placeholder"


def choose_loss(looks: Looks) -> LossChoice | None:
    """Return the loss that the recipe has to name. None if compile() has it, or there are several outputs."""
    model, data = looks.model, looks.public.info
    fields = [name for name in data.labels if name != protocol.SAMPLE_WEIGHT]
    if model.has_own_step or len(model.outputs) != 1:
        return None
    [output] = model.outputs
    if not model.compiled:
        return _guess(output, data, fields[0]) if fields and data.label_shape != (0,) else None
    if output.from_logits or output.activation != "linear" or plain_name(output.loss) not in LOGITS:
        return None
    reason = "compile() has this loss without from_logits=True, but the last layer is linear"
    return LossChoice(output.loss, True, reason)


def _guess(output: OutputInfo, data: DatasetInfo, name: str) -> LossChoice:
    dtype, shape = data.labels[name]
    largest = data.max_labels.get(name, -1) if dtype.startswith(("int", "uint")) else -1
    seen = f"labels are {dtype}" + (f" 0…{largest}" if largest >= 0 else "")
    if not output.is_known:
        return LossChoice(SPARSE if largest >= 0 else MSE, None, f"a guess: {seen}, the outputs are unknown")
    classes, places = (output.shape or (0,))[-1], tuple(output.shape[:-1])
    choice = MSE
    if largest >= 0 and classes > 1 and any(equals(form, tuple(shape)) for form in (places, (*places, 1))):
        choice = SPARSE
    elif output.activation == "softmax" and tuple(shape) == output.shape:
        choice = "categorical_crossentropy"
    elif output.activation == "sigmoid" or (0 <= largest <= 1 and classes == 1):
        choice = "binary_crossentropy"
    last = f"the last layer has {classes} outputs ({output.activation or 'unknown activation'})"
    reason = f"{'a guess: ' if choice == MSE else ''}{seen}, {last}"
    if choice == MSE or output.activation == LOGITS[plain_name(choice)]:
        return LossChoice(choice, False, reason)
    return LossChoice(choice, True if output.activation == "linear" else None, reason)


def describe_model(model: ModelInfo) -> str:
    """Return in words: parameters, inputs, outputs."""
    outputs = [
        f"{output.name} {show_shape(output.shape)}"
        f"{f' ({output.activation})' if output.activation else ''}".strip()
        for output in model.outputs
        if output.is_known
    ]
    takes = " and ".join(f"{name} {show_shape(shape)}".strip() for name, shape in model.inputs.items())
    return f"{model.num_parameters:,} parameters; takes {takes}, returns {' and '.join(outputs) or 'unknown'}"


def describe_data(look: DataLook) -> str:
    """Return in words: format, number of samples and classes, shapes, types, sizes of pictures."""
    info = look.info
    counted = f"{look.num_samples:,} samples" if look.num_samples else "samples of unknown number"
    parts = [f"{look.format}: {counted}"]
    if look.class_counts:
        low, high = min(look.class_counts.values()), max(look.class_counts.values())
        parts = [f"{look.format}: {look.num_samples:,} files in {len(look.class_counts)} classes"]
        parts.append(f"{low:,} to {high:,} files each" if low != high else f"{low:,} files each")
    if look.pictures:
        sizes = dict.fromkeys((show_shape(look.pictures.smallest), show_shape(look.pictures.largest)))
        formats = " and ".join(look.pictures.formats)
        parts.append(f"{formats}, {' to '.join(sizes)} pixels (height×width)")
    else:
        parts.append(f"samples {describe_arrays(info.inputs)}")
    if not look.class_counts:
        labels = describe_arrays(info.labels) if info.label_shape != (0,) else "none"
        parts.append(f"labels {labels}" + (f" 0…{info.max_label}" if info.max_label >= 0 else ""))
    if not look.is_whole:
        parts.append(f"{info.num_samples + sum(info.num_skipped.values()):,} inspected")
    reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in info.num_skipped.items()]
    parts += [f"skipped: {', '.join(reasons)}"] * bool(reasons)
    return ", ".join(parts)


def render_draft(sources: Sources, *, is_compiled: bool = True) -> str:
    """Return a job.yaml that is good enough to look at the model and the data with."""
    data = {"public": sources.public} | ({"validation": sources.validation} if sources.validation else {})
    recipe: dict[str, Any] = {"epochs": 1}
    recipe |= {} if is_compiled else {"optimizer": "adam", "learning_rate": 0.001}
    content = {"model": sources.model, "model_args": sources.model_args, "data": data, "recipe": recipe}
    return _value(content | ({"code": list(sources.code)} if sources.code else {}))


def render_job(sources: Sources, looks: Looks) -> str:
    """Return the job.yaml."""
    lines = [
        "# Written by `csdctl init` from the model and the data. Paths are relative to this file.",
        "# All keys: docs/reference/files.md.",
        *(_line("", f"THIS DOES NOT FIT YET: {looks.misfit.message}") if looks.misfit else []),
        *_line(f"model: {_value(sources.model)}", describe_model(looks.model)),
    ]
    if sources.model_args:
        lines += _line(f"model_args: {_value(sources.model_args)}")
    if sources.code:
        lines += _line(f"code: {_value(list(sources.code))}", "imported by the files above")
    lines += ["data:"]
    lines += [line for text, why in _data(sources, looks) for line in _line(text, why, 2)]
    lines += ["recipe:"]
    lines += [line for text, why in _recipe(sources.recipe, looks) for line in _line(text, why, 2)]
    return "\n".join(lines) + "\n"


def _data(sources: Sources, looks: Looks) -> Iterator[tuple[str, str]]:
    look = looks.public
    yield f"public: {_value(sources.public)}", describe_data(look)
    if sources.validation and looks.validation:
        yield f"validation: {_value(sources.validation)}", describe_data(looks.validation)
    else:
        yield "# validation: {path: PATH}", "evaluated after each epoch"
    if sources.private:
        private = sources.public | {"path": sources.private}
        yield f"private: {_value(private)}", "on each node; never leaves it; not inspected"
    else:
        yield "# private: {path: PATH}", "on each node, at the same path; never leaves it"
    scaling = looks.model.scaling_layers
    if all(dtype != "uint8" for dtype, _ in look.info.inputs.values()):
        pass
    elif sources.recipe:
        yield "input_range: null", "the data is what the script passes to fit"
    elif scaling:
        yield "input_range: null", f"the model scales its inputs itself: {', '.join(scaling[:3])}"
    else:
        yield "input_range: [0, 1]", "uint8 values 0…255 become 0…1; the model has no Rescaling layer"
    if look.table:
        dropped = {"drop": list(look.table.dropped)} if look.table.dropped else {}
        entry = {"label": look.table.labels[0]} | dropped
        yield f"csv: {_value(entry)}", "also drop: [COLUMN], weight: COLUMN"
    if look.format == "class folders":
        if is_any_size(looks.model):
            _, why = choose_picture_shape(looks.model, look.pictures)
            yield f"image: {{shape: {list(look.info.sample_shape)}}}", f"the model takes any size: {why}"
        else:
            size = show_shape(looks.model.input_shape)
            yield "# image: {fit: stretch}", f"images are stretched to the model's {size}; or crop, or pad"


def _recipe(of_script: Mapping[str, Any], looks: Looks) -> Iterator[tuple[str, str]]:
    compiled, outputs = looks.model.compiled, looks.model.outputs
    yield from ((f"{key}: {_value(value)}", "from fit") for key, value in of_script.items())
    if not of_script:
        yield "epochs: 10", "a placeholder: set it before `csdctl tune`"
        yield (
            "# reference_batch: 256",
            "the batch size that the learning rate is for, such as fit's batch_size (32 unless given): at "
            "global batch size N the rate is learning_rate · N / reference_batch",
        )
    yield from _optimizer(looks.model, has_script=bool(of_script))
    if choice := choose_loss(looks):
        yield f"loss: {choice.name}", choice.reason
        if choice.from_logits is not False:
            sure = "" if choice.from_logits else "# "
            yield f"{sure}from_logits: true", "the outputs are logits" if not sure else "if they are logits"
    elif named := {output.name: output.loss for output in outputs if output.loss}:
        yield f"# loss: {_value(named if len(outputs) > 1 else next(iter(named.values())))}", "of compile()"
    if compiled and compiled.metrics:
        yield f"# metrics: {_value(list(compiled.metrics))}", "of compile()"


def _optimizer(model: ModelInfo, *, has_script: bool) -> Iterator[tuple[str, str]]:
    """Yield the entries of the optimizer. A train_step of the model's own has its own one."""
    compiled = model.compiled
    if compiled and compiled.optimizer:
        schedule = f"{compiled.schedule} from " if compiled.schedule else ""
        rate = f"{schedule}{compiled.learning_rate:g}"
        yield "# learning_rate, optimizer", f"those of compile(): {compiled.optimizer}, {rate}"
        if has_script and compiled.optimizer.startswith("Adam") and not schedule:
            yield f"# max_learning_rate: {rate}", "keeps the rate, often better for Adam than scaling it"
    elif not model.has_own_step:
        yield "learning_rate: 0.001", "a placeholder: the model is not compiled with an optimizer"
        yield "optimizer: adam", "a placeholder; any optimizer of Keras"


def _value(value: Any) -> str:
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _line(text: str, comment: str = "", indent: int = 0) -> list[str]:
    """Return an entry with its comment: after it if there is room, otherwise above it."""
    space = " " * indent
    comment = make_printable(" ".join(comment.split()))
    if not comment:
        return [f"{space}{text}"]
    beside = f"{space}{text}  # {comment}"
    if text and len(beside) <= MAX_COLUMN:
        return [beside]
    above = textwrap.wrap(comment, MAX_COLUMN - indent - 2, break_long_words=False, break_on_hyphens=False)
    return [*(f"{space}# {part}" for part in above), *([f"{space}{text}"] if text else [])]


@dataclass(frozen=True)
class InitRequest:
    """The options. '' and () for those that were not given."""

    output: Path
    model: str = ""
    public: str = ""
    validation: str = ""
    private: str = ""
    model_args: dict[str, Any] | None = None
    code: tuple[Path, ...] = ()
    label: str = ""
    dropped: tuple[str, ...] = ()
    is_overwriting: bool = False
    script: Path | None = None
    """A training script, in place of `model`, `public` and `validation`."""
    options: tuple[str, ...] = ()
    """The options that the script is called with."""


def init_job(request: InitRequest, directory: Path, say: Say, on_progress: OnProgress) -> Looks:
    """Write a job file, and return what was seen. Raises InputError where nothing is written.

    A file whose model and data do not fit together is written for the user to mend.
    """
    script = request.script
    functions = _check_script(script, request) if script else None
    check_output(request.output, "--output", force=request.is_overwriting)
    if not script:
        sources = parse_sources(request)
        model_reference(sources.model, request.output.parent / "--model")
    notes: tuple[tuple[int, str], ...] = ()
    project = ProjectDirectory(directory)
    with closing(LocalSession(HOST_NAME, directory)) as host:
        looking = _Looking(
            request=request,
            host=host,
            project=project,
            worker=store_worker(project),
            say=say,
            on_progress=on_progress,
        )
        if script and functions:
            fit = looking.record(script)
            notes = fit.notes
            save_text(functions, _render_functions(script, request.options))  # the worker reads this file
            sources = _sources_of_script(script, fit, functions, request)
        try:
            looks = looking.look(sources)
        except InputError as error:
            if "data." in error.remedy or "job.yaml" in error.remedy:
                error.remedy += f"; {request.output} does not exist yet: see `csdctl init --help`"
            raise
        looks = replace(looks, notes=notes, misfit=looking.check(sources, looks))
    save_text(request.output, render_job(sources, looks))
    return looks


def _check_script(script: Path, request: InitRequest) -> Path:
    if script.suffix == ".ipynb":
        remedy = f"jupyter nbconvert --to script {script}, or call csdctl.Job.from_model in the notebook"
        raise InputError(f"{script} is a notebook, expected a script", remedy=remedy)
    try:
        ast.parse(script.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{script} does not exist", remedy="pass the path of a training script") from None
    except (OSError, ValueError, SyntaxError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = getattr(error, "msg", None) or error
        raise InputError(f"{script}{where}: not valid Python: {reason}", remedy=f"fix {script}") from None
    if not any(b".fit" in file.read_bytes() for file in python_files([script, *_find_beside(script)])):
        remedy = "call it in this script, or pass functions for model and data: --model and --public"
        raise InputError(f"{script}: no call of model.fit", remedy=remedy)
    functions = request.output.parent / f"{script.stem}_functions.py"
    first_line = functions.read_text(errors="replace").partition("\n")[0] if functions.is_file() else ""
    check_output(functions, "--output", force=request.is_overwriting or first_line.endswith(WRITTEN))
    return functions


def _render_functions(script: Path, options: Sequence[str]) -> str:
    """Return the functions of a script. They import its modules, so that a change of one is noticed."""
    modules = [path.stem for path in _find_beside(script)]
    return FUNCTIONS.format(
        WRITTEN=WRITTEN,
        name=script.name,
        script=json.dumps(str(script)),
        options=json.dumps(options),
        sha256=hashlib.sha256(script.read_bytes()).hexdigest(),
        imports="".join(f"import {module}  # csdctl notices its changes\n" for module in modules),
    )


def _sources_of_script(script: Path, fit: ScriptFit, functions: Path, request: InitRequest) -> Sources:
    data = {"path": functions.name, "function": f"{functions.name}:training_data"}
    return Sources(
        model=f"{functions.name}:build",
        public=data,
        validation=data | {"function": f"{functions.name}:validation_data"} if fit.has_validation else None,
        code=_find_code([], (*_find_beside(script), *request.code), request.output.parent),
        recipe=fit.recipe,
    )


def parse_sources(request: InitRequest) -> Sources:
    """Return model and data as the job file names them. Raises InputError for a file that does not exist."""
    base = request.output.parent
    validation = _parse_data("--validation", request.validation, base) if request.validation else None
    public, model = _parse_data("--public", request.public, base), _parse_model(request.model, base)
    home = os.path.join(Path.home(), "")  # a shell has put this machine's home in place of `~`
    private = request.private
    if private.startswith(home) and len(home) > 2:
        private = f"~/{private.removeprefix(home)}"
    references = [model, public.get("function", ""), (validation or {}).get("function", "")]
    code = _find_code([reference.rpartition(":")[0] for reference in references], request.code, base)
    return Sources(
        model=model,
        public=public,
        validation=validation,
        private=private,
        model_args=request.model_args or {},
        code=code,
    )


def _parse_model(text: str, base: Path) -> str:
    if text.startswith("keras.applications:"):
        return text
    file, separator, function = (text, "", "") if text.endswith(".keras") else text.rpartition(":")
    if not (file.endswith(".keras") or (file.endswith(".py") and function)):
        raise InputError(
            f"--model {text!r} is not a valid reference",
            remedy="expected keras.applications:NAME, PATH.keras or PATH.py:FUNCTION",
        )
    path = _written_from(base, file, "--model")
    if file.endswith(".py") and TRAINS.search(Path(file).expanduser().read_bytes()):
        remedy = f"run csdctl init {file}"
        raise InputError(f"--model: {file} trains a model when it is imported", remedy=remedy)
    return f"{path}{separator}{function}"


def _parse_data(option: str, text: str, base: Path) -> dict[str, str]:
    """Return the entry for PATH, FILE.py:FUNCTION (whose path is its file) or FILE.py:FUNCTION:PATH."""
    if ".py:" not in text:
        return {"path": _written_from(base, text, option)}
    stem, _, after = text.partition(".py:")
    name, _, path = after.partition(":")
    if not name.isidentifier():
        raise InputError(f"{option} {text!r} does not name a function", remedy="expected PATH.py:FUNCTION")
    file = f"{stem}.py"
    function = f"{_written_from(base, file, option)}:{name}"
    return {"path": _written_from(base, path or file, option), "function": function}


def _written_from(base: Path, text: str, option: str = "") -> str:
    """Return a path as a file in `base` names it: relative if it is below, or else absolute."""
    path = Path(os.path.abspath(Path(text).expanduser()))
    if option and not path.exists():
        raise InputError(f"{option}: {text} does not exist", remedy="pass the path of an existing file")
    base = Path(os.path.abspath(base))
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def _find_code(references: list[str], paths: tuple[Path, ...], base: Path) -> tuple[str, ...]:
    files = [base / reference for reference in references if reference.endswith(".py")]
    modules = [module for file in files for module in _find_beside(file) if module not in files]
    code = [*(path.absolute() for path in paths), *modules]
    return tuple(dict.fromkeys(_written_from(base, str(path)) for path in code))


def _find_beside(file: Path) -> tuple[Path, ...]:
    paths = sorted(file.parent.iterdir())
    is_package = {path: path.name.isidentifier() and any(path.glob("*.py")) for path in paths}
    return find_imported(file, [path for path in paths if path.suffix == ".py" or is_package[path]])


@dataclass(frozen=True)
class _Looking:
    """Looks at the sources of one job, by worker programs on the host."""

    request: InitRequest
    host: LocalSession
    project: ProjectDirectory
    worker: StoredFile
    say: Say
    on_progress: OnProgress

    def record(self, script: Path) -> ScriptFit:
        self.say(f"running {script} up to its call of fit")
        call = partial(call_worker, self.host, sys.executable, self.worker.path, doing=f"running {script}")
        request = ScriptRequest(str(script), self.request.options)
        return call("record", request, ScriptFit, patience=within(SCRIPT_DEADLINE_S))

    def look(self, sources: Sources) -> Looks:
        self.say(f"inspecting the model: {self.request.script or sources.model}")
        job = self._parse(render_draft(sources))
        try:
            model = self._serialize(job).info
        except InputError:  # it may be compiled without an optimizer
            job = self._parse(render_draft(sources, is_compiled=False))
            model = self._serialize(job).info
        self.say(f"inspecting the data: {self.request.script or sources.public['path']}")
        public = self._look_at_public(job, model)
        if not model.is_built:
            model = self._serialize(job, public.info).info
        return Looks(model, public, self._look_at_validation(job, model, public))

    def check(self, sources: Sources, looks: Looks) -> InputError | None:
        try:
            model = self._serialize(self._parse(render_job(sources, looks)), looks.public.info)
            validation = looks.validation.info if looks.validation else None
            datasets = {"public": looks.public.info, "validation": validation}
            check_compatibility(model.info, datasets)
        except InputError as error:
            return error
        return None

    def _parse(self, text: str) -> Job:
        path = self.request.output.absolute()
        return parse_job(text, path, name=str(self.request.output))

    def _serialize(self, job: Job, data: DatasetInfo | None = None) -> SerializedModel:
        model = serialize_model(job, self.worker, self.host, self.project)
        if model.info.is_built or data is None:
            return model
        return serialize_model(job, self.worker, self.host, self.project, shapes_of(data))

    def _look_at_public(self, job: Job, model: ModelInfo) -> DataLook:
        spec = replace(first_spec(job, model), names_classes=True)
        if is_any_size(model):
            shape, _ = choose_picture_shape(model, None)
            spec = replace(spec, picture=replace(spec.picture, shape=shape))
        look = self._look("public", job.data.public, job, spec)
        if is_any_size(model) and look.pictures:
            shape, _ = choose_picture_shape(model, look.pictures)
            look = replace(look, info=replace(look.info, sample_shape=shape))
        return look

    def _look_at_validation(self, job: Job, model: ModelInfo, public: DataLook) -> DataLook | None:
        if job.data.validation is None:
            return None
        spec = replace(follow(first_spec(job, model), public.info), table=public.table)
        if public.pictures:
            spec = replace(spec, picture=replace(spec.picture, shape=public.info.sample_shape))
        return self._look("validation", job.data.validation, job, spec)

    def _look(self, name: str, data: HostData, job: Job, spec: PrepareSpec) -> DataLook:
        spec, _ = add_function(spec, job, data.function, self.project)
        call = partial(call_worker, self.host, sys.executable, self.worker.path, doing="inspecting the data")
        source = replace(spec, source=str(data.path))
        request = protocol.LookSpec(source, self.request.label, self.request.dropped)
        return call("look", request, DataLook, partial(self.on_progress, name))
