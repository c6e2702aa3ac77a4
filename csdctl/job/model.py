"""The job: what job.yaml has, read by pydantic into frozen dataclasses, its paths made absolute."""

import ast
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config

from csdctl.documents import STRICT, load_text, parse_document
from csdctl.errors import InputError
from csdctl.worker.protocol.datasets import ImageRule, RecordSchema, TableSchema
from csdctl.worker.protocol.recipe import Clip, Noise, Recipe

OF_FIT = {
    "recipe.early_stopping.restore_best_weights": "best.keras is always saved: remove the key",
    "recipe.batch_size": "batch sizes come from `csdctl tune`, or `csdctl train --batch-size N`; "
    "recipe.reference_batch is for the learning rate",
}
"""Keys that users of Keras expect, and what there is in their place."""
WITHOUT_EFFECT = (
    *("data.public.on", "data.validation.path", "data.validation.on", "data.private.unequal"),
    *("data.private.activations", "data.weights", "data.allow_nan", "recipe.input_range", "recipe.augment"),
)
"""Values that a plan does not depend on, or has by another name."""
KEYS = {"losses": "loss", "freeze_until": "freeze", "labels": "label", "dropped": "drop"}
"""Keys of job.yaml for fields that have another name in messages and JSON."""
FUNCTION_FORM = "PATH.py:FUNCTION, with a path relative to the job file"
MODEL_FORMS = "keras.applications:NAME, PATH.keras or PATH.py:FUNCTION"
"""The valid references to a function and to a model."""


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    json.dumps(value, allow_nan=False)  # raises ValueError, which pydantic reports
    return value


def _require_epochs(written: Any) -> Any:
    """Return a recipe of job.yaml with nothing for `epochs`, if it lacks them: an error, unlike in Python."""
    return {"epochs": None, **written} if isinstance(written, dict) else written


def _unless(is_wrong: Callable[[Any], bool], problem: str) -> AfterValidator:
    """Return the validator that reports `problem` of a value that `is_wrong`."""

    def check(value: Any) -> Any:
        if is_wrong(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _has_twice(names: Sequence[str]) -> bool:
    return len(set(names)) < len(names)


def _refuse(written: object) -> None:
    raise ValueError("is no key of a job file")


Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f/]+$")]
ONE_RATE = _unless(
    lambda recipe: recipe.schedule and (recipe.learning_rate is not None or recipe.decay != "none"),
    "schedule takes the place of learning_rate and decay: remove them",
)
TYPED = _unless(
    lambda records: records.shape is None and records.dtype != "uint8",
    "dtype applies to raw numbers, which need a shape",
)
ON_HOST = _unless(lambda data: data.on != "host", "validation data is on the host: remove `on`")
Arguments = Annotated[dict[str, Any], AfterValidator(_check_json)]


@dataclass(frozen=True)
class HostData:
    """Data on the host. `function`: FILE.py:NAME of the user's function that reads it, '' for none."""

    path: Path
    on: Literal["host", "every-node"] = "host"
    """'every-node': each node can read it at the same path, on a shared file system. Public data only."""
    function: str = ""


@dataclass(frozen=True)
class PrivateData:
    """Data that only its own node may read: a path on each node, as written."""

    path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f]+$")]
    function: str = ""
    unequal: Literal["top-up", "repeat"] = "top-up"
    """'repeat': nodes with few private samples repeat them instead of reading more public samples."""
    noise: Noise | None = None
    activations: Literal["stay", "may-leave"] = "stay"
    """'may-leave': activations and labels may be sent to the host (`--strategy split`)."""


@dataclass(frozen=True)
class Data:
    """The data sets of a job, and how they are read."""

    public: HostData
    """Data that any rank may read."""
    private: PrivateData | None = None
    validation: Annotated[HostData, ON_HOST] | None = None
    """Data on which rank 0 evaluates after each epoch."""
    input_range: tuple[float, float] | None = (0.0, 1.0)
    image: ImageRule = field(default_factory=ImageRule)
    classes: (
        Annotated[tuple[Name, ...], Field(min_length=1), _unless(_has_twice, "names a class twice")] | None
    ) = None
    tfrecord: Annotated[RecordSchema, TYPED] | None = None
    csv: (
        Annotated[TableSchema, _unless(lambda table: _has_twice(table.named), "names a column twice")] | None
    ) = None
    weights: Literal["sample", "data-set"] = "sample"
    """'data-set': a rank is weighted by its number of distinct samples, however often it reads them."""
    allow_nan: bool = False
    """Whether samples and labels may have NaN and infinity, which the model or its loss expects."""
    augment: str = ""

    @property
    def functions(self) -> tuple[str, ...]:
        """The user's functions that read the data."""
        parts = (self.public, self.validation, self.private)
        return tuple(part.function for part in parts if part and part.function)


@with_config(STRICT | ConfigDict(alias_generator=lambda name: KEYS.get(name, name)))
@dataclass(frozen=True)
class Job:
    """A training job: model, data, recipe. `load_job` makes host paths absolute."""

    model: Annotated[str, Field(min_length=1)]
    data: Data
    recipe: Annotated[Recipe, BeforeValidator(_require_epochs), ONE_RATE]
    """Values left to the compiled model are unset."""
    name: Name = ""
    """The name of its plan and prepared data; by default the name of the job file, without .yaml."""
    model_args: Arguments = field(default_factory=dict)
    step: str = ""
    """The user's step, `FILE.py:NAME`; '' for the model's train_step."""
    code: tuple[Path, ...] = ()
    """The user's files and packages that model, losses and metrics are made of."""
    path: Annotated[Path, BeforeValidator(_refuse)] = Path("job.yaml")
    """The job file."""

    @property
    def private_path(self) -> str | None:
        """Path of the private data on each node, as written."""
        return self.data.private.path if self.data.private else None

    @property
    def noise(self) -> Noise | None:
        """Differential privacy of private samples. None: disabled."""
        return self.data.private.noise if self.data.private else None

    @property
    def is_everywhere(self) -> bool:
        """Whether every node can read the public data at the same path."""
        return self.data.public.on == "every-node"

    @property
    def is_repeating(self) -> bool:
        """Whether nodes with few private samples repeat them instead of reading more public samples."""
        return self.data.private is not None and self.data.private.unequal == "repeat"

    @property
    def model_file(self) -> Path | None:
        """The user's file of `model`, None for a model of keras.applications."""
        if self.model.startswith("keras.applications:"):
            return None
        return Path(self.model if self.model.endswith(".keras") else self.model.rpartition(":")[0])

    @property
    def code_roots(self) -> tuple[Path, ...]:
        """Files and packages that the nodes get when the model needs them."""
        losses = [term.name for term in self.recipe.losses.values()]
        functions = [self.model, self.step, *losses, *self.recipe.metrics, self.recipe.augment]
        return tuple(dict.fromkeys([*_files_of(functions), *self.code]))

    @property
    def augment_roots(self) -> tuple[Path, ...]:
        """Files and packages among `code_roots` that `data.augment` needs."""
        files = _files_of([self.recipe.augment])
        imported = [root for file in files for root in find_imported(file, self.code_roots)]
        return tuple(dict.fromkeys([*files, *imported]))

    @property
    def code_files(self) -> tuple[Path, ...]:
        """All Python files of `code_roots`."""
        return python_files(self.code_roots)

    @property
    def function_files(self) -> tuple[Path, ...]:
        """The files of the user's functions that read data, each once."""
        return _files_of(self.data.functions)

    def fingerprint(self) -> str:
        """Return a hash of all inputs of a plan: model (with its file's content), data paths, recipe."""
        inputs = [describe_job(self), self.model_args, hash_own_files(self)]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


@with_config(STRICT)
@dataclass(frozen=True)
class ModelArguments:
    """Only the arguments of the function that builds the model."""

    model_args: Arguments = field(default_factory=dict)


def load_job(path: Path) -> Job:
    """Read job.yaml. Its paths are relative to it. Raises InputError."""
    text = load_text(path, remedy="write it with `csdctl init`, or use another job file")
    try:
        return parse_job(text, path)
    except InputError as error:
        hints = [hint for key, hint in OF_FIT.items() if f"unknown key `{key}`" in error.message]
        hints += [f"`csdctl init {path}` writes a job.yaml"] * (path.suffix == ".py")
        raise InputError(error.message, remedy="; ".join(hints) or error.remedy) from None


def parse_job(text: str, path: Path, *, name: str = "") -> Job:
    """Return the job of a job file at `path`, which messages call `name`. Raises InputError."""
    written = parse_document(text, Job, name=name or str(path))
    data, recipe = written.data, written.recipe
    losses = {output: replace(term, name=_own(term.name, path)) for output, term in recipe.losses.items()}
    augment = _function(data.augment, path)
    job = replace(
        written,
        path=path,
        name=written.name or path.stem,
        model=model_reference(written.model, path),
        step=_function(written.step, path),
        code=tuple(_code_root(root, path) for root in written.code),
        data=replace(
            data,
            public=_on_host(data.public, path),
            validation=data.validation and _on_host(data.validation, path),
            private=data.private and replace(data.private, function=_function(data.private.function, path)),
            augment=augment,
        ),
        recipe=replace(
            _join_arguments(recipe),
            losses=losses,
            metrics=tuple(_own(metric, path) for metric in recipe.metrics),
            input_range=data.input_range,
            augment=augment,
        ),
    )
    _check_private(job, written.data)
    for key in ("early_stopping", "reduce_on_plateau"):
        monitor = getattr(getattr(recipe, key), "monitor", "")
        if monitor.startswith("validation_") and not data.validation:
            problem = f"{path}: recipe.{key} monitors {monitor}, but the job has no validation data"
            raise InputError(problem, remedy="add validation data, or set monitor: loss")
    if job.step and not _files_of([job.model]):
        raise InputError(
            f"{path}: `step` needs a function of yours that builds the model, "
            f"received model: {written.model}",
            remedy="write a function that returns the model, and name it: model: FILE.py:FUNCTION",
        )
    return job


def _join_arguments(recipe: Recipe) -> Recipe:
    clip, steps = recipe.clip or Clip(), recipe.accumulation_steps or 1
    named = {
        "momentum": recipe.momentum,
        **clip.limits,
        "weight_decay": recipe.weight_decay,
        "use_ema": True if recipe.ema else None,
        "ema_momentum": recipe.ema,
        "gradient_accumulation_steps": steps if steps > 1 else None,
    }
    arguments = recipe.optimizer_args | {name: value for name, value in named.items() if value is not None}
    unset: dict[str, Any] = dict.fromkeys(("momentum", "clip", "weight_decay", "ema", "accumulation_steps"))
    return replace(recipe, optimizer_args=arguments, **unset)


def _on_host(data: HostData, job_path: Path) -> HostData:
    return replace(data, path=_resolve(data.path, job_path), function=_function(data.function, job_path))


def _check_private(job: Job, written: Data) -> None:
    """Raise InputError for a private path with `..` or one that overlaps. Only its node can resolve links."""
    private = job.private_path
    if private is None:
        return
    if ".." in Path(private).parts:
        raise InputError(
            f"{job.path}: data.private.path {private} contains `..`", remedy="write the path without `..`"
        )
    pairs = {
        "public": (written.public, job.data.public),
        "validation": (written.validation, job.data.validation),
    }
    for name, parts in pairs.items():
        paths = [part.path for part in parts if part]
        if any(
            _overlap(os.path.normpath(private_path), os.path.normpath(path))
            for private_path in (private, os.path.expanduser(private))
            for path in paths
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


def _own(name: str, job_path: Path) -> str:
    return _function(name, job_path) if _files_of([name]) else name


def _function(written: str, job_path: Path, what: str = "function", forms: str = FUNCTION_FORM) -> str:
    """Return FILE.py:NAME with an absolute path, '' for ''. Raises InputError if it is invalid or missing."""
    if not written:
        return ""
    file, _, name = written.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier()):
        problem = f"{job_path}: {what} {written!r} is not a valid reference"
        raise InputError(problem, remedy=f"expected {forms}")
    return f"{_find_file(file, job_path, what, written)}:{name}"


def _find_file(file: str, job_path: Path, what: str, written: str) -> Path:
    """Return the absolute path of a file. A link to another kind of file is refused: functions are sent."""
    path = _resolve(Path(file), job_path)
    if not os.path.isfile(path):  # unlike Path.is_file, it takes any path
        state = "is no regular file" if os.path.exists(path) else "does not exist"
        problem = f"{job_path}: {what} {written!r} was not found: {path} {state}"
        raise InputError(problem, remedy="fix its path in the job file")
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
    reference = _function(written, job_path, "model", MODEL_FORMS)
    file, _, function = written.rpartition(":")
    path = Path(reference.rpartition(":")[0])
    if (names := defined_names(path)) is not None and function not in names:
        definitions = ast.FunctionDef | ast.ClassDef
        defined = [node.name for node in ast.parse(path.read_bytes()).body if isinstance(node, definitions)]
        public = [name for name in defined if not name.startswith("_")]
        raise InputError(
            f"{job_path}: {file} has no function {function!r}",
            remedy=f"it has {', '.join(public[:10])}" if public else f"define it in {file}",
        )
    return reference


def check_keras_file(path: Path) -> None:
    """Raise InputError unless `path` begins as a file that Keras 3 has saved, which is a zip archive."""
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is not a .keras file: it is not a zip archive",
            remedy="write it with Keras 3: model.save('model.keras')",
        )


def defined_names(file: Path) -> set[str] | None:
    """Return the names that a Python file may define. None if they cannot be known without running it."""
    names: set[str] = set()
    if not (module := parse_python(file)):
        return None
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def parse_python(file: Path) -> ast.Module | None:
    """Return the syntax tree of a Python file. None if it cannot be parsed."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _files_of(references: Iterable[str]) -> tuple[Path, ...]:
    files = (reference.rpartition(":")[0] for reference in references)
    return tuple(dict.fromkeys(Path(file) for file in files if file.endswith(".py")))


def python_files(roots: Iterable[Path]) -> tuple[Path, ...]:
    """Return all Python files of files and packages."""
    return tuple(file for root in roots for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root]))


def find_imported(file: Path, roots: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files and packages among `roots` that a Python file imports, directly or through others."""
    by_name = {root.stem: root for root in roots if root != file}
    imported: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        module = parse_python(waiting.pop())
        names: set[str] = set()
        for node in ast.walk(module) if module else ():
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
        added = [root for name, root in by_name.items() if name in names and root not in imported]
        imported |= dict.fromkeys(added)
        waiting += python_files(added)
    return tuple(imported)


def describe_job(job: Job) -> dict[str, Any]:
    """Return the inputs of `Job.fingerprint` as YAML values, except file content and unset values.

    Their names stay from version to version, because plans have them.
    """
    described = asdict(job)
    names = ("model", "model_args", "step", "data", "recipe")
    values = dict(_flatten({name: described[name] for name in names}))
    for name in [name for name in values if name.startswith(WITHOUT_EFFECT)]:
        del values[name]
    return values


def hash_own_files(job: Job) -> dict[str, str]:
    """Return a short hash of the content of each of the user's files that the job needs, by path."""
    files = dict.fromkeys((job.model_file, *job.function_files, *job.code_files))
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files if file}


def _flatten(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values that are set, by a name such as recipe.optimizer_args.momentum."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        if value:
            yield name, list(value)
    elif value not in (None, ""):
        yield name, str(value) if isinstance(value, Path) else value
