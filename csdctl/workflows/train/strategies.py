"""What a strategy decides about a run: data-parallel, which changes nothing, split and features.

With `features`, each machine computes the frozen part of the model once for its own samples. Features stay on
the machine that made them, in a cache by content. What is then trained is the model's head, with the same
step, on fewer numbers. Where all samples are public, their features may leave the nodes, and the host trains
the head alone: it then needs no sum.
"""

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from csdctl.errors import InputError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.reporting.numbers import format_bytes, format_seconds
from csdctl.shipping.store import StoredFile
from csdctl.shipping.worker_calls import fetch_results
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, Plan
from csdctl.worker.protocol.datasets import DatasetInfo, equals
from csdctl.worker.protocol.features import (
    FEATURE_STORE,
    FLOAT16,
    FLOAT32,
    Augmented,
    Extracted,
    ExtractSpec,
    Gathered,
    GatheredPart,
    GatherSpec,
    Recomputed,
    SendSpec,
)
from csdctl.worker.protocol.model_info import CutInfo, FeatureInfo, ModelInfo
from csdctl.worker.protocol.run_spec import (
    TRAIN_SPLIT,
    VERIFY,
    VERIFY_SPLIT,
    DatasetSlice,
    HeadSpec,
    Prefix,
    RankSpec,
    RunSpec,
    SplitSpec,
    TaskSpec,
)
from csdctl.workflows.data.compile import as_prefix, files_of
from csdctl.workflows.data.files import deploy_files, whole
from csdctl.workflows.data.prepare import Prepared, check_info
from csdctl.workflows.train.spec import RunContext, RunInputs, ShardFiles, plan_reading
from csdctl.workflows.workspace.event_stream import OnProgress
from csdctl.workflows.workspace.workspace import Workspace, call_machine

_OTHERWISE = "train with --strategy data-parallel"
COMPUTING = "computing features"
MAX_HEADER_BYTES = 1 << 16


class Strategy:
    """Data-parallel: every rank holds the whole model. Other strategies override what they do differently.

    An instance belongs to one run. Its methods are called in the order in which they stand here.
    """

    name: ClassVar[str] = DATA_PARALLEL
    cut = ""
    """The last layer that nodes compute, if the model is split."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the ranks that train. Raises InputError or PartialError."""
        return plan

    def build_inputs(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run with what its ranks compute and read. Raises InputError or PartialError."""
        return inputs

    def build_verification(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run that compares one step with one process. Raises InputError or PartialError."""
        return inputs

    def recompute_stored(self, inputs: RunInputs, context: RunContext) -> Mapping[str, Recomputed]:
        """Return, by machine, how results that are stored there compare with what it computes now."""
        return {}


@dataclass
class Split(Strategy):
    """Nodes compute the first layers of the model, up to `cut`, the host the rest.

    Each rank's batch is divided into micro-batches: nodes compute some while the host computes others.
    """

    name: ClassVar[str] = SPLIT
    cut: str = ""
    num_micro_batches: int = SplitSpec.num_micro_batches

    def build_inputs(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run, or its verification, with its model divided.

        Raises InputError where the job does not allow that, or the model has no such cut.
        """
        check_split(context)
        cut = find_cut(context.prepared.model.info, self.cut)
        task = TaskSpec(VERIFY_SPLIT if inputs.spec.task.name == VERIFY else TRAIN_SPLIT)
        inputs = replace(inputs, spec=replace(inputs.spec, task=task, is_balanced=False))
        return cut_model(inputs, context, cut.layer, self.num_micro_batches)

    build_verification = build_inputs


def cut_model(
    inputs: RunInputs, context: RunContext, layer: str, num_micro_batches: int = SplitSpec.num_micro_batches
) -> RunInputs:
    """Return a run whose model is cut behind `layer`. Raises InputError if it cannot be."""
    on_host, on_nodes = context.compiler.split(layer)
    split = SplitSpec(layer, num_micro_batches, on_nodes.step)
    spec = replace(inputs.spec, split=split, compiled=on_host.step)
    return replace(inputs, spec=spec, prepared=replace(context.prepared, model=on_nodes))


def check_split(context: RunContext) -> None:
    """Raise InputError unless job and fleet allow that a model is split."""
    if context.space.fleet.networks:
        raise InputError("a model is split on one server; this fleet has several", remedy=_OTHERWISE)
    check_job(context.job)


def check_job(job: Job) -> None:
    """Raise InputError unless the job lets activations of private samples leave their node."""
    if job.noise:
        raise InputError(
            f"{job.path}: data.private.noise hides each sample in a sum, and activations leave their node "
            "one by one",
            remedy=_OTHERWISE,
        )
    if job.data.private and job.data.private.activations != "may-leave":
        raise InputError(
            f"{job.path}: splitting the model sends activations and labels of private samples to the host, "
            "which the job does not allow",
            remedy=f"add `activations: may-leave` to data.private (docs/how-to/split.md), or {_OTHERWISE}",
        )


def find_cut(info: ModelInfo, layer: str) -> CutInfo:
    """Return the cut behind `layer`. Raises InputError, naming those that there are."""
    if not info.cuts:
        raise InputError(
            f"{info.name} cannot be split: it is not a functional model with a single tensor "
            "between two layers",
            remedy=_OTHERWISE,
        )
    for cut in info.cuts:
        if cut.layer == layer and cut.num_bytes:
            return cut
        if cut.layer == layer:
            raise InputError(
                f"{info.name} cannot be cut after {layer!r}, whose activations have no fixed size",
                remedy="give its input a fixed shape, or name another cut",
            )
    names = ", ".join(cut.layer for cut in info.cuts)
    what = f"cannot be cut after {layer!r}" if layer else "needs a cut"
    raise InputError(f"{info.name} {what}; its cuts: {names}", remedy="name one of them: --cut LAYER")


class Features(Strategy):
    """Each machine computes the features of its samples once. What is trained is the model's head."""

    name = FEATURES

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._gathered: FeatureRun | None = None
        """The features that all machines have computed for the host, which trains alone."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the host alone, if it says so and the job allows it. Raises PartialError."""
        if plan.trains_on_host:
            plan, self._gathered = leave_to_host(plan, context, self._precision)
        return plan

    def build_inputs(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run of the model's head, after the features of all samples have been computed.

        Raises InputError if the model has no frozen part, and PartialError naming the machines that failed.
        """
        run = compute_features(inputs, context, self._precision)
        if self._gathered is None:
            context.events.say(run.describe())
        made = self._gathered or run
        names = ("layer", "precision", "num_computed", "elapsed_s")
        content = {name: getattr(made, name) for name in names}
        inputs.directory.save_manifest(inputs.directory.load_manifest() | {"features": content})
        return RunInputs(inputs.directory, run.spec, run.prepared, {})

    def build_verification(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run of the model's head, whose ranks compute the features of what they draw."""
        run = divide(inputs.spec, context, FLOAT32, is_wide=True)
        shards = {name: (*inputs.shards.get(name, ()), *run.files) for name in context.space.fleet.machines}
        return RunInputs(inputs.directory, run.spec, run.prepared, shards)

    def recompute_stored(self, inputs: RunInputs, context: RunContext) -> dict[str, Recomputed]:
        """Compute some of the stored features of each machine there again, and compare them.

        Raises InputError if the model has no frozen part, and PartialError naming the machines that failed.
        """
        run = divide(inputs.spec, context, self._precision)
        machines = _prepare_machines(run, inputs.shards, context, lambda *_: None)
        found = run_on_all(machines, lambda machine: machine.recompute(num_rows=256))
        return values_or_raise(found, "computing stored features again")


@dataclass(frozen=True)
class FeatureRun:
    """A run that trains the head of a model on features. Until they are computed, it has the samples."""

    spec: RunSpec
    prepared: Prepared
    """With the head in place of the whole model."""
    files: tuple[StoredFile, ...]
    """Files that a machine needs to compute features."""
    num_samples: int = 0
    num_computed: int = 0
    """Samples whose features were not in a cache."""
    elapsed_s: float = 0.0

    @property
    def prefix(self) -> Prefix:
        """The frozen part of the model."""
        assert self.spec.head is not None
        return self.spec.head.prefix

    @property
    def layer(self) -> str:
        """The last layer of the frozen part."""
        return find_features(self.prepared).layer

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample's features."""
        return find_features(self.prepared).shape

    @property
    def precision(self) -> str:
        """The type of the features."""
        return self.prefix.precision

    def describe(self) -> str:
        """Return what was computed, as a sentence."""
        found = self.num_samples - self.num_computed
        return (
            f"features: the output of {self.layer} for {self.num_samples:,} samples; {self.num_computed:,} "
            f"computed in {self.elapsed_s:.1f} s, {found:,} found"
        )


def count_feature_bytes(shape: Sequence[int], precision: str) -> int:
    """Return the bytes of one sample's features of `shape`."""
    return math.prod(shape) * (2 if precision == FLOAT16 else 4)


def find_features(prepared: Prepared) -> FeatureInfo:
    """Return what is known of the model's frozen part. Raises InputError if it has none."""
    info = prepared.model.info
    recipe = prepared.recipe
    if recipe.augment and not recipe.views:
        raise InputError(
            f"{info.name} cannot be trained by features: data.augment changes its samples in every step",
            remedy="set recipe.views to the number of augmented copies of each sample, "
            "or train with --strategy data-parallel",
        )
    if recipe.views and not recipe.augment:
        raise InputError(
            f"recipe.views is {recipe.views}, and there is no data.augment to make views with",
            remedy="name a function as data.augment, or remove recipe.views",
        )
    if info.features is None:
        raise InputError(
            f"{info.name} cannot be trained by features: it {info.no_features}",
            remedy="freeze its first layers (base.trainable = False), and put augmentation after them "
            "or train with --strategy data-parallel",
        )
    return info.features


def compute_features(inputs: RunInputs, context: RunContext, precision: str) -> FeatureRun:
    """Compute the features of all samples of a run where they are. Return the run of the model's head.

    Raises InputError if the model has no frozen part, and PartialError naming the machines that failed.
    """
    began, nodes = time.monotonic(), [rank.node for rank in inputs.spec.ranks]
    find_features(context.prepared)
    with context.events.working(COMPUTING, nodes) as on_progress:
        run = divide(inputs.spec, context, precision)
        machines = _prepare_machines(run, inputs.shards, context, on_progress)
        found = values_or_raise(run_on_all(machines, _Machine.extract), COMPUTING)
    ranks = tuple(found[rank.node][0] if rank.node in found else rank for rank in run.spec.ranks)
    return replace(
        run,
        spec=replace(run.spec, ranks=ranks, validation=found[HOST_NAME][1]),
        num_samples=sum(machine.num_samples for machine in machines.values()),
        num_computed=sum(machine.num_computed for machine in machines.values()),
        elapsed_s=time.monotonic() - began,
    )


def divide(spec: RunSpec, context: RunContext, precision: str, *, is_wide: bool = False) -> FeatureRun:
    """Return the run of the model's head. `is_wide`: it computes in 32 bits at least.

    Raises InputError if the model has no frozen part.
    """
    prepared = context.prepared
    features, model, has_views = find_features(prepared), prepared.model, bool(prepared.recipe.views)
    frozen, head = context.compiler.parts(precision, is_wide=is_wide)
    prefix = as_prefix(frozen, precision, has_views=has_views)
    paths = model.architecture.path, model.weights.path
    head_spec = HeadSpec(prefix, *paths, features.head_weights, model.step)
    return FeatureRun(
        replace(
            spec,
            architecture=head.architecture.path,
            weights=head.weights.path,
            compiled=head.step,
            head=head_spec,
        ),
        replace(prepared, model=replace(head, info=model.info)),
        (prepared.worker, *files_of(frozen, has_views=has_views)),
    )


def _prepare_machines(
    run: FeatureRun, shards: ShardFiles, context: RunContext, on_progress: OnProgress
) -> dict[str, "_Machine"]:
    """Send each machine of `run` what it needs to compute features."""
    space = context.space
    machines = {
        rank.node: _Machine(run, rank, space, on_progress)
        for rank in run.spec.ranks
        if rank.node in space.fleet.machines
    }
    missing = {name: [*run.files, *shards.get(name, ())] for name in machines}
    deploy_files(missing, space.fleet, space.sessions, context.events)
    return machines


@dataclass
class _Machine:
    """The features of one machine."""

    run: FeatureRun
    rank: RankSpec
    space: Workspace
    on_progress: OnProgress
    num_samples: int = 0
    num_computed: int = 0

    def extract(self) -> tuple[RankSpec, DatasetSlice | None]:
        """Return the rank with the features of its samples, and those of validation samples."""
        wanted = self._wanted()
        sources = [(source, count, views) for source, count, views in wanted if source is not None]
        found = self._call([source for source, _, _ in sources], 0) if sources else Extracted((), 0)
        check_parts(found, len(sources), self.rank.node, COMPUTING)
        num_rows = [count * views for _, count, views in sources]
        for info, count in zip(found.parts, num_rows, strict=True):
            self._check(info, count)
        self.num_samples = sum(num_rows)
        self.num_computed = min(found.num_computed, self.num_samples)
        features = iter(found.parts)
        private, public, validation = (
            None if source is None else replace(whole(next(features)), num_views=views)
            for source, _, views in wanted
        )
        return replace(self.rank, private=private, public=public), validation

    def recompute(self, num_rows: int) -> Recomputed:
        """Return how stored rows compare with what the machine computes now."""
        sources = [source for source, _, _ in self._wanted() if source is not None]
        if not sources:
            return Recomputed(0, 0.0)
        found = self._call(sources, num_rows)
        if found.checked is None:
            raise RemoteCommandError(f"{COMPUTING}: received no comparison", node=self.rank.node)
        return found.checked

    @property
    def _validation(self) -> DatasetSlice | None:
        """Validation samples of the run, whose features the host computes."""
        return self.run.spec.validation if self.rank.node == HOST_NAME else None

    def _wanted(self) -> list[tuple[DatasetSlice | None, int, int]]:
        """Return private, public and validation samples, with their number and the views of each."""
        rank, prepared = self.rank, self.run.prepared
        num_validation = prepared.validation.num_samples if prepared.validation else 0
        num_views = max(1, prepared.recipe.views)
        return [
            (rank.private, rank.num_private - rank.num_repeated, num_views),
            (rank.public, rank.num_public, num_views),
            (self._validation, num_validation, 1),
        ]

    def _call(self, sources: Sequence[DatasetSlice], num_checked: int) -> Extracted:
        """Have the machine compute features of `sources`, or check those that are stored."""
        prepared, node = self.run.prepared, self.rank.node
        recipe = prepared.recipe
        spec = ExtractSpec(
            sources[0],
            FEATURE_STORE,
            self.run.prefix,
            self.rank.runtime,
            others=tuple(sources[1:]),
            augmented=Augmented(recipe.augment, recipe.seed, recipe.views) if recipe.views else None,
            num_checked=num_checked,
            num_plain=int(self._validation is not None),
        )
        worker, note = prepared.worker, partial(self.on_progress, node)
        return call_machine(self.space, node, worker, "extract", spec, Extracted, note, doing=COMPUTING)

    def _check(self, info: DatasetInfo, num_samples: int) -> None:
        """Raise RemoteCommandError unless these can be the features of that many samples."""
        check_info(info, self.rank.node, COMPUTING, may_be_empty=True)
        run, shape = self.run, info.sample_shape
        is_shape = all(shape) and equals(run.shape, shape)  # 0 is any size in the model's alone
        if (info.num_samples, info.dtype) != (num_samples, run.precision) or not is_shape:
            raise RemoteCommandError(
                f"{COMPUTING}: received {info.num_samples} features of shape {shape} and type "
                f"{info.dtype}, expected {num_samples} of {run.shape} and {run.precision}",
                node=self.rank.node,
            )


def check_parts(found: Extracted, expected: int, node: str, doing: str) -> None:
    """Raise RemoteCommandError unless a machine has answered for as many sources as it was given."""
    if len(found.parts) != expected:
        problem = f"{doing}: received {len(found.parts)} data sets, expected {expected}"
        raise RemoteCommandError(problem, node=node)


FETCHING, GATHERING = "fetching features", "gathering features"


def why_not_alone(job: Job, prepared: Prepared) -> str:
    """Return why the host cannot train alone on the features of all samples. '' if it can."""
    if prepared.private:
        return f"private samples of {', '.join(prepared.private)}, whose features stay there"
    if prepared.recipe.views:
        return "recipe.views, by which a sample has several features"
    if job.noise:
        return "data.private.noise, which nodes add"
    return ""


def bytes_for_host(job: Job, prepared: Prepared) -> int | None:
    """Return the bytes of one sample's features, if the host can train alone on those of all samples."""
    return (
        None if why_not_alone(job, prepared) else count_feature_bytes(find_features(prepared).shape, FLOAT32)
    )


def leave_to_host(plan: Plan, context: RunContext, precision: str) -> tuple[Plan, FeatureRun | None]:
    """Return the plan with which the host trains alone, and the features that were computed for it.

    These are None if the host has all of them. Where it cannot train alone, the plan is `plan` itself. Raises
    PartialError naming the machines that failed.
    """
    events = context.events
    if len(plan.ranks) == 1:
        return plan, None
    if why_not := why_not_alone(context.job, context.prepared):
        events.say(f"all ranks train on their own features, not the host alone: there is {why_not}")
        return plan, None
    alone = plan.for_host_alone()
    wanted = divide(plan_reading(alone, context).spec, context, precision)
    num_samples = context.prepared.public.num_samples
    if _gather(wanted, (), context):
        events.say(f"features of all {num_samples:,} public samples are on the host, which trains alone")
        return alone, None
    run = compute_features(plan_reading(plan, context), context, precision)
    events.say(run.describe())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(".gather", dir=context.space.project.state) as directory:
        parts, num_bytes = _fetch_features(run, context.space, Path(directory))
        _gather(wanted, parts, context)
    events.say(
        f"the host trains alone: {format_bytes(num_bytes)} of features of public samples fetched from "
        f"{len(run.spec.ranks) - 1} nodes in {format_seconds(time.monotonic() - began)}"
    )
    return alone, run


def _fetch_features(
    run: FeatureRun, space: Workspace, directory: Path
) -> tuple[tuple[GatheredPart, ...], int]:
    """Fetch the features of all nodes into `directory`. Return all parts, and the bytes fetched."""
    row_bytes = count_feature_bytes(run.shape, run.precision)

    def fetch(rank: RankSpec) -> GatheredPart:
        assert rank.public is not None
        start, path = rank.public_start, Path(rank.public.images)
        if rank.node != HOST_NAME:
            limit = rank.num_public * row_bytes + MAX_HEADER_BYTES
            wanted = SendSpec(path.parent.name, rank.public.images_sha256, limit, FEATURE_STORE)
            path = directory / f"{rank.rank}.npy"
            session, python = space.sessions[rank.node], space.fleet.python_of(rank.node)
            worker, kind = run.prepared.worker.path, TrafficClass.FEATURES
            with path.open("wb") as file:
                fetch_results(session, python, worker, wanted, file, kind, doing=FETCHING)
        return GatheredPart(rank.node, str(path), rank.public.images_sha256, start, start + rank.num_public)

    ranks = [rank for rank in run.spec.ranks if rank.public is not None]
    nodes = {rank.node: rank for rank in ranks if rank.node != HOST_NAME}
    fetched = values_or_raise(run_on_all(nodes, fetch), FETCHING)
    parts = tuple(fetched[rank.node] if rank.node in fetched else fetch(rank) for rank in ranks)
    return parts, sum(rank.num_public for rank in nodes.values()) * row_bytes


def _gather(run: FeatureRun, parts: tuple[GatheredPart, ...], context: RunContext) -> bool:
    """Put `parts` together on the host. Without any, return whether it has the features already."""
    (host,) = run.spec.ranks
    assert host.public is not None
    wanted = ExtractSpec(host.public, FEATURE_STORE, run.prefix, host.runtime)
    with context.events.working(GATHERING, [HOST_NAME]) as on_progress:
        spec, worker, space = GatherSpec(wanted, run.shape, parts), run.prepared.worker, context.space
        note = partial(on_progress, HOST_NAME)
        found = call_machine(space, HOST_NAME, worker, "gather", spec, Gathered, note, doing=GATHERING)
    return found.is_stored
