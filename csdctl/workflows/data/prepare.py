"""`prepare`: convert data in place to the project's format, and serialize the model.

A worker process on the host handles public data and the model, the worker of each node its private data.
Results are stored by content. Only a record with counts and shapes tells what was prepared for a job.
"""

import hashlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from csdctl.documents import load_kept, save_json
from csdctl.errors import InputError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.compatibility import check_compatibility, check_noise, inputs_of, is_regression
from csdctl.job.model import HostData, Job, PrivateData, find_imported, python_files
from csdctl.notify import Say
from csdctl.reporting.numbers import format_count
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.deliver import deliver, pack_payload
from csdctl.shipping.store import StoredFile, pack_code, store_bytes, store_file
from csdctl.shipping.worker_calls import WorkerProgram, call_worker
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import Nothing, within
from csdctl.transport.session import Session
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.features import Extracted, ExtractSpec
from csdctl.worker.protocol.json_codec import Count, shorten, to_json
from csdctl.worker.protocol.model_info import AugmentTrial, ModelInfo
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import UserCode
from csdctl.workflows.data.compile import ModelCompiler, start_compiling
from csdctl.workflows.data.files import SerializedModel, serialize_model, shapes_of, store_worker, whole
from csdctl.workflows.workspace.event_stream import EventStream, OnProgress
from csdctl.workflows.workspace.workspace import Workspace, open_workspace, worker_on

DEADLINE_S = 300.0
DATA_STORE = ".csdctl/data"
SHARED_STORE = ".csdctl-data"
"""Directory beside public data on a shared file system: every node must see the prepared data too."""
DOING = "preparing data"
MAX_AGAIN_S = 10.0
"""Preparing that took longer prepared something new."""


@dataclass(frozen=True)
class PreparedData:
    """The prepared data of one job."""

    key: str
    """Hash of the job's data section; the data itself may have changed since."""
    public: DatasetInfo
    """Without class names."""
    num_private: dict[str, Count] = field(default_factory=dict)
    """Private samples by node."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests by 'public', 'validation' or node: the fingerprint of its data, and a hash of the description
    that was received when the data was prepared, with the hashes of its files."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.public.num_samples + sum(self.num_private.values())


def save_prepared(
    project: ProjectDirectory,
    job: Job,
    datasets: Mapping[str, DatasetInfo],
    private: Mapping[str, DatasetInfo],
    absent: Mapping[str, "Recorded"] | None = None,
) -> None:
    """Save the record of `job`. `datasets` are on the host, 'public' among them."""
    digests = {name: _digest(info) for name, info in {**datasets, **private}.items()}
    record = PreparedData(
        _key(job),
        datasets["public"].element_spec,
        count_samples(private, absent or {}),
        _load_digests(project, job) | digests,
    )
    save_json(project.prepared(job.name), record)


def find_changed(project: ProjectDirectory, job: Job, datasets: Mapping[str, DatasetInfo]) -> list[str]:
    """Return the data sets that are now described differently than when the same data was prepared."""
    before = _load_digests(project, job)
    now = {name: _digest(info) for name, info in datasets.items()}
    return [
        name
        for name, digest in now.items()
        if before.get(name, digest) != digest and before[name].partition(" ")[0] == digest.partition(" ")[0]
    ]


def _digest(info: DatasetInfo) -> str:
    return f"{info.fingerprint} {hashlib.sha256(to_json(info).encode()).hexdigest()}"


def _load_digests(project: ProjectDirectory, job: Job) -> dict[str, str]:
    record = load_kept(project.prepared(job.name), PreparedData)
    return record.digests if record else {}


def load_prepared(project: ProjectDirectory, job: Job) -> PreparedData | None:
    """Return the record of `job`. None when its current data section was never prepared."""
    record = load_kept(project.prepared(job.name), PreparedData)
    return record if record and record.key == _key(job) else None


def load_absent(project: ProjectDirectory, job: Job, nodes: Collection[str]) -> dict[str, "Recorded"]:
    """Return what is recorded of the private data of `nodes`, as far as it was ever prepared."""
    if (record := load_prepared(project, job)) is None:
        return {}
    return {
        name: Recorded(number, record.digests.get(name, "").partition(" ")[0])
        for name, number in record.num_private.items()
        if name in nodes
    }


def _key(job: Job) -> str:
    data = job.data
    reading = (data.public.path, job.private_path, data.functions)
    described = (*reading, data.image, data.classes, data.tfrecord, data.csv, data.allow_nan)
    digest = hashlib.sha256(repr(described).encode())
    for file in job.function_files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _check_augment(
    job: Job, model: SerializedModel, public: DatasetInfo, worker: StoredFile, space: Workspace, *, say: Say
) -> None:
    code = model.user_code
    if not job.recipe.augment or code is None:
        return
    trial = AugmentTrial(job.recipe.augment, code, whole(public), job.recipe.seed)
    content = f"{to_json(trial)} {worker.sha256}"
    tried = space.project.models / f"augment-{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"
    if tried.is_file():
        return
    call = partial(call_worker, *worker_on(space, HOST_NAME, worker), doing="trying data.augment")
    call("augment", trial, Nothing, patience=within(DEADLINE_S))
    say(f"augmentation of training batches: {job.recipe.augment}, tried on public samples")
    save_json(tried, {})


@dataclass(frozen=True)
class Recorded:
    """The recorded private data of a node that cannot be reached."""

    num_samples: int
    fingerprint: str


def count_samples(private: Mapping[str, DatasetInfo], absent: Mapping[str, Recorded]) -> dict[str, int]:
    """Return the private samples of each node."""
    counts = {name: info.num_samples for name, info in private.items()}
    return counts | {name: recorded.num_samples for name, recorded in absent.items()}


@dataclass(frozen=True)
class Prepared:
    """The artifacts of a job that tuning and training need: worker, model, and prepared data."""

    worker: StoredFile
    model: SerializedModel
    public: DatasetInfo
    validation: DatasetInfo | None
    private: dict[str, DatasetInfo]
    """Private data by node; empty when the job has none."""
    absent: dict[str, Recorded] = field(default_factory=dict)
    """By node that cannot be reached, its private data as it was recorded."""
    prepare_node: Callable[[Session], DatasetInfo] | None = None
    """Prepare private data on a node that can be reached later; raises CsdctlError."""
    again_s: float = 0.0
    """Seconds that preparing once more is expected to take: machines look at what they have."""

    @property
    def num_private(self) -> dict[str, int]:
        """Private samples by node."""
        return count_samples(self.private, self.absent)

    @property
    def files(self) -> list[StoredFile]:
        """Files that every machine needs to train or measure."""
        return [self.worker, *self.model.files]

    @property
    def recipe(self) -> Recipe:
        """The job's recipe, with what the compiled model adds."""
        return self.model.info.recipe


def prepare_job(
    job: Job,
    space: Workspace,
    say: Say,
    on_progress: OnProgress = lambda data, progress: None,
    *,
    is_checked: bool = False,
    is_trained: bool = True,
) -> Prepared:
    """Prepare model, public and private data of `job`. Raises InputError when they are incompatible.

    Class names come from the job or the folders of the public data, so that all machines number them alike.
    `on_progress` gets 'public', 'validation' or a node's name, from any thread. With `is_checked`, data that
    was prepared before is compared with its hashes, and prepared again if it differs. Without, it is an
    InputError when it is described differently than then. Unless it `is_trained`, the labels may be any.
    """
    project, host = space.project, space.sessions[HOST_NAME]
    worker = store_worker(project)
    say("model: " + job.model)
    ahead: list[WorkerProgram] = []

    def start_ahead() -> None:
        ahead.append(start_compiling(worker, space))

    serialize = partial(serialize_model, job, worker, host, project)
    model = serialize(on_build=start_ahead) if is_trained else serialize()
    spec = first_spec(job, model.info, is_checked=is_checked)
    preparing = _Preparing(job, spec, space, worker, on_progress)
    say(f"public data: {job.data.public.path}")
    public = preparing.on_host("public", job.data.public)
    if not model.info.is_built:
        model = serialize(shapes_of(public))
        # As the next command, which knows the model from the start.
        preparing.spec = first_spec(job, model.info, is_checked=is_checked)
        public = preparing.on_host("public", job.data.public)
    preparing.spec = follow(preparing.spec, public)
    if model.code:
        names = ", ".join(f"{root.name}/" if root.is_dir() else root.name for root in model.code_roots)
        number = format_count(python_files(model.code_roots), "file")
        say(f"code for the nodes: {names} ({number}, {model.code.sha256[:12]})")
    _check_augment(job, model, public, worker, space, say=say)
    validation = None
    if data := job.data.validation:
        say(f"validation data: {data.path}")
        validation = preparing.on_host("validation", data)
    private: dict[str, DatasetInfo] = {}
    absent: dict[str, Recorded] = {}
    prepare_node = None
    if job.data.private:
        absent = load_absent(project, job, space.unreachable)
        prepare_node = preparing.node_preparer(job.data.private)
        say(f"private data: {job.private_path} on {format_count(space.fleet.names_without_servers, 'node')}")
        nodes = {name: space.sessions[name] for name in space.fleet.names_without_servers}
        private = values_or_raise(run_on_all(nodes, prepare_node), "preparing private data")
    datasets = {"public": public, "validation": validation, **private}
    check_compatibility(model.info, datasets, needs_labels=is_trained)
    if job.noise:
        check_noise(job.noise, model.info, private)
    of_host = {"public": public} | ({"validation": validation} if validation else {})
    for name in find_changed(project, job, of_host | private):
        if not is_checked:
            raise InputError(
                f"the prepared data of {name} has another description than when it was prepared",
                remedy="run `csdctl prepare`, which compares it with its hashes",
                node=name if name in private else "",
            )
        say(f"{name}: the prepared data had changed and was prepared again")
    save_prepared(project, job, of_host, private, absent)
    if is_trained:
        model = ModelCompiler(job, model, public, worker, space, say=say).step(*ahead[:1])
    return Prepared(worker, model, public, validation, private, absent=absent, prepare_node=prepare_node)


@dataclass
class _Preparing:
    """Prepares the data sets of a job, each on its machine."""

    job: Job
    spec: PrepareSpec
    """Settings that all data sets have in common."""
    space: Workspace
    worker: StoredFile
    on_progress: OnProgress

    def on_host(self, name: str, data: HostData) -> DatasetInfo:
        """Prepare a data set of the host. The user's function runs from the store, as on a node."""
        spec, _ = add_function(self.spec, self.job, data.function, self.space.project)
        spec = replace(spec, source=str(data.path), names_classes=name == "public")
        if data.on == "every-node":
            spec = replace(spec, store=str(data.path.parent / SHARED_STORE), is_shared=True)
        return self._prepare(name, self.space.sessions[HOST_NAME], spec)

    def node_preparer(self, private: PrivateData) -> Callable[[Session], DatasetInfo]:
        """Return what prepares private data on a node that is no server. Raises if it has none."""
        fleet = self.space.whole
        spec, files = add_function(self.spec, self.job, private.function, self.space.project)
        spec = replace(spec, source=private.path, is_private=True)
        payload = pack_payload([self.worker, *files])

        def on_node(session: Session) -> DatasetInfo:
            deliver(session, payload, python=fleet.python_of(session.name))
            return self._prepare(session.name, session, spec)

        return on_node

    def _prepare(self, name: str, session: Session, spec: PrepareSpec) -> DatasetInfo:
        python, note = self.space.whole.python_of(session.name), partial(self.on_progress, name)
        call = partial(call_worker, session, python, self.worker.path, on_progress=note, doing=DOING)
        info = call("prepare", spec, DatasetInfo)
        check_info(info, session.name, DOING)
        return info


def check_info(info: DatasetInfo, node: str, doing: str, *, may_be_empty: bool = False) -> None:
    """Raise RemoteCommandError for a data set that a node cannot have: the host plans with its numbers."""
    is_possible = info.path and info.dtype and info.label_dtype and (info.num_samples or may_be_empty)
    if not is_possible or not re.fullmatch(r"[0-9a-f]{8,64}", info.fingerprint):
        raise RemoteCommandError(f"{doing}: received an impossible data set: {shorten(info)}", node=node)


def extract_on(
    space: Workspace,
    machine: str,
    worker: StoredFile,
    spec: ExtractSpec,
    note: Callable[[PrepareProgress], None],
    *,
    doing: str,
) -> Extracted:
    """Have a machine run a model over samples. Raises RemoteCommandError for another number of data sets."""
    call = partial(call_worker, *worker_on(space, machine, worker), on_progress=note, doing=doing)
    extracted = call("extract", spec, Extracted)
    expected = 1 + len(spec.more_sources)
    if len(extracted.parts) != expected:
        problem = f"{doing}: received {len(extracted.parts)} data sets, expected {expected}"
        raise RemoteCommandError(problem, node=machine)
    for info in extracted.parts:
        check_info(info, machine, doing, may_be_empty=True)
    return extracted


def first_spec(job: Job, model: ModelInfo, *, is_checked: bool = False) -> PrepareSpec:
    """Return what is common to the job's data sets, as long as nothing is known of them."""
    data, picture = job.data, job.data.image
    if picture.shape is None:
        picture = replace(picture, shape=model.input_shape)
    return PrepareSpec(
        "",
        DATA_STORE,
        picture,
        classes=data.classes,
        records=data.tfrecord,
        is_checked=is_checked,
        inputs=inputs_of(model),
        outputs=tuple(output.name for output in model.outputs if output.name),
        table=data.csv,
        is_regression=is_regression(model),
        allows_nan=data.allow_nan,
    )


def follow(spec: PrepareSpec, public: DatasetInfo) -> PrepareSpec:
    """Return `spec` for other data sets: with classes, shapes and types as the public data has them."""
    if spec.classes is None and public.class_counts:
        spec = replace(spec, classes=tuple(public.class_counts))
    inputs = {name: shape for name, (_, shape) in public.inputs.items()}
    return replace(spec, inputs=inputs, labels=public.labels, columns=public.columns)


def add_function(
    spec: PrepareSpec, job: Job, function: str, project: ProjectDirectory
) -> tuple[PrepareSpec, list[StoredFile]]:
    """Return `spec` with a user's function, and its file and what it imports of the job's code, stored."""
    if not function:
        return replace(spec, function="", code=None), []
    path, _, name = function.rpartition(":")
    stored = [store_file(Path(path), project.root, TrafficClass.CODE)]
    if imported := find_imported(Path(path), job.code_roots):
        stored.append(store_bytes(pack_code(imported), ".zip", project.root, TrafficClass.CODE))
    code = UserCode(stored[1].path, ()) if imported else None
    return replace(spec, function=f"{stored[0].path}:{name}", code=code), stored


def prepare_in(space: Workspace, job: Job, events: EventStream, **options: bool) -> Prepared:
    """Prepare `job` on the machines of `space`, with options of `prepare_job`. Raises its errors."""
    began = time.monotonic()
    with events.working("preparing data") as on_progress:
        prepared = prepare_job(job, space, events.say, on_progress, **options)
    return replace(prepared, again_s=min(time.monotonic() - began, MAX_AGAIN_S))


def prepare_fleet(job: Job, fleet: Fleet, directory: Path, events: EventStream) -> Prepared:
    """Prepare `job` on the host and all nodes of `fleet`. Raises InputError or PartialError."""
    with open_workspace(directory, fleet, "prepare", is_locking=True, say=events.say) as space:
        return prepare_in(space, job, events, is_checked=True)
