"""Files that machines get for a job: worker, model and public shards, and trees of the user.

The model is built by a worker process and cached by content. Private data is never read here.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from csdctl import documents
from csdctl.documents import load_kept, save_json
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.placement.equation1 import Placed
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping import store
from csdctl.shipping.store import StoredFile, hash_file, pack_worker, store_bytes, store_file, stored_as
from csdctl.shipping.worker_calls import call_worker
from csdctl.transport.local import LocalSession
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import within
from csdctl.transport.session import Session
from csdctl.tuning.measurements import ModelProperties, describe_model
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.durable_files import replacing_directory, save_text
from csdctl.worker.protocol.file_state import file_state
from csdctl.worker.protocol.json_codec import from_json, to_json
from csdctl.worker.protocol.model_info import BuildRequest, BuildSpec, ModelInfo
from csdctl.worker.protocol.run_spec import CompiledStep, DatasetSlice, UserCode

MODEL_FILES = ("info.json", "architecture.json", "weights.npz")
PART_FILES = ("prefix.json", "prefix.npz", "head.json", "head.npz")
"""Files of the two parts of a model whose first layers are frozen."""
HASHES, SHAPES, SEALED = "hashes.json", "shapes.json", ""
ARRAYS = ("images.npy", "labels.npy")
"""Files of prepared data, and of a shard of it."""
WEIGHT_FILES = (".h5", ".keras")
"""Files beside the model's that its function may read, by their suffixes."""
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
    """The job's code, if the nodes need it: for the model, or only for `data.augment`."""
    code_roots: tuple[Path, ...] = ()
    """The files and packages in it."""
    parts: tuple[StoredFile, ...] = ()
    """PART_FILES; none if the model has no frozen part at its beginning."""
    compiled: tuple[StoredFile, ...] = ()
    """Graph, info and state of the compiled step."""
    template: str = ""
    """Path, relative to the project, of a file of Keras with the model; '' for none."""

    @property
    def step(self) -> CompiledStep | None:
        """The compiled step as the ranks are told of it."""
        if not self.compiled:
            return None
        graph, info, state = (file.path for file in self.compiled)
        return CompiledStep(graph, info, state, self.template)

    def describe(self) -> ModelProperties:
        """Return the features that identify the model in measurements."""
        code_hash = self.code.sha256 if self.code else ""
        return describe_model(self.info, self.architecture.sha256, code_hash)

    @property
    def user_code(self) -> UserCode | None:
        """The code as the ranks are told of it."""
        modules = tuple(root.stem for root in self.code_roots)
        return UserCode(self.code.path, modules) if self.code else None

    @property
    def files(self) -> list[StoredFile]:
        """Files of the model that every machine needs. Of a compiled one, neither the model nor its code."""
        files = [*self.compiled] or [self.architecture, self.weights]
        has_code = self.code and (self.info.recipe.augment or not self.compiled)
        return [*files, *([self.code] if self.code and has_code else [])]


def store_worker(project: ProjectDirectory) -> StoredFile:
    """Store the worker on the host."""
    return store_bytes(pack_worker(), ".pyz", project.root, TrafficClass.CODE)


def prepare_code(job: Job, directory: Path, say: Say) -> tuple[StoredFile, SerializedModel]:
    """Prepare only worker and model, in the host's store below `directory`. Contact no node."""
    project = ProjectDirectory(directory)
    worker = store_worker(project)
    with closing(LocalSession(HOST_NAME, directory)) as host:
        on_build = partial(say, f"building {job.model}")
        model = serialize_model(job, worker, host, project, on_build=on_build)
    if not model.info.is_built:
        raise InputError(
            f"{job.model} returns a model that gets its weights from the data's shapes, which are not known",
            remedy="run `csdctl prepare` first",
        )
    return worker, model


def serialize_model(
    job: Job,
    worker: StoredFile,
    host: Session,
    project: ProjectDirectory,
    shapes: SampleShapes | None = None,
    on_build: Callable[[], None] = lambda: None,
) -> SerializedModel:
    """Build and serialize the job's model in a worker process, cached by content.

    `shapes`: of the data, for a model that is built by being called. `on_build` is called before a build.
    """
    directory = project.models / _model_key(job, worker)
    if not load_intact(directory) or (
        shapes is not None and (load_kept(directory / SHAPES, SampleShapes) or {}) != shapes
    ):
        on_build()
        _build(job, worker, host, directory, shapes)
    info = from_json(
        ModelInfo, documents.load_text(directory / "info.json", max_bytes=documents.MAX_JSON_BYTES)
    )
    roots = job.code_roots if info.needs_code else job.augment_roots
    code = store_bytes(store.pack_code(roots), ".zip", project.root, TrafficClass.CODE) if roots else None
    architecture, weights, *parts = (
        store_file(directory / name, project.root, TrafficClass.MODEL)
        for name in ("architecture.json", "weights.npz", *(PART_FILES if info.features else ()))
    )
    return SerializedModel(info, architecture, weights, code, roots, parts=tuple(parts))


def shapes_of(data: DatasetInfo) -> SampleShapes:
    """Return types and shapes of a sample as a model is called with them."""
    return {
        name: ("float32" if dtype == "uint8" or dtype.startswith("float") else dtype, shape)
        for name, (dtype, shape) in data.inputs.items()
    }


def _build(job: Job, worker: StoredFile, host: Session, directory: Path, shapes: SampleShapes | None) -> None:
    spec = BuildSpec(
        job.model,
        job.model_args,
        job.recipe,
        directory=str(job.path.parent.resolve()),
        code_roots=tuple(map(str, job.code_roots)),
        sample_shapes=shapes or {},
        step=job.step,
    )
    call = partial(call_worker, host, sys.executable, worker.path, doing="building the model")
    with replacing_directory(directory) as aside:
        request = BuildRequest(spec, str(aside))
        info = call("build", request, ModelInfo, patience=within(BUILD_DEADLINE_S))
        for name in MODEL_FILES:
            (aside / name).touch()  # of a model that is not built, nothing was written
        # Inputs in the model's order, as `fit` has them.
        save_text(aside / "info.json", to_json(info) + "\n")
        listed = {name: [dtype, list(shape)] for name, (dtype, shape) in (shapes or {}).items()}
        save_json(aside / SHAPES, listed)
        seal(aside, directory.name)


def seal(directory: Path, name: str) -> dict[str, str]:
    """Record and return the hashes of all files in a complete directory, which will be called `name`."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    hashes = {str(file.relative_to(directory)): hash_file(file) for file in files}
    save_json(directory / HASHES, {SEALED: name, **hashes})
    return hashes


def load_intact(directory: Path) -> dict[str, str]:
    """Return the hashes of a directory sealed by this name. {} if there is none, or a file has changed."""
    recorded = load_kept(directory / HASHES, dict[str, str]) or {}
    try:
        is_own = recorded.pop(SEALED, "") == directory.name
        return recorded if is_own and all(hash_file(directory / k) == recorded[k] for k in recorded) else {}
    except OSError:
        return {}


def _model_key(job: Job, worker: StoredFile) -> str:
    """Return a hash of all inputs of the built model. Its file may import modules beside it."""
    roots = [str(root) for root in job.code_roots]
    written = [job.model, job.model_args, job.step, to_json(job.recipe)]
    described = [*written, worker.sha256, version("keras"), roots]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    files = {*job.code_files, job.path.parent / "keras.json", Path.home() / ".keras" / "keras.json"}
    if job.model_file:
        files |= {*job.model_file.parent.glob("*.py"), job.model_file}
    for path in sorted(path for path in files if path.is_file()):
        digest.update(os.fsencode(path) + path.read_bytes())
    beside = {*job.model_file.parent.iterdir()} - files if job.model_file else ()
    for path in sorted(path for path in beside if path.suffix in WEIGHT_FILES and path.is_file()):
        digest.update(os.fsencode(path) + repr(file_state(path.stat())).encode())
    return digest.hexdigest()[:32]


def cut_shards(
    placed: Sequence[Placed], public: DatasetInfo, job: Job, project: ProjectDirectory
) -> dict[str, tuple[StoredFile, StoredFile]]:
    """Return samples and labels of each node's public shard, cut from the host's data.

    A node with private data needs no empty shard, and one that can read all public data needs none at all.
    """
    if job.is_everywhere:
        return {}
    checked: list[str] = []
    return {
        shard.name: _cut(shard, public, job.recipe.seed, project, checked)
        for shard in placed
        if shard.name != HOST_NAME and (shard.num_public or not shard.num_private)
    }


def whole(data: DatasetInfo) -> DatasetSlice:
    """Return a slice with all rows of a prepared data set."""
    images, labels = (f"{data.path}/{array}" for array in ARRAYS)
    return DatasetSlice(images, labels, images_sha256=data.images_sha256, labels_sha256=data.labels_sha256)


def _cut(
    shard: Placed, public: DatasetInfo, seed: int, project: ProjectDirectory, checked: list[str]
) -> tuple[StoredFile, StoredFile]:
    """Return samples and labels of a shard. Raises InputError if the public data was changed."""
    content = hashlib.sha256(f"{public.images_sha256}{public.labels_sha256}".encode())
    name = f"{content.hexdigest()[:32]}-{seed}-{shard.public_start}-{shard.public_stop}"
    directory = project.shards / name
    if not (hashes := load_intact(directory)):
        import numpy as np

        # The same rows as for a slice start … stop on the host: worker.data.rows_of.
        permutation = np.random.default_rng(seed).permutation(public.num_samples)
        rows = np.sort(permutation[shard.public_start : shard.public_stop])
        expected = dict(zip(ARRAYS, (public.images_sha256, public.labels_sha256), strict=True))
        with replacing_directory(directory) as aside:
            for array, sha256 in expected.items():
                path = project.root / public.path / array
                if array not in checked:
                    hash_now = hash_file(path) if path.is_file() else "no file"
                    if hash_now != sha256:
                        problem = f"is not what was prepared: expected SHA-256 {sha256}, found {hash_now}"
                        raise InputError(f"{public.path}/{array} {problem}", remedy="run `csdctl prepare`")
                    checked.append(array)
                np.save(aside / array, np.load(path, mmap_mode="r", allow_pickle=False)[rows])
            hashes = seal(aside, name)
    images, labels = (
        stored_as(f"{hashes[array]}.npy", directory / array, TrafficClass.PUBLIC) for array in ARRAYS
    )
    return images, labels
