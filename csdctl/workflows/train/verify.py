"""`verify`: one step of all ranks, compared with the same step in one process."""

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from csdctl.errors import InputError, RunError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.tools import find_mpirun
from csdctl.tuning.plan import Plan
from csdctl.tuning.strategies import FEATURES, SPLIT
from csdctl.worker.protocol.events import Event, Inverted, Verified
from csdctl.worker.protocol.features import FLOAT32, FeatureOptions, Recomputed
from csdctl.worker.protocol.run_spec import SplitSpec
from csdctl.worker.protocol.tasks import VERIFY, VERIFY_SPLIT, TaskSpec
from csdctl.workflows.data.deploy import cut_shards
from csdctl.workflows.data.features import divide_for, recompute_features
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.options import (
    AUTO,
    TrainOptions,
    check_cut,
    check_strategy,
    choose_planned_strategy,
)
from csdctl.workflows.train.placement import place_plan
from csdctl.workflows.train.plan_choice import build_equal_plan, check_one_source, load_checked_plan
from csdctl.workflows.train.preparation import PreparationObserver, prepare_in
from csdctl.workflows.train.ranks import RunInputs, run_ranks
from csdctl.workflows.train.spec import build_spec
from csdctl.workflows.train.split import use_split
from csdctl.workflows.workspace.workspace import Workspace, open_workspace

CHECKED_ROWS = 256
"""Of the stored features of each machine."""
FEATURE_TOLERANCE = 1e-5
"""Of the same sample in the same engine; of a whole batch again, there is none."""
DEFAULT_BATCH_SIZE = 16
"""The batch size of every rank without a plan."""


@dataclass(frozen=True)
class VerifyRequest:
    """The request of one `csdctl verify`."""

    job: Job
    fleet: Fleet
    directory: Path
    plan_path: Path | None = None
    """None: the job's own plan; without one, DEFAULT_BATCH_SIZE on every rank."""
    batch_size: int | None = None
    """Use this batch size on every rank instead of a plan."""
    strategy: str = AUTO
    cut: str = ""
    num_micro_batches: int = SplitSpec.num_micro_batches
    features: FeatureOptions = field(default_factory=FeatureOptions)
    """For `features`: those of the runs whose stored features are checked."""

    def __post_init__(self) -> None:
        """Raise InputError for a plan and a batch size at once."""
        check_one_source(self.plan_path, self.batch_size)


@dataclass(frozen=True)
class Verification:
    """The comparison, and the machine of every rank."""

    nodes: tuple[str, ...]
    result: Verified
    inversion: Inverted | None = None
    """What activations at the cut reveal, of a model that is split."""
    features: Mapping[str, Recomputed] = field(default_factory=dict)
    """By machine: its stored features, compared with what it computes now."""

    def check_features(self) -> None:
        """Raise RunError, naming the machine, if stored features are others than it computes now."""
        for node, found in self.features.items():
            if not found.difference <= FEATURE_TOLERANCE:
                raise RunError(
                    f"its stored features differ by {found.difference:.1e} from what it computes now",
                    node=node,
                    remedy="remove them: `csdctl clean --computed`; look for failing memory or disks there",
                )


def run_verification(request: VerifyRequest, observer: PreparationObserver) -> Verification:
    """Prepare what is missing and compare one step; raises InputError, RunError or DeadlineError."""
    find_mpirun()
    check_strategy(request.strategy)
    check_cut(request.strategy, request.cut)
    job = request.job
    with open_workspace(
        request.directory, request.fleet, "verify", is_locking=True, say=observer.say
    ) as space:
        plan = _choose_plan(request, space)
        _check_several(plan)
        prepared = prepare_in(space, job, observer)
        observer.say(f"starting {len(plan.ranks)} ranks")
        if job.noise:
            observer.say("compared without clipping and noise: the samples are random, and none is private")
        return verify(job, plan, prepared, space, request)


def _choose_plan(request: VerifyRequest, space: Workspace) -> Plan:
    path = request.plan_path or space.project.plan(request.job.name)
    if not request.batch_size and (request.plan_path or path.exists()):
        return load_checked_plan(path, request.job, space)
    return build_equal_plan(request.job, space.fleet, space.facts, request.batch_size or DEFAULT_BATCH_SIZE)


def _check_several(plan: Plan) -> None:
    """Raise InputError for one rank: it would be compared with itself."""
    if len(plan.ranks) < 2:
        names = ", ".join(rank.node for rank in plan.ranks)
        raise InputError(
            f"the plan has one rank ({names}), which would be compared with itself; expected two or more",
            remedy="give all machines a batch size (--batch-size 16), or another plan (--plan)",
        )


def verify(
    job: Job, plan: Plan, prepared: Prepared, space: Workspace, request: VerifyRequest
) -> Verification:
    """Run one step of all ranks; return how it compares with one process.

    Raises what `train` raises.
    """
    placed = place_plan(plan, prepared, job, space.fleet)
    run = space.project.new_scratch()
    shards = cut_shards(placed, prepared.public, job, space.project)
    spec = build_spec(run, job, plan, placed, prepared, shards, space)
    spec = dataclasses.replace(spec, validation=None, task=TaskSpec(VERIFY), num_checkpoints=0)
    strategy, cut = choose_planned_strategy(request.strategy, request.cut, plan)
    if strategy == SPLIT:
        spec = use_split(spec, job, prepared, cut, request.num_micro_batches)
        spec = dataclasses.replace(spec, task=TaskSpec(VERIFY_SPLIT))
    inputs = RunInputs(run, spec, prepared, shards)
    recomputed: dict[str, Recomputed] = {}
    if strategy == FEATURES:
        recomputed |= recompute_features(spec, prepared, shards, space, request.features, CHECKED_ROWS)
        inputs = _of_head(inputs, request.features, space)
    results: list[Verified] = []
    inversions: list[Inverted] = []

    def record(event: Event) -> None:
        if isinstance(event, Verified):
            results.append(event)
        elif isinstance(event, Inverted):
            inversions.append(event)

    run_ranks(inputs, space, TrainOptions(), lambda *_: None, record)
    shutil.rmtree(run.path, ignore_errors=True)
    if not results:
        raise RunError("the ranks ended without a comparison")
    nodes = tuple(rank.node for rank in plan.ranks)
    return Verification(nodes, results[0], next(iter(inversions), None), recomputed)


def _of_head(inputs: RunInputs, options: FeatureOptions, space: Workspace) -> RunInputs:
    """Return the run of the model's head, whose ranks compute the features of what they draw."""
    divided = divide_for(inputs.spec, inputs.prepared, replace(options, precision=FLOAT32), space)
    machines = space.fleet.machines
    shards = {name: (*inputs.shards.get(name, ()), *divided.files) for name in machines}
    return RunInputs(inputs.directory, divided.spec, divided.prepared, shards)
