"""The model of a job: built on the host by a worker process, serialized, and cached by content."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from csdctl.documents import (
    MAX_JSON_BYTES,
    build_atomically,
    check_values,
    load_json,
    load_text,
    save_json,
    save_text,
)
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job, python_files
from csdctl.notify import Say
from csdctl.reporting.numbers import format_count
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile, hash_file, store_bytes, store_file
from csdctl.shipping.worker_calls import call_worker
from csdctl.shipping.worker_zip import pack_code, pack_worker
from csdctl.transport.local import LocalSession
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import within
from csdctl.transport.session import Session
from csdctl.tuning.measurements import ModelProperties, describe_model
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import from_json, to_json
from csdctl.worker.protocol.model_info import BuildRequest, BuildSpec, ModelInfo
from csdctl.worker.protocol.run_spec import UserCode

MODEL_FILES = ("info.json", "architecture.json", "weights.npz")
PART_FILES = ("prefix.json", "prefix.npz", "head.json", "head.npz")
"""Files of the two parts of a model whose first layers are frozen."""
HASHES, SHAPES = "hashes.json", "shapes.json"
BUILD_DEADLINE_S = 300.0

SampleShapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each array of a sample by name, '' for the only one."""


@dataclass(frozen=True)
class SerializedModel:
    """A model as it is sent to the nodes."""

    info: ModelInfo
    architecture: StoredFile
    weights: StoredFile
    code: StoredFile | None = None
    """The job's own code, if the nodes need it: for the model, or for `data.augment` alone."""
    code_roots: tuple[Path, ...] = ()
    """The files and packages in it."""
    parts: tuple[StoredFile, ...] = ()
    """PART_FILES; none if the model has no frozen part at its beginning."""

    @property
    def user_code(self) -> UserCode | None:
        """The code as the ranks are told of it."""
        modules = tuple(root.stem for root in self.code_roots)
        return UserCode(self.code.path, modules) if self.code else None

    @property
    def files(self) -> list[StoredFile]:
        """Files of the model that every machine needs."""
        return [self.architecture, self.weights, *([self.code] if self.code else [])]


def store_worker(project: ProjectDirectory) -> StoredFile:
    """Store the worker on the host."""
    return store_bytes(pack_worker(), ".pyz", project.root, TrafficClass.CODE)


def prepare_code(job: Job, directory: Path, say: Say) -> tuple[StoredFile, SerializedModel]:
    """Prepare only worker and model, in the host's store below `directory`; contact no node."""
    project = ProjectDirectory(directory)
    worker = store_worker(project)
    with closing(LocalSession(HOST_NAME, directory)) as host:
        model = serialize_model(job, worker, host, project, None, lambda: say(f"building {job.model}"))
    if not model.info.is_built:
        raise InputError(
            f"{job.model} returns a model that gets its weights from the data's shapes, which are not known",
            remedy="run `csdctl prepare` first",
        )
    return worker, model


def describe_job_model(job: Job, directory: Path, say: Say) -> ModelProperties:
    """Return the features that identify the job's model in measurements; builds the model if needed."""
    _, model = prepare_code(job, directory, say)
    return describe_model(model.info, model.architecture.sha256)


def serialize_model(
    job: Job,
    worker: StoredFile,
    host: Session,
    project: ProjectDirectory,
    shapes: SampleShapes | None = None,
    on_build: Callable[[], None] = lambda: None,
) -> SerializedModel:
    """Build and serialize the job's model in a worker process, cached by content.

    `shapes` are those of the data, for a model that is built by being called; without them its `info` may
    say that it is not built. `on_build` is called before a build.
    """
    directory = project.models / _model_key(job, worker)
    if not have_hashes(directory, _files_of(directory)) or (
        shapes is not None and _load_shapes(directory) != shapes
    ):
        on_build()
        _build(job, worker, host, directory, shapes)
    info = from_json(ModelInfo, load_text(directory / "info.json", max_bytes=MAX_JSON_BYTES))
    roots = job.code_roots if info.needs_code else job.augment_roots
    code = store_bytes(pack_code(roots), ".zip", project.root, TrafficClass.CODE) if roots else None
    return SerializedModel(
        info,
        store_file(directory / "architecture.json", project.root, TrafficClass.MODEL),
        store_file(directory / "weights.npz", project.root, TrafficClass.MODEL),
        code,
        roots,
        tuple(store_file(directory / name, project.root, TrafficClass.MODEL) for name in PART_FILES)
        if info.features
        else (),
    )


def shapes_of(data: DatasetInfo) -> SampleShapes:
    """Return types and shapes of a sample as a model is called with them."""

    def called_with(dtype: str) -> str:
        return "float32" if dtype == "uint8" or dtype.startswith("float") else dtype

    return {name: (called_with(dtype), shape) for name, (dtype, shape) in data.inputs.items()}


def describe_code(code: StoredFile, roots: Sequence[Path]) -> str:
    """Return in words what is sent: the files, their number and a hash."""
    names = ", ".join(f"{root.name}/" if root.is_dir() else root.name for root in roots)
    return f"{names} ({format_count(python_files(roots), 'file')}, {code.sha256[:12]})"


def _build(job: Job, worker: StoredFile, host: Session, directory: Path, shapes: SampleShapes | None) -> None:
    spec = BuildSpec(
        job.model,
        job.model_args,
        job.recipe,
        str(job.path.parent.resolve()),
        tuple(map(str, job.code_roots)),
        shapes or {},
        job.step,
    )
    with build_atomically(directory) as aside:
        info = call_worker(
            host,
            sys.executable,
            worker.path,
            "build",
            BuildRequest(spec, str(aside)),
            ModelInfo,
            doing="building the model",
            patience=within(BUILD_DEADLINE_S),
        )
        for name in MODEL_FILES:
            (aside / name).touch()  # of a model that is not built, nothing was written
        save_text(aside / "info.json", to_json(info) + "\n")  # inputs in the model's order, as `fit` has them
        listed = {name: [dtype, list(shape)] for name, (dtype, shape) in (shapes or {}).items()}
        save_json(aside / SHAPES, listed)
        save_json(aside / HASHES, {file: hash_file(aside / file) for file in _files_of(aside)})


def _load_shapes(directory: Path) -> SampleShapes:
    try:
        return check_values(load_json(directory / SHAPES), SampleShapes, str(directory))
    except (InputError, OSError):
        return {}


def have_hashes(directory: Path, names: Sequence[str]) -> bool:
    """Return whether files were made here, and have not changed since."""
    try:
        hashes = check_values(load_json(directory / HASHES), dict[str, str], str(directory))
        return hashes == {name: hash_file(directory / name) for name in names}
    except (InputError, OSError):
        return False


def _files_of(directory: Path) -> list[str]:
    """Return the names of the files of a built model."""
    return [*MODEL_FILES, *(name for name in PART_FILES if (directory / name).exists())]


def _model_key(job: Job, worker: StoredFile) -> str:
    """Return a hash of all inputs of the built model; its file may import modules beside it."""
    roots = [str(root) for root in job.code_roots]
    written = [job.model, job.model_args, job.step, to_json(job.recipe)]
    described = [*written, worker.sha256, version("keras"), roots]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    files = set(job.code_files)
    if job.model_file:
        files |= {*job.model_file.parent.glob("*.py"), job.model_file}
    for path in sorted(path for path in files if path.is_file()):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:32]
