"""`prepare`: data into the project's form where it lies, and the model into the form that travels.

Public data and the model are worked on by a worker process on the host, private data by the worker on its
own node: the controller itself opens neither. Everything is kept by content, so a second time is quick.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from csdctl.documents import build_aside, save_json
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.fit import check_fit
from csdctl.job.model import Job
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.chunks import SharedChunks
from csdctl.shipping.deliver import deliver
from csdctl.shipping.parcel import pack_parcel
from csdctl.shipping.store import StoredFile, store_bytes, store_file
from csdctl.shipping.worker_calls import run_worker
from csdctl.shipping.worker_zip import pack_worker
from csdctl.transport.local import LocalSession
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.session import Session
from csdctl.worker.contract import DatasetInfo, ModelInfo, from_json, to_json

DATA_STORE = ".csdctl/data"
PREPARE_DEADLINE_S = 3600.0
BUILD_DEADLINE_S = 300.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class CarriedModel:
    """A model as it travels."""

    info: ModelInfo
    architecture: StoredFile
    weights: StoredFile


@dataclass(frozen=True)
class Prepared:
    """What a job needs before it can be tuned: worker, model, and data where it lies."""

    worker: StoredFile
    model: CarriedModel
    public: DatasetInfo
    validation: DatasetInfo | None
    private: dict[str, DatasetInfo]
    """By node; empty when the job has no private data."""


def python_of(fleet: Fleet, machine: str) -> str:
    """The Python that runs the worker on `machine`."""
    return sys.executable if machine == HOST_NAME else fleet.node(machine).python


def prepare_job(
    job: Job, fleet: Fleet, sessions: Mapping[str, Session], project: ProjectDirectory, say: Say
) -> Prepared:
    """Prepare model, public and private data of `job`; raises InputError when they do not fit together."""
    worker = store_bytes(pack_worker(), ".pyz", project.root)
    host = sessions[HOST_NAME]
    say("model: " + job.model)
    model = carry_model(job, worker, host, project)
    say(f"public data: {job.public_path}")
    public = _prepare_on(host, sys.executable, worker, str(job.public_path))
    validation = None
    if job.validation_path:
        say(f"validation data: {job.validation_path}")
        validation = _prepare_on(host, sys.executable, worker, str(job.validation_path))
    private = _prepare_private(job, fleet, sessions, worker, say) if job.private_path else {}
    check_fit(job.recipe, model.info, {"public": public, "validation": validation, **private})
    return Prepared(worker, model, public, validation, private)


def prepare_code(job: Job, directory: Path, say: Say) -> list[StoredFile]:
    """Worker and model alone, in the host's store below `directory`; no node has a part in it."""
    worker = store_bytes(pack_worker(), ".pyz", directory)
    say("model: " + job.model)
    with closing(LocalSession(HOST_NAME, directory)) as host:
        model = carry_model(job, worker, host, ProjectDirectory(directory))
    return [worker, model.architecture, model.weights]


def carry_model(job: Job, worker: StoredFile, host: Session, project: ProjectDirectory) -> CarriedModel:
    """Build the job's model in a worker process, once for each content of it."""
    directory = project.models / _model_key(job, worker)
    record = directory / "info.json"
    if not record.exists():
        with build_aside(directory) as aside:
            arguments = ["build", "--reference", job.model, "--arguments", json.dumps(job.model_args)]
            arguments += ["--recipe", to_json(job.recipe), "--output", str(aside)]
            info = run_worker(
                host,
                sys.executable,
                worker.path,
                arguments,
                ModelInfo,
                doing="building the model",
                deadline_s=BUILD_DEADLINE_S,
            )
            save_json(aside / "info.json", json.loads(to_json(info)))
    return CarriedModel(
        from_json(ModelInfo, record.read_text()),
        store_file(directory / "architecture.json", project.root),
        store_file(directory / "weights.npz", project.root),
    )


def _model_key(job: Job, worker: StoredFile) -> str:
    """Changes with all that the built model depends on; a model's file may import those beside it."""
    described = [job.model, job.model_args, to_json(job.recipe), worker.sha256, version("keras")]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    if job.model_file:
        beside = set(job.model_file.parent.glob("*.py")) | {job.model_file}
        for path in sorted(beside):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _prepare_private(
    job: Job, fleet: Fleet, sessions: Mapping[str, Session], worker: StoredFile, say: Say
) -> dict[str, DatasetInfo]:
    """Each node prepares its own private data; a node without any, or that fails, is an error."""
    path = str(job.private_path)
    nodes = {node.name: sessions[node.name] for node in fleet.nodes}
    say(f"private data: {path} on {len(nodes)} nodes")
    parcel, chunks = pack_parcel([worker.as_object()]), SharedChunks()

    def on_node(session: Session) -> DatasetInfo:
        deliver(session, parcel, chunks, python=python_of(fleet, session.name))
        return _prepare_on(session, python_of(fleet, session.name), worker, path)

    return values_or_raise(run_on_all(nodes, on_node), "preparing private data")


def _prepare_on(session: Session, python: str, worker: StoredFile, source: str) -> DatasetInfo:
    return run_worker(
        session,
        python,
        worker.path,
        ["prepare", f"--source={source}", "--store", DATA_STORE],
        DatasetInfo,
        doing="preparing data",
        deadline_s=PREPARE_DEADLINE_S,
    )
