"""What the history knows of a job's model on a fleet, without touching a machine.

As `tune` recalls it before it measures: by the model's architecture, the recipe, the form of the data, and
the classes of the machines. Where nothing of this model was measured, similar ones may tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from csdctl.errors import CsdctlError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import Fleet
from csdctl.fleet.preflight import is_ready
from csdctl.fleet.ranges import show_names
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.step_time import StepTime
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import open_measurements
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.workflows.data.prepare import describe_job_model
from csdctl.workflows.data.prepared_record import PreparedData
from csdctl.workflows.tune.class_models import ClassModel, FleetMeasurements, hash_recipe

TUNE = "run `csdctl tune`"
NOT_PREPARED = ""
"""The recipe of a job whose data was never prepared: nothing was measured with it."""


@dataclass(frozen=True)
class Unknown:
    """Why nothing can be told."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Recalled:
    """What is known of one model on one fleet."""

    host: RankModel
    nodes: tuple[RankModel, ...]
    """In the order of the fleet."""
    speeds: str
    """Where they come from, in words."""
    is_guessed: bool
    """Of some machines only similar models are known."""
    vector_bytes: int
    """What each rank gives to a sum."""
    sums: Sequence[CollectiveMeasurement]
    trial: tuple[Sequence[tuple[StepTime, int]], float] | None
    """The newest: step time and batch size of each rank, and the seconds of a step together."""


def recall(
    job: Job,
    project: ProjectDirectory,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    data: PreparedData | None,
    say: Say,
) -> Recalled | Unknown:
    """What the history of `project` holds; raises what building a model that is new raises."""
    machines = fleet.machines
    if strangers := [name for name in machines if name not in facts or not is_ready(facts[name])]:
        return Unknown(
            f"nobody has found out yet what {show_names(strangers)} can do", "run `csdctl discover`"
        )
    if not project.measurements.exists():
        return Unknown("nothing was measured here yet", TUNE)
    features = describe_job_model(job, project.root, say)
    recipe = hash_recipe(job, data.public) if data else NOT_PREPARED
    try:
        with open_measurements(project.measurements) as history:
            knowledge = FleetMeasurements(features, recipe, fleet, facts, history)
            return _read(knowledge, machines)
    except CsdctlError as error:
        return Unknown(error.message, error.remedy)


def _read(knowledge: FleetMeasurements, machines: Sequence[str]) -> Recalled | Unknown:
    steps: dict[str, StepTime] = {}
    unknown: list[str] = []
    for key, kind in knowledge.kinds.items():
        if step_time := _step_time(kind):
            steps[key] = step_time
        else:
            unknown.extend(kind.state.machines)
    name = knowledge.features.short_name
    if unknown:
        return Unknown(f"neither {name} nor a similar model was measured on {show_names(unknown)}", TUNE)
    step_of = {
        machine: steps[key] for key, kind in knowledge.kinds.items() for machine in kind.state.machines
    }
    host, *nodes = [RankModel(machine, step_of[machine]) for machine in machines]
    return Recalled(
        host,
        tuple(nodes),
        _say_origin(list(knowledge.kinds.values()), name),
        any(not kind.state.probes for kind in knowledge.kinds.values()),
        knowledge.features.vector_bytes,
        knowledge.collectives(),
        knowledge.newest_trial(steps),
    )


def _step_time(kind: ClassModel) -> StepTime | None:
    return kind.step_time() if kind.state.probes else kind.state.guess


def _say_origin(kinds: Sequence[ClassModel], model: str) -> str:
    measured = [kind for kind in kinds if kind.state.probes]
    guessed = [kind for kind in kinds if not kind.state.probes]
    parts = []
    if measured:
        num_probes = sum(len(kind.state.probes) for kind in measured)
        parts.append(f"measured: {num_probes} probes and trials of {model} on machines like these")
    guesses: dict[tuple[str, ...], list[str]] = {}
    for kind in guessed:
        guesses.setdefault(kind.guessed_from, []).extend(kind.state.machines)
    for models, machines in guesses.items():
        parts.append(
            f"guessed from {', '.join(models)} for {show_names(machines)}: this {model}, with this recipe "
            "and form of data, was never measured there"
        )
    return "; ".join(parts)
