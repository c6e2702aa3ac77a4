"""`init`: a first job.yaml from a look at a model and its data.

The worker programs that `prepare` uses do the looking, in processes of their own: `build` for the model, and
`look` for the data, which reads some samples and keeps none. No node is contacted.
"""

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
from csdctl.job.model import Job, JobFile, build_job
from csdctl.job.reading import find_imported
from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile
from csdctl.shipping.worker_calls import call_worker
from csdctl.transport.local import LocalSession
from csdctl.transport.program import within
from csdctl.worker.protocol.datasets import (
    DataLook,
    DatasetInfo,
    DirectorySpec,
    FoundData,
    LookSpec,
    PrepareProgress,
    PrepareSpec,
)
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.workflows.data.init_choices import DEFAULT_SIZE, Looks, choose_application_args, choose_size
from csdctl.workflows.data.init_sources import (
    Sources,
    check_classes,
    choose_model,
    choose_public,
    choose_validation,
    find_models,
    parse_data,
    parse_model,
    parse_private,
    written_from,
)
from csdctl.workflows.data.init_text import draft_job, is_any_size, render_job
from csdctl.workflows.data.model import SerializedModel, serialize_model, shapes_of, store_worker
from csdctl.workflows.data.prepare import first_spec, follow, store_function, with_function

FIND_DEADLINE_S = 120.0
_OPTIONS = {
    "add to job.yaml: code: ": "give each file or package: --code ",
    "`code` of job.yaml": "--code",
    "`code` in job.yaml": "--code",
    "data.csv.drop": "--drop",
    "data.csv in job.yaml": "--label and --drop",
    "fix the path in job.yaml": "fix the path",
}
"""Options of `init` in place of the keys of a job.yaml that does not exist yet."""

OnProgress = Callable[[str, PrepareProgress], None]


@dataclass(frozen=True)
class InitRequest:
    """The options; '' and () for those that were not given."""

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


@dataclass(frozen=True)
class Written:
    """The job file that was written, and what was seen."""

    path: Path
    sources: Sources
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
    project = ProjectDirectory(directory)
    worker = store_worker(project)
    with closing(LocalSession(HOST_NAME, directory)) as host:
        sources = _complete(request, host, worker, directory, say)
        looking = _Looking(request, worker, host, project, on_progress)
        try:
            sources, looks = looking.look(sources, say)
        except InputError as error:
            raise _with_options(error) from None
        misfit = looking.check(sources, looks)
    save_text(request.output, render_job(sources, looks, misfit.message if misfit else ""))
    return Written(request.output, sources, looks, misfit)


def _complete(
    request: InitRequest, host: LocalSession, worker: StoredFile, directory: Path, say: Say
) -> Sources:
    """Return what the options name, and what is found where they name nothing; raises InputError."""
    base = request.output.parent
    model, public, validation = request.model, request.public, request.validation
    if not model:
        model = choose_model(find_models(directory))
        say(f"found the model {model}")
    if not public:
        found = call_worker(
            host,
            sys.executable,
            worker.path,
            "find-data",
            DirectorySpec(str(directory)),
            FoundData,
            doing="looking for data",
            patience=within(FIND_DEADLINE_S),
        )
        public = choose_public(found)
        say(f"found the data {public}")
        if not validation and (validation := choose_validation(found)):
            say(f"found the validation data {validation}")
    sources = Sources(
        parse_model(model, base),
        parse_data("--public", public, base),
        parse_data("--validation", validation, base) if validation else None,
        parse_private(request.private),
        request.model_args or {},
    )
    return replace(sources, code=_find_code(sources, request.code, base))


def _find_code(sources: Sources, named: tuple[Path, ...], base: Path) -> tuple[str, ...]:
    """Return the files and packages `named`, and those that files of the job import from beside them."""
    data = (sources.public, sources.validation)
    references = [sources.model, *(found.function for found in data if found)]
    files = [base / text.rpartition(":")[0] for text in references if text.rpartition(":")[0].endswith(".py")]
    found = [path.absolute() for path in named]
    for file in files:
        beside = [path for path in sorted(file.parent.iterdir()) if _is_module(path)]
        found += [path for path in find_imported(file, beside) if path not in files]
    return tuple(dict.fromkeys(written_from(base, path) for path in found))


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and path.name.isidentifier() and any(path.glob("*.py")))


class _Looking:
    """Looks at the sources of one job, by worker programs on the host."""

    def __init__(
        self,
        request: InitRequest,
        worker: StoredFile,
        host: LocalSession,
        project: ProjectDirectory,
        on_progress: OnProgress,
    ) -> None:
        self._request, self._worker, self._host = request, worker, host
        self._project, self._on_progress = project, on_progress

    def look(self, sources: Sources, say: Say) -> tuple[Sources, Looks]:
        """Return what was seen, and the sources, completed by it; raises InputError."""
        first: DataLook | None = None
        if sources.is_application and not sources.model_args:  # its arguments depend on the data
            say(f"looking at the data: {sources.public.path}")
            first = self._look_at_public(self._job(sources, DEFAULT_SIZE), None)
            sources = replace(sources, model_args=choose_application_args(first))
        job = self._job(sources)
        say(f"looking at the model: {sources.model}")
        model = self._serialize(job).info
        if first is None:
            say(f"looking at the data: {sources.public.path}")
        if first is None or first.info.sample_shape != tuple(model.input_shape):
            first = self._look_at_public(job, model)
        if not model.is_built:
            model = self._serialize(job, first.info).info
        validation = self._look_at_validation(job, model, first)
        return sources, Looks(model, first, validation)

    def check(self, sources: Sources, looks: Looks) -> InputError | None:
        """Return what `prepare` would say to the job file, None if it is content."""
        try:
            job = self._parse(render_job(sources, looks))
            model = self._serialize(job, looks.public.info)
            validation = looks.validation.info if looks.validation else None
            datasets = {"public": looks.public.info, "validation": validation}
            check_compatibility(model.info.recipe, model.info, datasets)
        except InputError as error:
            return error
        return None

    def _job(self, sources: Sources, size: tuple[int, ...] = ()) -> Job:
        return self._parse(draft_job(sources, image=(*size, 3) if size else ()))

    def _parse(self, text: str) -> Job:
        path = self._request.output.absolute()
        return build_job(parse_document(text, JobFile, name=str(self._request.output)), path)

    def _serialize(self, job: Job, data: DatasetInfo | None = None) -> SerializedModel:
        shapes = shapes_of(data) if data else None
        model = serialize_model(job, self._worker, self._host, self._project)
        if model.info.is_built or shapes is None:
            return model
        return serialize_model(job, self._worker, self._host, self._project, shapes)

    def _look_at_public(self, job: Job, model: ModelInfo | None) -> DataLook:
        spec = first_spec(job, model or ModelInfo(job.model, (), (), 0, 0, "", is_built=False))
        if model is not None and is_any_size(model) and job.reading.picture.shape is None:
            spec = replace(spec, picture=replace(spec.picture, shape=_picture_shape(model, DEFAULT_SIZE)))
        found = self._look("public", job, replace(spec, names_classes=True), str(job.public_path))
        check_classes("--public", str(job.public_path), found.class_counts)
        if found.pictures and model is not None and is_any_size(model):
            shape = _picture_shape(model, choose_size(found)[0])
            found = replace(found, info=replace(found.info, sample_shape=shape))
        return found

    def _look_at_validation(self, job: Job, model: ModelInfo, public: DataLook) -> DataLook | None:
        if job.validation_path is None:
            return None
        spec = follow(first_spec(job, model), public.info)
        if public.pictures:
            spec = replace(spec, picture=replace(spec.picture, shape=public.info.sample_shape))
        spec = replace(spec, table=public.table, records=public.records)
        return self._look("validation", job, spec, str(job.validation_path))

    def _look(self, name: str, job: Job, spec: PrepareSpec, source: str) -> DataLook:
        reading = job.reading
        function = reading.public_function if name == "public" else reading.validation_function
        spec = with_function(spec, function, *store_function(job, function, self._project))
        return call_worker(
            self._host,
            sys.executable,
            self._worker.path,
            "look",
            LookSpec(replace(spec, source=source), self._request.label, self._request.dropped),
            DataLook,
            lambda progress: self._on_progress(name, progress),
            doing="looking at the data",
        )


def _picture_shape(model: ModelInfo, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of pictures for a model that takes any size."""
    channels = model.input_shape[2] if len(model.input_shape) == 3 else 3
    return (*size, channels or 3)


def _with_options(error: InputError) -> InputError:
    """Return the error of a worker with the options of `init` in its remedy."""
    remedy = error.remedy
    for key, option in _OPTIONS.items():
        remedy = remedy.replace(key, option)
    return InputError(error.message, remedy=remedy)
