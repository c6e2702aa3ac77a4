"""The job as a frozen dataclass and as flat named values, and the pydantic models of job.yaml."""

import ast
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from csdctl.documents import Document, load_document
from csdctl.errors import InputError
from csdctl.worker.protocol.datasets import ImageRule, RecordSchema, TableSchema
from csdctl.worker.protocol.recipe import Argument, EarlyStopping, LossTerm, Noise, Recipe, ReduceOnPlateau

Weight = Annotated[float, Field(ge=0)]
MonitorT = TypeVar("MonitorT", EarlyStopping, ReduceOnPlateau)
OF_FIT = {
    "recipe.early_stopping.restore_best_weights": "best.keras is always saved: remove the key",
    "recipe.batch_size": "batch sizes come from `csdctl tune`, or `csdctl train --batch-size N`; "
    "recipe.reference_batch is for the learning rate",
}


def _own_name(entry: MonitorT) -> MonitorT:
    """Return `entry` with our name of its metric. Keras calls that of the validation data val_accuracy."""
    keras, metric = entry.monitor[:4], entry.monitor[4:]
    return replace(entry, monitor=f"validation_{metric}") if keras == "val_" else entry


class LossEntry(Document):
    """A loss with its arguments and, of several, its weight."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    weight: Weight = 1.0
    __pydantic_extra__: dict[str, float | bool | str] = Field(init=False)


class ScheduleEntry(Document):
    """A schedule of the learning rate by its Keras name, with its arguments."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
    __pydantic_extra__: dict[str, float | bool | str | list[float]] = Field(init=False)


class ClipEntry(Document):
    """A limit of the mean gradient over all ranks: of its norm, of each variable's norm, or of each value."""

    global_norm: Annotated[float, Field(gt=0)] | None = None
    norm: Annotated[float, Field(gt=0)] | None = None
    value: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(limit is not None for limit in (self.global_norm, self.norm, self.value)) != 1:
            raise ValueError("expected one of global_norm, norm and value")
        return self


class FreezeEntry(Document):
    """Layers that are not trained: this one, and all that lead to it."""

    until: Annotated[str, Field(min_length=1)]


_OneLoss = Annotated[str, Field(min_length=1)] | LossEntry


class RecipeEntry(Document):
    """How to train. Loss, optimizer, learning rate and metrics may be left to a compiled model."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)]
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    schedule: ScheduleEntry | None = None
    reference_batch: Annotated[int, Field(ge=1, le=1 << 30)] = 256
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    optimizer: str = ""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    optimizer_args: dict[str, float | bool] = {}
    clip: ClipEntry | None = None
    weight_decay: Weight | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    accumulation_steps: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    # In this order: {name: …} is one loss with its arguments, not that of an output called name.
    loss: _OneLoss | dict[str, _OneLoss] | None = Field(None, union_mode="left_to_right")
    from_logits: bool = False
    class_weight: dict[Annotated[str, Field(pattern=r"^[0-9]{1,6}$")], Weight] = {}
    freeze: FreezeEntry | None = None
    views: Annotated[int, Field(ge=0, le=1000)] = 0
    compression: Literal["none", "bf16"] = "none"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_learning_rate: Annotated[float, Field(gt=0)] | None = None
    decay: Literal["none", "linear", "cosine"] = "none"
    metrics: list[Annotated[str, Field(min_length=1)]] = []
    early_stopping: Annotated[EarlyStopping, AfterValidator(_own_name)] | None = None
    reduce_on_plateau: Annotated[ReduceOnPlateau, AfterValidator(_own_name)] | None = None

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.schedule and (self.learning_rate is not None or self.decay != "none"):
            raise ValueError("schedule takes the place of learning_rate and decay: remove them")
        return self


def build_recipe(
    entry: RecipeEntry, input_range: tuple[float, float] | None, own: Callable[[str], str]
) -> Recipe:
    """Return the recipe. `own` completes the paths of the user's own losses and metrics."""
    names = {field.name for field in fields(Recipe)} & RecipeEntry.model_fields.keys()
    losses = entry.loss if isinstance(entry.loss, dict) else {"": entry.loss} if entry.loss else {}
    return replace(
        Recipe(**{name: getattr(entry, name) for name in names}),
        optimizer_args=_optimizer_args(entry),
        losses={name: _loss_term(loss, own) for name, loss in losses.items()},
        input_range=input_range,
        freeze_until=entry.freeze.until if entry.freeze else "",
        schedule=_schedule(entry.schedule),
        metrics=tuple(own(metric) for metric in entry.metrics),
    )


def _optimizer_args(entry: RecipeEntry) -> dict[str, Argument]:
    """Return the optimizer's keyword arguments, by Keras' names."""
    steps, clip = entry.accumulation_steps, entry.clip or ClipEntry.model_construct()
    named = {
        "momentum": entry.momentum,
        "global_clipnorm": clip.global_norm,
        "clipnorm": clip.norm,
        "clipvalue": clip.value,
        "weight_decay": entry.weight_decay,
        "use_ema": True if entry.ema else None,
        "ema_momentum": entry.ema,
        "gradient_accumulation_steps": steps if steps > 1 else None,
    }
    return {**entry.optimizer_args, **{name: value for name, value in named.items() if value is not None}}


def _loss_term(loss: str | LossEntry, own: Callable[[str], str]) -> LossTerm:
    if isinstance(loss, str):
        return LossTerm(own(loss))
    return LossTerm(own(loss.name), dict(loss.model_extra or {}), loss.weight)


def _schedule(entry: ScheduleEntry | None) -> str:
    """Return the schedule as Keras serializes it."""
    if entry is None:
        return ""
    config = {"class_name": entry.name, "config": dict(entry.model_extra or {})}
    return json.dumps(config, sort_keys=True)


@dataclass(frozen=True)
class Reading:
    """How the data of a job is read. Functions are `FILE.py:NAME`, with an absolute path. '' for none."""

    picture: ImageRule = field(default_factory=ImageRule)
    classes: tuple[str, ...] | None = None
    records: RecordSchema | None = None
    public_function: str = ""
    validation_function: str = ""
    private_function: str = ""
    table: TableSchema | None = None
    allows_nan: bool = False
    """Whether samples and labels may have NaN and infinity, which the model or its loss expects."""

    @property
    def function_files(self) -> tuple[Path, ...]:
        """The files of the user's functions, each once."""
        return files_of((self.public_function, self.validation_function, self.private_function))


@dataclass(frozen=True)
class Job:
    """What to train: model, data, recipe. Host paths are absolute, private paths as written."""

    path: Path
    model: str
    model_args: dict[str, Any]
    public_path: Path
    validation_path: Path | None
    private_path: str | None
    recipe: Recipe
    """As written; what it leaves to the compiled model is unset."""
    step: str = ""
    """The user's own step, `FILE.py:NAME` with an absolute path; '' for the model's train_step."""
    code: tuple[Path, ...] = ()
    """The user's own files and packages that model, losses and metrics are made of."""
    reading: Reading = field(default_factory=Reading)
    is_everywhere: bool = False
    """Whether every node can read the public data at the same path, on a shared file system."""
    is_repeating: bool = False
    """Whether nodes with few private samples repeat them instead of reading more public samples."""
    is_weighted_by_data_set: bool = False
    """Whether a rank is weighted by its number of distinct samples, however often it reads them."""
    may_activations_leave: bool = False
    """Whether activations and labels of private samples may be sent to the host (`--strategy split`)."""
    noise: Noise | None = None
    """Differential privacy of private samples; None: disabled."""
    given_name: str = ""

    @property
    def name(self) -> str:
        """What its plan and its prepared data are called: as given, else as the job file, without .yaml."""
        return self.given_name or self.path.stem

    @property
    def model_file(self) -> Path | None:
        """The user's file of `model`, None for a model of keras.applications."""
        if self.model.startswith("keras.applications:"):
            return None
        return Path(self.model if self.model.endswith(".keras") else self.model.rpartition(":")[0])

    @property
    def code_roots(self) -> tuple[Path, ...]:
        """Files and packages that the nodes get when the model needs them."""
        model = [self.model_file] if self.model_file and self.model_file.suffix == ".py" else []
        losses = [term.name for term in self.recipe.losses.values()]
        named = files_of([self.step, *losses, *self.recipe.metrics, self.recipe.augment])
        return tuple(dict.fromkeys([*model, *named, *self.code]))

    @property
    def augment_roots(self) -> tuple[Path, ...]:
        """Those of `code_roots` that `data.augment` needs."""
        files = files_of([self.recipe.augment])
        return files + tuple(
            root for file in files for root in find_imported(file, self.code_roots) if root not in files
        )

    @property
    def code_files(self) -> tuple[Path, ...]:
        """All Python files of `code_roots`."""
        return python_files(self.code_roots)

    def fingerprint(self) -> str:
        """Return a hash of all inputs of a plan: model (with its file's content), data paths, recipe."""
        inputs = [describe_job(self), self.model_args, hash_own_files(self)]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


Size = Annotated[int, Field(ge=1, le=1 << 16)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f/]+$")]


class ImageEntry(Document):
    """How images are converted."""

    shape: tuple[Size, Size, Literal[1, 3]] | None = None
    fit: Literal["stretch", "crop", "pad"] = "stretch"
    max_pixels: Annotated[int, Field(ge=1, le=1 << 27)] = ImageRule.max_pixels
    """TensorFlow's limit is that of a PNG with four channels."""


class TableEntry(Document):
    """The columns of .csv files that are not features."""

    label: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    weight: str = ""
    drop: list[str] = []

    @property
    def labels(self) -> list[str]:
        """The columns with labels."""
        return [self.label] if isinstance(self.label, str) else self.label

    @model_validator(mode="after")
    def _check_once(self) -> Self:
        named = [*self.labels, *([self.weight] if self.weight else []), *self.drop]
        if len(set(named)) != len(named):
            raise ValueError("names a column twice")
        return self


def files_of(references: Iterable[str]) -> tuple[Path, ...]:
    """Return the files of those `references` that are user functions, `FILE.py:NAME`, each once."""
    files = (reference.rpartition(":")[0] for reference in references)
    return tuple(dict.fromkeys(Path(file) for file in files if file.endswith(".py")))


def find_imported(file: Path, roots: Sequence[Path]) -> tuple[Path, ...]:
    """Return those of the job's files and packages `roots` that a Python file imports, or they."""
    by_name = {root.stem: root for root in roots if root != file}
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        for name in _imports_of(waiting.pop()):
            root = by_name.get(name)
            if root and root not in found:
                found[root] = None
                waiting += python_files([root])
    return tuple(found)


def python_files(roots: Iterable[Path]) -> tuple[Path, ...]:
    """Return all Python files of files and packages."""
    return tuple(file for root in roots for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root]))


def parse_python(file: Path) -> ast.Module | None:
    """Return the syntax tree of a Python file. None if it cannot be parsed."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imports_of(file: Path) -> set[str]:
    """Return the top-level names that a Python file imports. None if it cannot be parsed."""
    names: set[str] = set()
    module = parse_python(file)
    for node in ast.walk(module) if module else ():
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


class PublicData(Document):
    """Data that any rank may read."""

    path: Path
    on: Literal["host", "every-node"] = "host"
    function: str = ""


class PrivateData(Document):
    """Data that only its own node may read: a path on each node."""

    path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f]+$")]
    function: str = ""
    unequal: Literal["top-up", "repeat"] = "top-up"
    noise: Noise | None = None
    activations: Literal["stay", "may-leave"] = "stay"


class ValidationData(PublicData):
    """Data on which rank 0 evaluates after each epoch."""

    on: Literal["host"] = "host"


class DataEntry(Document):
    """The data sets of a job. `input_range`: uint8 pixels 0…255 are scaled to it. Null keeps them."""

    public: PublicData
    private: PrivateData | None = None
    validation: ValidationData | None = None
    input_range: tuple[float, float] | None = (0.0, 1.0)
    image: ImageEntry = ImageEntry()
    classes: Annotated[list[Name], Field(min_length=1)] | None = None
    tfrecord: RecordSchema | None = None
    csv: TableEntry | None = None
    weights: Literal["sample", "data-set"] = "sample"
    allow_nan: bool = False
    augment: str = ""

    @field_validator("classes")
    @classmethod
    def _no_duplicates(cls, value: list[str] | None) -> list[str] | None:
        if value and len(set(value)) < len(value):
            raise ValueError("names a class twice")
        return value

    @field_validator("tfrecord")
    @classmethod
    def _check_raw_shape(cls, value: RecordSchema | None) -> RecordSchema | None:
        if value and value.shape is None and value.dtype != "uint8":
            raise ValueError("dtype applies to raw numbers, which need a shape")
        return value


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    json.dumps(value, allow_nan=False)  # raises ValueError, which pydantic reports
    return value


Arguments = Annotated[dict[str, Any], AfterValidator(_check_json)]


class JobFile(Document):
    """The content of job.yaml."""

    name: Name | None = None
    model: Annotated[str, Field(min_length=1)]
    model_args: Arguments = {}
    step: str = ""
    code: list[Path] = []
    data: DataEntry
    recipe: RecipeEntry


class ModelArguments(Document):
    """Arguments of the function that builds the model, alone."""

    model_args: Arguments = {}


"""Keys that users of Keras expect, and what there is in their place."""


def load_job(path: Path) -> Job:
    """Read job.yaml. Its paths are relative to it. Raises InputError."""
    remedy = "write it with `csdctl init`, or use another job file"
    try:
        file = load_document(path, JobFile, remedy=remedy)
    except InputError as error:
        hints = [hint for key, hint in OF_FIT.items() if f"unknown key `{key}`" in error.message]
        hints += [f"`csdctl init {path}` writes a job.yaml"] * (path.suffix == ".py" and path.is_file())
        raise InputError(error.message, remedy="; ".join(hints) or error.remedy) from None
    return build_job(file, path)


def build_job(file: JobFile, path: Path) -> Job:
    """Return the job of a job.yaml that was read from `path`, or will be written there. Raises InputError."""
    data, private = file.data, file.data.private

    def own(written: str) -> str:
        return _function(written, path) if files_of([written]) else written

    recipe = build_recipe(file.recipe, data.input_range, own)
    job = Job(
        path=path,
        model=model_reference(file.model, path),
        model_args=file.model_args,
        public_path=_resolve(data.public.path, path),
        validation_path=_resolve(data.validation.path, path) if data.validation else None,
        private_path=private.path if private else None,
        is_everywhere=data.public.on == "every-node",
        is_repeating=private is not None and private.unequal == "repeat",
        is_weighted_by_data_set=data.weights == "data-set",
        may_activations_leave=private is not None and private.activations == "may-leave",
        noise=private.noise if private else None,
        given_name=file.name or "",
        recipe=replace(recipe, augment=_function(data.augment, path)),
        step=_function(file.step, path),
        code=tuple(_code_root(written, path) for written in file.code),
        reading=_reading(data, path),
    )
    _check_private(job, file.data)
    for key in ("early_stopping", "reduce_on_plateau"):
        monitor = getattr(getattr(recipe, key), "monitor", "")
        if monitor.startswith("validation_") and not data.validation:
            problem = f"{path}: recipe.{key} monitors {monitor}, but the job has no validation data"
            raise InputError(problem, remedy="add validation data, or set monitor: loss")
    if job.step and not files_of([job.model]):
        raise InputError(
            f"{path}: `step` needs a function of yours that builds the model, received model: {file.model}",
            remedy="write a function that returns the model, and name it: model: FILE.py:FUNCTION",
        )
    return job


def _reading(data: DataEntry, job_path: Path) -> Reading:
    table = data.csv
    return Reading(
        picture=ImageRule(**data.image.model_dump()),
        classes=tuple(data.classes) if data.classes else None,
        records=data.tfrecord,
        public_function=_function(data.public.function, job_path),
        validation_function=_function(data.validation.function, job_path) if data.validation else "",
        private_function=_function(data.private.function, job_path) if data.private else "",
        table=TableSchema(tuple(table.labels), table.weight, tuple(table.drop)) if table else None,
        allows_nan=data.allow_nan,
    )


def _check_private(job: Job, data: DataEntry) -> None:
    """Raise InputError when the private path contains `..`, or overlaps with other data.

    It is compared as written, because only the node itself can resolve its links.
    """
    private = job.private_path
    if private is None:
        return
    if ".." in Path(private).parts:
        raise InputError(
            f"{job.path}: data.private.path {private} contains `..`", remedy="write the path without `..`"
        )
    others = {"public": (data.public.path, job.public_path)}
    if data.validation and job.validation_path:
        others["validation"] = (data.validation.path, job.validation_path)
    for name, paths in others.items():
        if any(
            _overlap(os.path.normpath(path), os.path.normpath(other))
            for path in (private, os.path.expanduser(private))
            for other in paths
        ):
            raise InputError(
                f"{job.path}: data.private.path {private} and data.{name}.path {paths[0]} overlap",
                remedy="private data must not be readable as other data: use separate directories",
            )


def _overlap(first: str, second: str) -> bool:
    """Return whether two paths are equal or nested. A relative and an absolute path never overlap."""
    if os.path.isabs(first) != os.path.isabs(second):
        return False
    return os.path.commonpath([first, second]) in (first, second)


def _function(
    written: str,
    job_path: Path,
    what: str = "function",
    expected: str = "PATH.py:FUNCTION, with a path relative to the job file",
) -> str:
    """Return FILE.py:NAME with an absolute path, '' for ''. Raises InputError if it is invalid or missing."""
    if not written:
        return ""
    file, _, name = written.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier()):
        raise InputError(
            f"{job_path}: {what} {written!r} is not a valid reference", remedy=f"expected {expected}"
        )
    return f"{_find_file(file, job_path, what, written)}:{name}"


def _find_file(file: str, job_path: Path, what: str, written: str) -> Path:
    """Return the absolute path of a file that `written` names. Raises InputError if it does not exist.

    Nor may a link lead to another kind of file: functions are sent to the nodes.
    """
    path = _resolve(Path(file), job_path)
    if not os.path.isfile(path):  # unlike Path.is_file, it takes any path
        raise InputError(
            f"{job_path}: {what} {written!r} was not found: {path} does not exist",
            remedy="fix its path in the job file",
        )
    if path.suffix != Path(file).suffix:
        raise InputError(
            f"{job_path}: {written!r} is a link to {path}, which is not a {Path(file).suffix} file",
            remedy="copy the file that is meant into the job's directory",
        )
    return path


def _resolve(written: Path, job_path: Path) -> Path:
    """Return `written`, relative to the job file, as an absolute path. Raises InputError if invalid."""
    try:
        return (job_path.parent / written.expanduser()).resolve()
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(
            f"{job_path}: path {str(written)!r} cannot be used: {error}",
            remedy="fix the path in the job file",
        ) from None


def _code_root(written: Path, job_path: Path) -> Path:
    """Return a file or package of `code` with an absolute path. Raises InputError for anything else."""
    path = _resolve(written, job_path)
    is_module = path.suffix == ".py" and os.path.isfile(path)
    if not is_module and not (os.path.isdir(path) and any(path.rglob("*.py"))):
        raise InputError(
            f"{job_path}: code {str(written)!r} is neither a .py file nor a directory with .py files",
            remedy="fix `code` in the job file",
        )
    return path


def model_reference(written: str, job_path: Path) -> str:
    """Return `written` with an absolute path. Raises InputError if it is invalid or missing."""
    if re.fullmatch(r"keras\.applications:[A-Za-z]\w*", written, re.ASCII):
        return written
    if written.endswith(".keras"):
        path = _find_file(written, job_path, "model", written)
        check_keras_file(path)
        return str(path)
    expected = "keras.applications:NAME, PATH.keras or PATH.py:FUNCTION"
    reference = _function(written, job_path, "model", expected)
    file, _, function = written.rpartition(":")
    path = Path(reference.rpartition(":")[0])
    if (names := defined_names(path)) is not None and function not in names:
        defined = ast.FunctionDef | ast.ClassDef
        found = [node.name for node in ast.parse(path.read_bytes()).body if isinstance(node, defined)]
        functions = [name for name in found if not name.startswith("_")]
        raise InputError(
            f"{job_path}: {file} has no function {function!r}",
            remedy=f"it has {', '.join(functions[:10])}" if functions else f"define it in {file}",
        )
    return reference


def check_keras_file(path: Path) -> None:
    """Raise InputError unless `path` begins as a file that Keras 3 has saved, which is a zip archive."""
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is not a .keras file: it is not a zip archive",
            remedy="write it with Keras 3: model.save('model.keras')",
        )


def defined_names(file: Path) -> list[str] | None:
    """Return the names that a Python file may define at its top level. None: they cannot be told."""
    names: dict[str, None] = {}
    if not (module := parse_python(file)):
        return None
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(one.asname or one.name): None for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None
    return list(names)


def describe_job(job: Job) -> dict[str, Any]:
    """Return the inputs of `Job.fingerprint`, except file content. Unset values are omitted.

    Values are YAML values: text, numbers, booleans, and lists of them.
    """
    recipe, reading = asdict(job.recipe), asdict(job.reading)
    described = {
        "model": job.model,
        "model_args": job.model_args,
        "step": job.step,
        "data": {
            "public": {"path": str(job.public_path), "function": reading["public_function"]},
            "private": {
                "path": job.private_path,
                "function": reading["private_function"],
                "noise": asdict(job.noise) if job.noise else {},
            },
            "validation": {"function": reading["validation_function"]},
            "input_range": recipe.pop("input_range"),
            "augment": recipe.pop("augment"),
            "image": reading["picture"],
            "classes": reading["classes"],
            "tfrecord": reading["records"],
            "csv": reading["table"],
        },
        "recipe": recipe,
    }
    return dict(_flatten(described))


def hash_own_files(job: Job) -> dict[str, str]:
    """Return a short hash of the content of each of the user's files that the job needs, by path."""
    own = dict.fromkeys((job.model_file, *job.reading.function_files, *job.code_files))
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in own if file}


def _flatten(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values that are set, by a name such as recipe.optimizer_args.momentum."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        if value:
            yield name, list(value)
    elif value not in (None, ""):
        yield name, value
