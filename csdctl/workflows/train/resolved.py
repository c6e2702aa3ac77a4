"""A run that is decided: the samples of its ranks, and the model that they compute.

`read_plan` divides the samples among the ranks of a plan. A strategy adds the model
(`csdctl/workflows/train/strategies.py`). The RunSpec and the manifest follow from that
(`csdctl/workflows/train/run.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from csdctl.errors import InputError, option
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.placement.equation1 import Placed, PlacementError, place_shards
from csdctl.shipping.store import StoredFile
from csdctl.tuning.plan import DATA_PARALLEL, Plan, RankPlan
from csdctl.worker.protocol import run_spec
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec
from csdctl.workflows.data.compile import ModelCompiler
from csdctl.workflows.data.files import SerializedModel, cut_shards, whole
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import Workspace

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
        """The compiler of the model for the prepared data."""
        return ModelCompiler(
            self.job,
            self.prepared.model,
            self.prepared.public,
            worker=self.prepared.worker,
            space=self.space,
            say=self.events.say,
        )


@dataclass(frozen=True)
class RunData:
    """The samples of each rank, and the files that were cut for the nodes."""

    ranks: tuple[RankSpec, ...]
    placed: tuple[Placed, ...] = ()
    shards: ShardFiles = field(default_factory=dict)
    public: DatasetSlice | None = None
    validation: DatasetSlice | None = None


@dataclass(frozen=True)
class RunModel:
    """The model of the ranks: the whole model, only its head, or its two parts."""

    on_host: SerializedModel
    on_nodes: SerializedModel
    """The model whose files the nodes get."""
    head: run_spec.HeadSpec | None = None
    split: run_spec.SplitSpec | None = None
    prefix_files: tuple[StoredFile, ...] = ()
    """Files that a machine needs to compute features, if the model is a head."""

    @property
    def prefix(self) -> run_spec.Prefix:
        """The frozen part of the model, which computes features."""
        assert self.head is not None
        return self.head.prefix


@dataclass(frozen=True)
class ResolvedRun:
    """A run that is decided: what its ranks read and compute, by which task and with which recipe."""

    context: RunContext
    data: RunData
    model: RunModel
    task: run_spec.TaskSpec
    recipe: Recipe
    plan: Plan | None = None
    """The plan of a training. None for ranks that take random samples."""
    strategy: str = DATA_PARALLEL
    cut: str = ""
    is_balanced: bool = True
    """Whether the strategy allows that batch sizes change during the run."""
    features: dict[str, Any] = field(default_factory=dict)
    """The manifest's entry about features that were computed for it. Empty for other strategies."""

    def files_of(self, node: str) -> list[StoredFile]:
        """Return the files that a node needs, besides the RunSpec."""
        return [self.context.prepared.worker, *self.model.on_nodes.files, *self.data.shards.get(node, ())]


def place_plan(ranks: Sequence[RankPlan], prepared: Prepared, job: Job, fleet: Fleet) -> list[Placed]:
    """Divide the samples among the ranks (equation 1). Raises InputError if fleet or data do not allow it."""
    if missing := [rank.node for rank in ranks if rank.node not in fleet.machines]:
        problem = f"the plan needs {format_node_names(missing)}, not among the selected nodes of {fleet.path}"
        raise InputError(problem, remedy="run `csdctl tune` again for these nodes")
    batch_sizes, num_public = {rank.node: rank.batch_size for rank in ranks}, prepared.public.num_samples
    try:
        return place_shards(batch_sizes, prepared.num_private, num_public, is_repeating=job.is_repeating)
    except PlacementError as error:
        raise InputError(str(error), remedy="change the plan's batch sizes or the data") from None


def read_plan(
    ranks: Sequence[RankPlan],
    context: RunContext,
    placed: Sequence[Placed] | None = None,
    *,
    min_nodes: int | None = None,
) -> RunData:
    """Return the samples of the ranks, after cutting shards. `placed`: if they are divided already.

    Raises InputError. With `min_nodes`, also if no more nodes take part, and warns of large batches.
    """
    job, prepared, space = context.job, context.prepared, context.space
    if placed is None:
        placed = place_plan(ranks, prepared, job, space.whole)
        if min_nodes is not None:
            _check_shards(placed, context, min_nodes)
    shards = cut_shards(placed, prepared.public, job, space.project)
    return RunData(
        ranks=with_servers(build_rank_specs(ranks, placed, prepared, shards, job), space.fleet),
        placed=tuple(placed),
        shards=shards,
        public=whole(prepared.public),
        validation=whole(prepared.validation) if prepared.validation else None,
    )


def _check_shards(placed: Sequence[Placed], context: RunContext, min_nodes: int) -> None:
    """Warn of batches that are larger than an epoch. Raise InputError for too few nodes."""
    for shard in placed:
        if (size := shard.batch_size) > shard.num_samples:
            larger = f"its batch size {size:,}, to which the learning rate is scaled, is larger"
            context.events.say(f"{shard.name} has {shard.num_samples:,} samples: {larger}")
    if 1 < len(placed) <= min_nodes:
        problem = f"{option('min_nodes')} {min_nodes}, but {len(placed) - 1} nodes take part"
        raise InputError(problem, remedy="pass a smaller number")


def resolve_random_run(
    ranks: Sequence[RankPlan],
    context: RunContext,
    model: RunModel,
    task: str,
    element_spec: DatasetInfo,
    ranges: Mapping[str, Any] | None = None,
) -> ResolvedRun:
    """Return a run whose ranks take random samples of this form, in these ranges. It reads no data."""
    specs = [
        RankSpec(
            number,
            rank.node,
            rank.batch_size,
            rank.runtime,
            private=None,
            public=None,
            num_private=int(rank.node in context.prepared.private),
            num_public=0,
            max_batch_size=rank.max_batch_size,
            micro_batch_size=rank.micro_batch_size,
        )
        for number, rank in enumerate(ranks)
    ]
    return ResolvedRun(
        context,
        RunData(with_servers(specs, context.space.fleet)),
        model,
        run_spec.TaskSpec(task, {run_spec.ELEMENT_SPEC: asdict(element_spec), run_spec.RANGES: ranges or {}}),
        context.prepared.recipe,
    )


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
            private=whole(prepared.private[rank.node]) if rank.node in prepared.private else None,
            public=_public_slice(shard, prepared, shards, job),
            num_private=shard.num_private,
            num_public=shard.num_public,
            public_start=shard.public_start,
            num_repeated=shard.num_repeated,
            weight=shard.weight if job.data.weights == "data-set" else 1.0,
            max_batch_size=rank.max_batch_size,
            micro_batch_size=rank.micro_batch_size,
        )
        for number, (rank, shard) in enumerate(zip(ranks, placed, strict=True))
    )


def with_servers(ranks: Sequence[RankSpec], fleet: Fleet) -> tuple[RankSpec, ...]:
    """Return `ranks` with the ranks of their servers, absent ones with 0.

    Raises InputError for a server without a rank.
    """
    numbers, present = {rank.node: rank.rank for rank in ranks}, set(fleet.machines)
    servers = {rank.node: fleet.server_of(rank.node) if rank.node in present else HOST_NAME for rank in ranks}
    if missing := sorted(set(servers.values()) - numbers.keys()):
        problem = f"the plan has no rank on {format_node_names(missing)}, through which its nodes are reached"
        raise InputError(problem, remedy="run `csdctl tune` again for these nodes")
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


def fingerprint_data(prepared: Prepared) -> dict[str, Any]:
    """Return the fingerprints of the data, by which `resume` detects a change."""
    return {
        "public": prepared.public.fingerprint,
        "private": {name: info.fingerprint for name, info in prepared.private.items()}
        | {name: recorded.fingerprint for name, recorded in prepared.absent.items()},
    }
