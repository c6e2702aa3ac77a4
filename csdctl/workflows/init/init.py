"""`init`: a first job.yaml from a look at a model and its data, with the reasons as comments.

The worker programs that `prepare` uses do the looking, in processes of their own: `build` for the model, and
`look` for the data, which reads some samples and keeps none. No node is contacted.
"""

import math
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from csdctl.documents import check_output, save_text
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.compatibility import LOGITS, check_compatibility, plain_name, show_shape
from csdctl.job.model import Job, find_imported, model_reference, parse_job
from csdctl.notify import Say, make_printable
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile
from csdctl.shipping.worker_calls import call_worker
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.datasets import (
    SAMPLE_WEIGHT,
    DataLook,
    DatasetInfo,
    LookSpec,
    PrepareSpec,
    equals,
)
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo, OwnCompile
from csdctl.workflows.data.files import SerializedModel, serialize_model, shapes_of, store_worker
from csdctl.workflows.data.prepare import add_function, first_spec, follow
from csdctl.workflows.init.script import WRITTEN, LiftedScript, lift_script, trains_on_import
from csdctl.workflows.workspace.event_stream import OnProgress

DEFAULT_SIZE = (224, 224)
"""Height and width that most models of keras.applications were made for."""
MIN_APPLICATION_SIZE = 32
SYMMETRIC = ("Mobile", "Inception", "Xception", "NASNet")
"""Beginnings of names in keras.applications with weights for values of -1 to 1; so are those ending in V2."""
MAX_COLUMN = 110
SPARSE, MSE = "sparse_categorical_crossentropy", "mean_squared_error"
OPTIONS = {
    "data.public.path:": "--public",
    "another one as data.validation.path": "--validation for another of them",
    "set data.allow_nan: true in job.yaml": "set data.allow_nan: true in a job.yaml of your own",
    "add to job.yaml: code: ": "pass each file or package: --code ",
    "data.csv.drop": "--drop",
    "data.csv in job.yaml": "--label and --drop",
    "data.tfrecord in job.yaml": "data.tfrecord in a job.yaml of your own",
}


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
    """Keys of the recipe from the arguments of `fit` in a script, after `# ` if the value is only a comment.

    {} without a script.
    """

    @property
    def is_application(self) -> bool:
        """Whether the model is one of keras.applications."""
        return self.model.startswith("keras.applications:")


@dataclass(frozen=True)
class Looks:
    """Descriptions of a model and its data."""

    model: ModelInfo
    public: DataLook
    validation: DataLook | None = None


@dataclass(frozen=True)
class LossChoice:
    """The loss of one output, and why. `from_logits` None: unknown."""

    name: str
    from_logits: bool | None
    reason: str


def is_any_size(model: ModelInfo) -> bool:
    """Return whether the size of the pictures that a model takes is not known from the model."""
    return len(model.input_shape) != 3 or 0 in model.input_shape


def choose_size(data: DataLook) -> tuple[tuple[int, ...], str]:
    """Return height and width for pictures, and why, for a model that takes any."""
    sizes = data.pictures
    if sizes and sizes.smallest == sizes.largest:
        return sizes.smallest, "the size of all images that were inspected"
    return DEFAULT_SIZE, "a placeholder"


def choose_application_args(data: DataLook) -> dict[str, Any]:
    """Return arguments for a model of keras.applications: to train from scratch on these pictures."""
    shape = data.info.sample_shape
    size = choose_size(data)[0] if data.pictures else shape[:2]
    channels = shape[2] if not data.pictures and len(shape) == 3 else 3
    sides = [max(MIN_APPLICATION_SIZE, side) for side in size]
    num_classes = len(data.class_counts) or data.info.max_label + 1
    classes = {"classes": num_classes} if num_classes > 0 else {}
    return {"input_shape": [*sides, channels], "weights": None, **classes}


def choose_input_range(sources: Sources, looks: Looks) -> tuple[str, str] | None:
    """Return the value of `data.input_range` and why, None for data that it does not apply to."""
    if not any(dtype == "uint8" for dtype, _ in looks.public.info.inputs.values()):
        return None
    if sources.recipe:
        return "null", "the data is what the script passes to fit"
    if looks.model.scaling_layers:
        return "null", f"the model scales its inputs itself: {', '.join(looks.model.scaling_layers[:3])}"
    name = sources.model.partition(":")[2]
    is_symmetric = name.startswith(SYMMETRIC) or (name.startswith("ResNet") and name.endswith("V2"))
    if sources.is_application and is_symmetric and sources.model_args.get("weights", "imagenet"):
        return "[-1, 1]", f"as keras.applications' preprocess_input of {name}"
    return "[0, 1]", "uint8 values 0…255 become 0…1; the model has no Rescaling layer"


def choose_losses(looks: Looks) -> dict[str, LossChoice]:
    """Return the losses that the recipe has to name, by output, '' for the only one.

    None for a compiled model, unless its last layer gives logits and its loss does not know.
    """
    model, data = looks.model, looks.public.info
    outputs = model.outputs
    if model.compiled:
        only = outputs[0] if len(outputs) == 1 else None
        if (
            only is None
            or only.from_logits
            or only.activation != "linear"
            or plain_name(only.loss) not in LOGITS
        ):
            return {}
        why = "compile() has this loss without from_logits=True, but the last layer is linear"
        return {"": LossChoice(only.loss, True, why)}
    fields = [name for name in data.labels if name != SAMPLE_WEIGHT]
    if data.label_shape == (0,) or not fields:
        return {}
    if len(outputs) == 1:
        return {"": _guess(outputs[0], data, fields[0])}
    names = [output.name for output in outputs]
    pairs = zip(outputs, names if set(names) <= set(fields) else fields, strict=False)
    return {output.name: _guess(output, data, name) for output, name in pairs}


def _guess(output: OutputInfo, data: DatasetInfo, name: str) -> LossChoice:
    """Return a loss that labels and last layer suggest."""
    dtype, shape = data.labels[name]
    largest = data.max_labels.get(name, -1) if dtype.startswith(("int", "uint")) else -1
    seen = f"labels are {dtype}" + (f" 0…{largest}" if largest >= 0 else "")
    if not output.is_known:
        return LossChoice(SPARSE if largest >= 0 else MSE, None, f"a guess: {seen}, the outputs are unknown")
    classes, places = (output.shape or (0,))[-1], tuple(output.shape[:-1])
    choice = MSE
    if largest >= 0 and classes > 1 and any(equals(one, tuple(shape)) for one in (places, (*places, 1))):
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
        f"{one.name} {show_shape(one.shape)}{f' ({one.activation})' if one.activation else ''}".strip()
        for one in model.outputs
        if one.is_known
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
        parts.append(f"samples {_describe_arrays(info.inputs)}")
    if not look.class_counts:
        labels = _describe_arrays(info.labels) if info.label_shape != (0,) else "none"
        parts.append(f"labels {labels}" + (f" 0…{info.max_label}" if info.max_label >= 0 else ""))
    if not look.is_whole:
        parts.append(f"{info.num_samples + sum(info.num_skipped.values()):,} inspected")
    reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in info.num_skipped.items()]
    parts += [f"skipped: {', '.join(reasons)}"] * bool(reasons)
    return ", ".join(parts)


def _describe_arrays(arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return " and ".join(
        f"{name} {dtype} {show_shape(shape) if shape else ''}".strip()
        for name, (dtype, shape) in arrays.items()
    )


def render_draft(sources: Sources, image: Sequence[int] = (), *, is_compiled: bool = True) -> str:
    """Return a job.yaml that is good enough to look at the model and the data with."""
    data: dict[str, Any] = {"public": sources.public}
    data |= {"validation": sources.validation} if sources.validation else {}
    data |= {"image": {"shape": [*image, 3]}} if image else {}
    recipe: dict[str, Any] = {"epochs": 1}
    recipe |= {} if is_compiled else {"optimizer": "adam", "learning_rate": 0.001}
    content = {"model": sources.model, "model_args": sources.model_args, "data": data, "recipe": recipe}
    return _value(content | ({"code": list(sources.code)} if sources.code else {}))


def render_job(sources: Sources, looks: Looks, misfit: str = "") -> str:
    """Return the job.yaml. `misfit` says why model and data do not fit together, '' if they do."""
    lines = [
        "# Written by `csdctl init` from the model and the data. Paths are relative to this file.",
        "# All keys: docs/reference/files.md.",
        *(_line("", f"THIS DOES NOT FIT YET: {misfit}") if misfit else []),
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
    """Yield the entries of the data section, and why."""
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
    if scaled := choose_input_range(sources, looks):
        yield f"input_range: {scaled[0]}", scaled[1]
    if look.table:
        dropped = {"drop": list(look.table.drop)} if look.table.drop else {}
        entry = {"label": look.table.label[0]} | dropped
        yield f"csv: {_value(entry)}", "also drop: [COLUMN], weight: COLUMN"
    if look.format == "class folders":
        if is_any_size(looks.model):
            shape = list(look.info.sample_shape)
            yield f"image: {{shape: {shape}}}", f"the model takes any size: {choose_size(look)[1]}"
        else:
            size = show_shape(looks.model.input_shape)
            yield "# image: {fit: stretch}", f"images are stretched to the model's {size}; or crop, or pad"


def _recipe(lifted: Mapping[str, Any], looks: Looks) -> Iterator[tuple[str, str]]:
    """Yield the entries of the recipe, and why."""
    compiled, outputs = looks.model.compiled, looks.model.outputs
    for key, value in _with_min_factor(lifted, compiled).items():
        yield f"{key}: {_value(value)}", "" if key.startswith("#") else "from fit"
    if not lifted:
        yield "epochs: 10", "a placeholder: set it before `csdctl tune`"
        yield (
            "# reference_batch: 256",
            "the batch size that the learning rate is for, such as fit's batch_size (32 unless given): at "
            "global batch size N the rate is learning_rate · N / reference_batch",
        )
    yield from _optimizer(looks.model, is_lifted=bool(lifted))
    losses = {} if looks.model.has_own_step else choose_losses(looks)
    if "" in losses:
        choice = losses[""]
        yield f"loss: {choice.name}", choice.reason
        if choice.from_logits is not False:
            sure = "" if choice.from_logits else "# "
            yield f"{sure}from_logits: true", "the outputs are logits" if not sure else "if they are logits"
    elif losses:
        described = {
            name: {"name": one.name, "from_logits": True} if one.from_logits else one.name
            for name, one in losses.items()
        }
        yield f"loss: {_value(described)}", "; ".join(f"{name}: {one.reason}" for name, one in losses.items())
    elif named := {output.name: output.loss for output in outputs if output.loss}:
        yield f"# loss: {_value(named if len(outputs) > 1 else next(iter(named.values())))}", "of compile()"
    metrics = list(compiled.metrics) if compiled and compiled.metrics else ["accuracy"]
    yield f"# metrics: {_value(metrics)}", "of compile()" if compiled and compiled.metrics else "or others"
    if lifted:
        return
    yield '# class_weight: {"0": 1.0, "1": 5.0}', "as fit's class_weight"
    monitor = "val_loss" if looks.validation else "loss"
    yield f"# early_stopping: {{monitor: {monitor}, patience: 5}}", "like keras.callbacks.EarlyStopping"


def _optimizer(model: ModelInfo, *, is_lifted: bool) -> Iterator[tuple[str, str]]:
    """Yield the entries of the optimizer. A train_step of the model's own has its own one."""
    compiled = model.compiled
    if compiled and compiled.optimizer:
        schedule = f"{compiled.schedule} from " if compiled.schedule else ""
        rate = f"{schedule}{compiled.learning_rate:g}"
        yield "# learning_rate, optimizer", f"those of compile(): {compiled.optimizer}, {rate}"
        if is_lifted and compiled.optimizer.startswith("Adam") and not schedule:
            yield f"# max_learning_rate: {rate}", "keeps the rate, often better for Adam than scaling it"
    elif not model.has_own_step:
        yield "learning_rate: 0.001", "a placeholder: the model is not compiled with an optimizer"
        yield "optimizer: adam", "a placeholder; any optimizer of Keras"


def _with_min_factor(lifted: Mapping[str, Any], compiled: OwnCompile | None) -> Mapping[str, Any]:
    """Return the keys with the lowest learning rate of reduce_on_plateau as a share of that of compile()."""
    plateau = dict(lifted.get("reduce_on_plateau", {}))
    if (lowest := plateau.pop("min_lr", 0)) and compiled and compiled.learning_rate:
        plateau["min_factor"] = float(f"{min(1.0, lowest / compiled.learning_rate):.6g}")
    return {**lifted, **({"reduce_on_plateau": plateau} if plateau else {})}


def _value(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _line(text: str, comment: str = "", indent: int = 0) -> list[str]:
    """Return an entry with its comment: behind it if there is room, otherwise above it."""
    space = " " * indent
    comment = make_printable(" ".join(comment.split()))
    if not comment:
        return [f"{space}{text}"]
    beside = f"{space}{text}  # {comment}"
    if text and len(beside) <= MAX_COLUMN:
        return [beside]
    above = textwrap.wrap(comment, MAX_COLUMN - indent - 2, break_long_words=False, break_on_hyphens=False)
    return [*(f"{space}# {part}" for part in above), *([f"{space}{text}"] if text else [])]


"""Options of `init` in place of the keys of a job.yaml that does not exist yet."""


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

    @property
    def functions(self) -> Path:
        """The file of the functions that are written from `script`."""
        assert self.script
        return self.output.parent / f"{self.script.stem}_functions.py"


@dataclass(frozen=True)
class Written:
    """The job file that was written, and what was seen."""

    path: Path
    looks: Looks
    notes: tuple[tuple[int, str], ...]
    """What of the script was not taken over, by line."""
    misfit: InputError | None
    """Why model and data do not fit together; None if they do."""


def init_job(request: InitRequest, directory: Path, say: Say, on_progress: OnProgress) -> Written:
    """Write a job file. Raises InputError where nothing is written.

    If model and data do not fit together, the file is written all the same, for the user to mend, and the
    problem is in the result.
    """
    lifted = lift_script(request.script, request.options) if request.script else None
    check_output(request.output, "--output", force=request.is_overwriting)
    if lifted:
        check_output(
            request.functions, "--output", force=request.is_overwriting or _is_own(request.functions)
        )
        save_text(request.functions, lifted.text)  # the worker reads this file
        request = _request_of(request, lifted)
    return _write_job(request, lifted, directory, say, on_progress)


def _is_own(functions: Path) -> bool:
    """Return whether `init` has written this file of functions, and nobody else."""
    return functions.is_file() and functions.read_text(errors="replace").split("\n")[0].endswith(WRITTEN)


def _write_job(
    request: InitRequest, lifted: LiftedScript | None, directory: Path, say: Say, on_progress: OnProgress
) -> Written:
    sources = replace(parse_sources(request), recipe=lifted.recipe if lifted else {})
    if not lifted:  # before the data, which takes longer to look at
        model_reference(sources.model, request.output.parent / "--model")
    with closing(LocalSession(HOST_NAME, directory)) as host:
        project = ProjectDirectory(directory)
        looking = _Looking(request, host, project, store_worker(project), say, on_progress)
        try:
            sources, looks = looking.look(sources)
        except InputError as error:
            remedy = error.remedy
            for key, option in OPTIONS.items():
                remedy = remedy.replace(key, option)
            raise InputError(error.message, remedy=remedy) from None
        misfit = looking.check(sources, looks)
    save_text(request.output, render_job(sources, looks, misfit.message if misfit else ""))
    return Written(request.output, looks, lifted.notes if lifted else (), misfit)


def _request_of(request: InitRequest, lifted: LiftedScript) -> InitRequest:
    """Return the request with the functions of a script."""
    build, _, *data = lifted.functions
    names = (build, *data)
    model, public, validation = (f"{request.functions}:{name}" for name in names)
    return replace(
        request, model=model, public=public, validation=validation if lifted.has_validation else ""
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
    functions = [model, *(found.get("function", "") for found in (public, validation or {}))]
    code = _find_code([text.rpartition(":")[0] for text in functions], request.code, base)
    return Sources(model, public, validation, private, request.model_args or {}, code)


def _parse_model(text: str, base: Path) -> str:
    if text.startswith("keras.applications:"):
        return text
    file, separator, function = (text, "", "") if text.endswith(".keras") else text.rpartition(":")
    if not (file.endswith(".keras") or (file.endswith(".py") and function)):
        raise InputError(
            f"--model {text!r} is not a valid reference",
            remedy="expected keras.applications:NAME, PATH.keras or PATH.py:FUNCTION",
        )
    if file.endswith(".py") and trains_on_import(Path(file)):
        raise InputError(
            f"--model: {file} trains a model when it is imported", remedy=f"run csdctl init {file}"
        )
    return f"{_written_from(base, file, '--model')}{separator}{function}"


def _parse_data(option: str, text: str, base: Path) -> dict[str, str]:
    """Return the entry of job.yaml for PATH, FILE.py:FUNCTION or FILE.py:FUNCTION:PATH.

    Without a path, a function is called with that of its own file.
    """
    if ".py:" not in text:
        return {"path": _written_from(base, text, option)}
    stem, _, rest = text.partition(".py:")
    name, _, path = rest.partition(":")
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


def _find_code(named: list[str], given: tuple[Path, ...], base: Path) -> tuple[str, ...]:
    """Return the files and packages that were given, and those that files of the job import."""
    files = [base / name for name in named if name.endswith(".py")]
    found = [path.absolute() for path in given]
    for file in files:
        beside = [
            path
            for path in sorted(file.parent.iterdir())
            if path.suffix == ".py" or (path.name.isidentifier() and any(path.glob("*.py")))
        ]
        found += [path for path in find_imported(file, beside) if path not in files]
    return tuple(dict.fromkeys(_written_from(base, str(path)) for path in found))


@dataclass(frozen=True)
class _Looking:
    """Looks at the sources of one job, by worker programs on the host."""

    request: InitRequest
    host: LocalSession
    project: ProjectDirectory
    worker: StoredFile
    say: Say
    on_progress: OnProgress

    def look(self, sources: Sources) -> tuple[Sources, Looks]:
        """Return what was seen, and the sources, completed by it. Raises InputError."""
        self.say(f"inspecting the data: {self.request.script or sources.public['path']}")
        if sources.is_application and not sources.model_args:  # its arguments depend on the data
            first = self._look_at_public(self._parse(render_draft(sources, DEFAULT_SIZE)), None)
            sources = replace(sources, model_args=choose_application_args(first))
        job = self._parse(render_draft(sources, is_compiled=not sources.is_application))
        self.say(f"inspecting the model: {self.request.script or sources.model}")
        try:
            model = self._serialize(job).info
        except InputError:  # it may be compiled without an optimizer
            job = self._parse(render_draft(sources, is_compiled=False))
            model = self._serialize(job).info
        first = self._look_at_public(job, model)
        if not model.is_built:
            model = self._serialize(job, first.info).info
        return sources, Looks(model, first, self._look_at_validation(job, model, first))

    def check(self, sources: Sources, looks: Looks) -> InputError | None:
        """Return what `prepare` would say to the job file, None if it is content."""
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

    def _look_at_public(self, job: Job, model: ModelInfo | None) -> DataLook:
        spec = first_spec(job, model or ModelInfo(job.model, {}, 0, 0, is_built=False))
        takes_any = model is not None and is_any_size(model)
        if model and takes_any and job.data.image.shape is None:
            spec = replace(spec, picture=replace(spec.picture, shape=_picture_shape(model, DEFAULT_SIZE)))
        found = self._look("public", job, replace(spec, names_classes=True), str(job.data.public.path))
        if model and takes_any and found.pictures:
            shape = _picture_shape(model, choose_size(found)[0])
            found = replace(found, info=replace(found.info, sample_shape=shape))
        return found

    def _look_at_validation(self, job: Job, model: ModelInfo, public: DataLook) -> DataLook | None:
        if job.data.validation is None:
            return None
        spec = follow(first_spec(job, model), public.info)
        if public.pictures:
            spec = replace(spec, picture=replace(spec.picture, shape=public.info.sample_shape))
        spec = replace(spec, table=public.table)
        return self._look("validation", job, spec, str(job.data.validation.path))

    def _look(self, name: str, job: Job, spec: PrepareSpec, source: str) -> DataLook:
        data = job.data.public if name == "public" else job.data.validation
        function = data.function if data else ""
        spec, _ = add_function(spec, job, function, self.project)
        return call_worker(
            self.host,
            sys.executable,
            self.worker.path,
            "look",
            LookSpec(replace(spec, source=source), self.request.label, self.request.dropped),
            DataLook,
            lambda progress: self.on_progress(name, progress),
            doing="inspecting the data",
        )


def _picture_shape(model: ModelInfo, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of pictures for a model that takes any size."""
    channels = model.input_shape[2] if len(model.input_shape) == 3 else 3
    return (*size, channels or 3)
