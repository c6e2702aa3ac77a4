"""A project as `tune` leaves it: model built, data prepared, facts, and measurements that the tests choose.

Nothing of it needs TensorFlow or a machine: the steps and sums are those of a model that the tests know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from csdctl.fleet.facts import Facts, save_facts
from csdctl.fleet.hardware import FleetClass, MachineClass, classify_fleet, classify_machine
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.job.model import Job, load_job
from csdctl.perfmodel.prediction import CollectiveCost, StepTime
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import PROBE, SUM, TRIAL, MeasurementStore
from csdctl.shipping.store import pack_worker, store_bytes
from csdctl.tuning import measurements
from csdctl.tuning.measurements import CollectiveMeasurement, ModelProperties, ProbeMeasurement, TrialRank
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import RESULT, from_json, to_frame
from csdctl.worker.protocol.model_info import BuildRequest, ModelInfo
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RunSpec, Runtime, TaskSpec
from csdctl.workflows.data.files import prepare_code, serialize_model
from csdctl.workflows.data.prepare import save_prepared
from csdctl.workflows.train.resolved import ResolvedRun, RunContext, RunData, RunModel
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe
from csdctl.workflows.workspace.event_stream import EventStream
from tests.fake_session import FakeConversation, FakeSession, ScriptedResponse

JOB = """\
model: keras.applications:MobileNetV2
data: {{public: {{path: data}}{private}}}
recipe: {{epochs: 3, learning_rate: 0.1, optimizer: sgd}}
"""
MODEL = ModelInfo("MobileNetV2", {"": (64, 64, 3)}, 2_500_000, 2_000_000, num_operations=50_000_000)
PUBLIC = DatasetInfo("data/images", 60_000, (64, 64, 3), "uint8", (), 9, "f" * 32)
STEPS = {HOST_NAME: StepTime(0.02, 0.002), "csd": StepTime(0.1, 0.02)}
SUMS = CollectiveCost(0.001, 0.002, 0.0, 1e-9)
OVERHEAD_FACTOR = 1.1
SIZES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class MeasuredProject:
    """The parts of the project that tests use."""

    job: Job
    project: ProjectDirectory
    fleet: Fleet
    features: ModelProperties


def make_project(directory: Path, *, num_nodes: int = 2, is_private: bool = False) -> MeasuredProject:
    """Make job, fleet, facts, built model and prepared data, without measurements."""
    (directory / "data").mkdir(exist_ok=True)
    job, project = write_job(directory, is_private=is_private), ProjectDirectory(directory)
    nodes = tuple(Node(f"csd{number}", f"10.1.1.{number + 2}") for number in range(num_nodes))
    names = "\n".join(f"  - {{name: {node.name}, address: {node.address}}}" for node in nodes)
    (directory / "fleet.yaml").write_text(f"nodes:\n{names}\n")
    fleet = Fleet(nodes, path=directory / "fleet.yaml")
    machines = {HOST_NAME: facts_of(HOST_NAME)} | {node.name: facts_of(node.name) for node in nodes}
    save_facts(fleet, machines)
    build(job, project)
    private = {node.name: PUBLIC for node in nodes} if is_private else {}
    save_prepared(project, job, {"public": PUBLIC}, private)
    _, model = prepare_code(job, directory, lambda line: None)
    return MeasuredProject(job, project, fleet, model.describe())


def write_job(directory: Path, *, is_private: bool = False) -> Job:
    """job.yaml."""
    private = ", private: {path: /data/private}" if is_private else ""
    (directory / "job.yaml").write_text(JOB.format(private=private))
    return load_job(directory / "job.yaml")


def facts_of(name: str) -> Facts:
    """A machine that is ready to train."""
    return Facts(
        name,
        architecture="x86_64" if name == HOST_NAME else "aarch64",
        num_cores=8 if name == HOST_NAME else 4,
        memory_bytes=32 << 30,
        python_version="3.11.7",
        tensorflow_version="2.21.0",
        mpi_version="5.0.8",
        mpi4py_version="4.1.0",
    )


def class_of(name: str) -> MachineClass:
    """The class of such a machine."""
    return classify_machine(facts_of(name), is_host=name == HOST_NAME)


def fleet_class() -> FleetClass:
    """The class of such fleets, whatever the number of nodes."""
    return classify_fleet(class_of(HOST_NAME), [class_of("csd0")], "")


class Builder(FakeSession):
    """The host, where building a model takes no TensorFlow."""

    def converse(self, command: Sequence[str]) -> FakeConversation:
        """Write what the worker's `build` would write."""

        def build(line: str) -> list[str]:
            output = Path(from_json(BuildRequest, line).output)
            (output / "architecture.json").write_text("{}")
            (output / "weights.npz").write_bytes(b"weights")
            return [to_frame(RESULT, MODEL)]

        return FakeConversation(self.name, tuple(command), ScriptedResponse(tuple(command), replies=build))


def build(job: Job, project: ProjectDirectory) -> None:
    """Store the job's model as `build` does."""
    worker = store_bytes(pack_worker(), ".pyz", project.root)
    serialize_model(job, worker, Builder(HOST_NAME), project)


def settings_of(name: str) -> Runtime:
    """All cores, as before the first trial."""
    return Runtime(facts_of(name).num_threads)


def measurements_of(at: MeasuredProject, **options: Any) -> FleetMeasurements:
    """What tuning has of earlier measurements, with the whole memory of each machine free."""
    facts = {name: replace(facts_of(name), memory_available_bytes=32 << 30) for name in at.fleet.machines}
    store, recipe = MeasurementStore(at.project.measurements), hash_recipe(at.job, PUBLIC)
    return FleetMeasurements(at.features, recipe, at.fleet, facts, store=store, **options)


def remember_probes(at: MeasuredProject) -> None:
    """Store probes of each size on the host and a node."""
    store = MeasurementStore(at.project.measurements)
    for name in (HOST_NAME, "csd0"):
        step_time = STEPS.get(name, STEPS["csd"])
        known = {"settings": settings_of(name), "measured_at": 1000.0}
        probes = [ProbeMeasurement(size, step_time.at(size), **known) for size in SIZES]
        store.add(PROBE, class_of(name), probes, at.features, hash_recipe(at.job, PUBLIC))


def remember_sums(at: MeasuredProject) -> None:
    """Store sums over 2 and 3 ranks."""
    sums = [
        CollectiveMeasurement(ranks, size, SUMS.at(size, ranks), 1000.0)
        for ranks in (2, 3)
        for size in (1 << 16, 1 << 20, at.features.vector_bytes)
    ]
    store = MeasurementStore(at.project.measurements)
    store.add(SUM, fleet_class(), sums)


def remember_trial(at: MeasuredProject, sizes: Sequence[int] = (128, 16, 16)) -> None:
    """Store a trial with these batch sizes, OVERHEAD_FACTOR times as slow as each rank alone."""
    names = [HOST_NAME, *(f"csd{number}" for number in range(len(sizes) - 1))]
    ranks = tuple(
        TrialRank(class_of(name).key, size, settings_of(name))
        for name, size in zip(names, sizes, strict=True)
    )
    step_s = trial_step_s(sizes, at.features.vector_bytes)
    recipe = hash_recipe(at.job, PUBLIC)
    store = MeasurementStore(at.project.measurements)
    trial = measurements.TrialMeasurement(ranks, step_s, sum(sizes) / step_s, 1001.0)
    store.add(TRIAL, fleet_class(), [trial], at.features, recipe)


def remember_all(at: MeasuredProject) -> None:
    """Store the measurements of a tuning run: probes of host and nodes, sums, a trial."""
    remember_probes(at)
    remember_sums(at)
    remember_trial(at)


def prepared(at: MeasuredProject) -> Any:
    """In place of `prepare.Prepared`, for code that only passes files on."""
    file = SimpleNamespace(path="file", sha256=at.features.hash, size=1000)
    described = {"user_code": None, "step": None, "describe": lambda: at.features}
    model = SimpleNamespace(info=MODEL, architecture=file, weights=file, **described)
    return SimpleNamespace(
        worker=file, model=model, public=PUBLIC, validation=None, private={}, num_private={}, recipe=Recipe()
    )


def workspace(at: MeasuredProject, sessions: Mapping[str, FakeSession], memory_bytes: int = 32 << 30) -> Any:
    """In place of an open `Workspace`; `memory_bytes` are free on each machine."""
    facts = {name: replace(facts_of(name), memory_available_bytes=memory_bytes) for name in sessions}
    return SimpleNamespace(fleet=at.fleet, project=at.project, facts=facts, sessions=sessions)


def run_context(at: MeasuredProject, space: Any, data: Any = None) -> RunContext:
    """Return the context of a run on `space` that says nothing; `data`: in place of what is prepared."""
    return RunContext(at.job, data or prepared(at), space, EventStream())


def resolved(at: MeasuredProject, spec: RunSpec, space: Any) -> ResolvedRun:
    """Return a resolved run with the ranks of `spec`, whose nodes need no files of a model."""
    data = prepared(at)
    data.model.files = []
    context = run_context(at, space, data)
    return ResolvedRun(context, RunData(spec.ranks), RunModel(data.model, data.model), TaskSpec(), Recipe())


def trial_step_s(sizes: Sequence[int], vector_bytes: int) -> float:
    """A step of the host and nodes together."""
    host, *nodes = sizes
    slowest_s = max(STEPS[HOST_NAME].at(host), *(STEPS["csd"].at(size) for size in nodes))
    return slowest_s * OVERHEAD_FACTOR + SUMS.at(vector_bytes, len(sizes))
