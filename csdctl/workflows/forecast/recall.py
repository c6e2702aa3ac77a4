"""Stored measurements of a job's model on a fleet, read without connecting to a machine.

Measurements are found as `tune` finds them: by the model's architecture, the recipe, the shape of the data,
and the classes of the machines. Where this model was never measured, similar ones serve as a guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from csdctl.errors import CsdctlError
from csdctl.fleet.checks import is_ready
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.step_time import StepTime
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import open_measurements
from csdctl.tuning.class_model import ClassModel
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.recall import RecalledTrial
from csdctl.workflows.data.model import describe_job_model
from csdctl.workflows.data.prepared_record import PreparedData
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe

TUNE = "run `csdctl tune`"
NOT_PREPARED = ""
"""The recipe hash of a job whose data was never prepared: nothing was measured with it."""


@dataclass(frozen=True)
class Unknown:
    """Why the measurements cannot serve as a basis."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Recalled:
    """The measurements of one model on one fleet."""

    host: RankModel
    nodes: tuple[RankModel, ...]
    """In the order of the fleet."""
    speeds: str
    """Where the step times come from, as a sentence."""
    is_guessed: bool
    """For some machines, only similar models were measured."""
    vector_bytes: int
    """What each rank contributes to a sum."""
    sums: Sequence[CollectiveMeasurement]
    trial: RecalledTrial | None
    """The newest."""


def recall(
    job: Job,
    project: ProjectDirectory,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    data: PreparedData | None,
    say: Say,
) -> Recalled | Unknown:
    """Recall the measurements of `project`; raises what building a new model raises."""
    machines = fleet.machines
    if undiscovered := [name for name in machines if name not in facts or not is_ready(facts[name])]:
        return Unknown(f"the facts of {format_node_names(undiscovered)} are unknown", "run `csdctl discover`")
    if not project.measurements.exists():
        return Unknown("there are no measurements yet", TUNE)
    features = describe_job_model(job, project.root, say)
    recipe = hash_recipe(job, data.public) if data else NOT_PREPARED
    try:
        with open_measurements(project.measurements, say) as store:
            return _read(FleetMeasurements(features, recipe, fleet, facts, store), machines)
    except CsdctlError as error:
        return Unknown(error.message, error.remedy)


def _read(measurements: FleetMeasurements, machines: Sequence[str]) -> Recalled | Unknown:
    classes = measurements.recall_classes()
    model_name = measurements.features.short_name
    unknown = [
        name
        for class_model in classes.values()
        if not class_model.step_time_at_once()
        for name in class_model.machines
    ]
    if unknown:
        return Unknown(
            f"neither {model_name} nor a similar model was measured on {format_node_names(unknown)}", TUNE
        )
    step_times = {name: _step_time(class_model) for name, class_model in classes.items()}
    step_time_of = {
        machine: step_times[name] for name, class_model in classes.items() for machine in class_model.machines
    }
    host, *nodes = [RankModel(machine, step_time_of[machine]) for machine in machines]
    return Recalled(
        host,
        tuple(nodes),
        _describe_speeds(list(classes.values()), model_name),
        any(not class_model.points for class_model in classes.values()),
        measurements.features.vector_bytes,
        measurements.collectives(),
        measurements.recall_trial(step_times),
    )


def _step_time(known: ClassModel) -> StepTime:
    """Return the step time, or the unchanged guess: another model's memory does not bound it."""
    return known.guess if known.guess and not known.points else known.step_time()


def _describe_speeds(classes: Sequence[ClassModel], model: str) -> str:
    num_probes = sum(len(class_model.points) for class_model in classes)
    parts = []
    if num_probes:
        parts.append(f"measured: {num_probes} probes and trials of {model} on machines like these")
    guesses: dict[tuple[str, ...], list[str]] = {}
    for class_model in classes:
        if not class_model.points:
            guesses.setdefault(class_model.guessed_from, []).extend(class_model.machines)
    for models, machines in guesses.items():
        parts.append(
            f"guessed from {', '.join(models)} for {format_node_names(machines)}: this {model}, with this "
            "recipe and form of data, was never measured there"
        )
    return "; ".join(parts)
