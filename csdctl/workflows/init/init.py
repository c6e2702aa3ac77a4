"""`init`: a first job.yaml from a look at a model and its data.

The worker programs that `prepare` uses do the looking, in processes of their own: `build` for the model, and
`look` for the data, which reads some samples and keeps none. No node is contacted.
"""

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from csdctl.documents import parse_document, save_text
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.compatibility import check_compatibility
from csdctl.job.model import Job, JobFile, build_job, find_imported
from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile
from csdctl.shipping.worker_calls import call_worker
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.datasets import DataLook, DatasetInfo, LookSpec, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.workflows.data.model import SerializedModel, serialize_model, shapes_of, store_worker
from csdctl.workflows.data.prepare import add_function, first_spec, follow
from csdctl.workflows.init.job_text import (
    DEFAULT_SIZE,
    Looks,
    Sources,
    choose_application_args,
    choose_size,
    is_any_size,
    render_draft,
    render_job,
)

PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}
"""Folders that are parts of a data set, not classes."""
OPTIONS = {
    "add to job.yaml: code: ": "give each file or package: --code ",
    "data.csv.drop": "--drop",
    "data.csv in job.yaml": "--label and --drop",
    "data.tfrecord in job.yaml": "data.tfrecord in a job.yaml of your own",
}
"""Options of `init` in place of the keys of a job.yaml that does not exist yet."""

OnProgress = Callable[[str, PrepareProgress], None]


@dataclass(frozen=True)
class InitRequest:
    """The options; '' and () for those that were not given."""

    output: Path
    model: str
    public: str
    validation: str = ""
    private: str = ""
    model_args: dict[str, Any] | None = None
    code: tuple[Path, ...] = ()
    label: str = ""
    dropped: tuple[str, ...] = ()
    is_overwriting: bool = False


@dataclass(frozen=True)
class Written:
    """The job file that was written, and what was seen."""

    path: Path
    looks: Looks
    misfit: InputError | None
    """Why model and data do not fit together; None if they do."""


def init_job(request: InitRequest, directory: Path, say: Say, on_progress: OnProgress) -> Written:
    """Write a job file; raises InputError where nothing is written.

    If model and data do not fit together, the file is written all the same, for the user to mend, and the
    problem is in the result.
    """
    if request.output.exists() and not request.is_overwriting:
        raise InputError(
            f"{request.output} exists", remedy="overwrite it with --force, or choose another --output"
        )
    sources = parse_sources(request)
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
    return Written(request.output, looks, misfit)


def parse_sources(request: InitRequest) -> Sources:
    """Return model and data as the job file names them; raises InputError for a file that does not exist."""
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
        raise InputError(f"{option} {text!r} names no function", remedy="expected PATH.py:FUNCTION")
    file = f"{stem}.py"
    function = f"{_written_from(base, file, option)}:{name}"
    return {"path": _written_from(base, path or file, option), "function": function}


def _written_from(base: Path, text: str, option: str = "") -> str:
    """Return a path as a file in `base` names it: relative if it is below, or else absolute."""
    path = Path(os.path.abspath(Path(text).expanduser()))
    if option and not path.exists():
        raise InputError(f"{option}: {text} does not exist", remedy="give the path of an existing file")
    base = Path(os.path.abspath(base))
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def _find_code(named: list[str], given: tuple[Path, ...], base: Path) -> tuple[str, ...]:
    """Return the files and packages that were given, and those that files of the job import."""
    files = [base / name for name in named if name.endswith(".py")]
    found = [path.absolute() for path in given]
    for file in files:
        beside = [path for path in sorted(file.parent.iterdir()) if _is_module(path)]
        found += [path for path in find_imported(file, beside) if path not in files]
    return tuple(dict.fromkeys(_written_from(base, str(path)) for path in found))


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and path.name.isidentifier() and any(path.glob("*.py")))


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
        """Return what was seen, and the sources, completed by it; raises InputError."""
        self.say(f"looking at the data: {sources.public['path']}")
        if sources.is_application and not sources.model_args:  # its arguments depend on the data
            first = self._look_at_public(self._parse(render_draft(sources, DEFAULT_SIZE)), None)
            sources = replace(sources, model_args=choose_application_args(first))
        job = self._parse(render_draft(sources))
        self.say(f"looking at the model: {sources.model}")
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
            check_compatibility(model.info.recipe, model.info, datasets)
        except InputError as error:
            return error
        return None

    def _parse(self, text: str) -> Job:
        path = self.request.output.absolute()
        return build_job(parse_document(text, JobFile, name=str(self.request.output)), path)

    def _serialize(self, job: Job, data: DatasetInfo | None = None) -> SerializedModel:
        model = serialize_model(job, self.worker, self.host, self.project)
        if model.info.is_built or data is None:
            return model
        return serialize_model(job, self.worker, self.host, self.project, shapes_of(data))

    def _look_at_public(self, job: Job, model: ModelInfo | None) -> DataLook:
        spec = first_spec(job, model or ModelInfo(job.model, (), (), 0, 0, "", is_built=False))
        takes_any = model is not None and is_any_size(model)
        if model and takes_any and job.reading.picture.shape is None:
            spec = replace(spec, picture=replace(spec.picture, shape=_picture_shape(model, DEFAULT_SIZE)))
        found = self._look("public", job, replace(spec, names_classes=True), str(job.public_path))
        _check_classes(str(job.public_path), sorted(found.class_counts))
        if model and takes_any and found.pictures:
            shape = _picture_shape(model, choose_size(found)[0])
            found = replace(found, info=replace(found.info, sample_shape=shape))
        return found

    def _look_at_validation(self, job: Job, model: ModelInfo, public: DataLook) -> DataLook | None:
        if job.validation_path is None:
            return None
        spec = follow(first_spec(job, model), public.info)
        if public.pictures:
            spec = replace(spec, picture=replace(spec.picture, shape=public.info.sample_shape))
        spec = replace(spec, table=public.table)
        return self._look("validation", job, spec, str(job.validation_path))

    def _look(self, name: str, job: Job, spec: PrepareSpec, source: str) -> DataLook:
        reading = job.reading
        function = reading.public_function if name == "public" else reading.validation_function
        spec, _ = add_function(spec, job, function, self.project)
        return call_worker(
            self.host,
            sys.executable,
            self.worker.path,
            "look",
            LookSpec(replace(spec, source=source), self.request.label, self.request.dropped),
            DataLook,
            lambda progress: self.on_progress(name, progress),
            doing="looking at the data",
        )


def _picture_shape(model: ModelInfo, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of pictures for a model that takes any size."""
    channels = model.input_shape[2] if len(model.input_shape) == 3 else 3
    return (*size, channels or 3)


def _check_classes(path: str, names: list[str]) -> None:
    """Raise InputError for folders that are data sets of their own: train, val."""
    if names and {name.lower() for name in names} <= PARTS:
        training = next((name for name in names if name.lower().startswith("train")), names[0])
        raise InputError(
            f"--public: {path} has the folders {', '.join(names)}, which are data sets, not classes",
            remedy=f"--public {Path(path) / training}, and --validation for another of them",
        )
