"""The strategy `features`: machines compute the frozen part of the model once, and the ranks train its head.

Features stay on the machine that made them, in a cache by content. The head is trained with the same step, on
fewer numbers. Where all samples are public, their features may leave the nodes, and the host trains the head
alone: it then needs no sum.
"""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from csdctl.errors import InputError, RemoteCommandError, option
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.reporting.numbers import format_bytes, format_seconds
from csdctl.shipping.worker_calls import fetch_results
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress, equals
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
from csdctl.worker.protocol.model_info import FeatureInfo
from csdctl.worker.protocol.run_spec import DatasetSlice, HeadSpec, Prefix, RankSpec
from csdctl.workflows.data.compile import as_prefix, files_of
from csdctl.workflows.data.files import deploy_files, whole
from csdctl.workflows.data.prepare import Prepared, check_info
from csdctl.workflows.train.spec import RunContext, RunData, RunModel, read_plan
from csdctl.workflows.workspace.event_stream import EventStream, OnProgress
from csdctl.workflows.workspace.workspace import call_machine

COMPUTING, FETCHING, GATHERING = "computing features", "fetching features", "gathering features"
MAX_HEADER_BYTES = 1 << 16
"""The longest header of a .npy file with features."""
NUM_CHECKED_ROWS = 256
"""Stored features of a machine that `verify` computes again."""


@dataclass(frozen=True)
class FeatureRun:
    """The features that the machines have computed for one run."""

    layer: str
    """The last layer of the frozen part."""
    precision: str
    num_samples: int
    num_computed: int
    """Samples whose features were not in a cache."""
    elapsed_s: float

    def describe(self) -> str:
        """Return what was computed, as a sentence."""
        num_stored = self.num_samples - self.num_computed
        return (
            f"features: the output of {self.layer} for {self.num_samples:,} samples; {self.num_computed:,} "
            f"computed in {self.elapsed_s:.1f} s, {num_stored:,} found"
        )

    def describe_for_manifest(self) -> dict[str, Any]:
        """Return what the manifest of the run says."""
        names = ("layer", "precision", "num_computed", "elapsed_s")
        return {name: getattr(self, name) for name in names}


def count_feature_bytes(shape: Sequence[int], precision: str) -> int:
    """Return the bytes of one sample's features of `shape`."""
    return math.prod(shape) * (2 if precision == FLOAT16 else 4)


def find_features(prepared: Prepared) -> FeatureInfo:
    """Return the description of the model's frozen part. Raises InputError if it has none."""
    info, recipe = prepared.model.info, prepared.recipe
    if recipe.augment and not recipe.views:
        raise InputError(
            f"{info.name} cannot be trained by features: data.augment changes its samples in every step",
            remedy="set recipe.views to the number of augmented copies of each sample, "
            f"or train with {option('strategy')} data-parallel",
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
            f"or train with {option('strategy')} data-parallel",
        )
    return info.features


def divide_model(context: RunContext, precision: str, *, is_wide: bool = False) -> RunModel:
    """Return the model's head, whose samples are features of the type `precision`.

    `is_wide`: it computes in 32 bits at least. Raises InputError if the model has no frozen part.
    """
    prepared, model, has_views = context.prepared, context.prepared.model, bool(context.prepared.recipe.views)
    features = find_features(prepared)
    frozen, head = context.compiler.parts(precision, is_wide=is_wide)
    prefix = as_prefix(frozen, precision, has_views=has_views)
    head_spec = HeadSpec(
        prefix,
        architecture=model.architecture.path,
        weights=model.weights.path,
        head_weights=features.head_weights,
        compiled=model.step,
    )
    files = (prepared.worker, *files_of(frozen, has_views=has_views))
    return RunModel(head, replace(head, info=model.info), head=head_spec, prefix_files=files)


def compute_features(data: RunData, model: RunModel, context: RunContext) -> tuple[RunData, FeatureRun]:
    """Compute the features of all samples of a run where they are. Return them as what its ranks read.

    Raises PartialError naming the machines that failed.
    """
    began = time.monotonic()
    with context.events.working(COMPUTING, [rank.node for rank in data.ranks]) as on_progress:
        machines = _prepare_machines(data, model, context, context.events, on_progress)
        extracted = values_or_raise(run_on_all(machines, _Machine.extract), COMPUTING)
    ranks = tuple(extracted[rank.node][0] if rank.node in extracted else rank for rank in data.ranks)
    computed = FeatureRun(
        layer=find_features(context.prepared).layer,
        precision=model.prefix.precision,
        num_samples=sum(machine.num_samples for machine in machines.values()),
        num_computed=sum(machine.num_computed for machine in machines.values()),
        elapsed_s=time.monotonic() - began,
    )
    return replace(data, ranks=ranks, validation=extracted[HOST_NAME][1]), computed


def recompute_features(data: RunData, model: RunModel, context: RunContext) -> dict[str, Recomputed]:
    """Compare stored features of each machine with what it computes now. Raises PartialError."""
    machines = _prepare_machines(data, model, context, EventStream(), lambda *_: None)
    return values_or_raise(run_on_all(machines, _Machine.recompute), "computing stored features again")


def _prepare_machines(
    data: RunData, model: RunModel, context: RunContext, events: EventStream, on_progress: OnProgress
) -> dict[str, "_Machine"]:
    """Send each machine of a run what it needs to compute features."""
    space = context.space
    machines = {
        rank.node: _Machine(
            rank,
            model.prefix,
            validation=data.validation if rank.node == HOST_NAME else None,
            context=context,
            note=partial(on_progress, rank.node),
        )
        for rank in data.ranks
        if rank.node in space.fleet.machines
    }
    files = {name: [*model.prefix_files, *data.shards.get(name, ())] for name in machines}
    deploy_files(files, space.fleet, space.sessions, events)
    return machines


@dataclass
class _Machine:
    """The features of one machine."""

    rank: RankSpec
    prefix: Prefix
    validation: DatasetSlice | None
    """Validation samples of the run, whose features the host computes."""
    context: RunContext
    note: Callable[[PrepareProgress], None]
    num_samples: int = 0
    num_computed: int = 0

    def extract(self) -> tuple[RankSpec, DatasetSlice | None]:
        """Return the rank with the features of its samples, and the features of validation samples."""
        samples = self._samples()
        sources = [(source, count, views) for source, count, views in samples if source is not None]
        extracted = self._call([source for source, _, _ in sources], 0) if sources else Extracted((), 0)
        check_parts(extracted, len(sources), self.rank.node, COMPUTING)
        num_rows = [count * views for _, count, views in sources]
        for info, count in zip(extracted.parts, num_rows, strict=True):
            self._check(info, count)
        self.num_samples = sum(num_rows)
        self.num_computed = min(extracted.num_computed, self.num_samples)
        features = iter(extracted.parts)
        private, public, validation = (
            None if source is None else replace(whole(next(features)), num_views=views)
            for source, _, views in samples
        )
        return replace(self.rank, private=private, public=public), validation

    def recompute(self) -> Recomputed:
        """Return how stored rows compare with what the machine computes now."""
        sources = [source for source, _, _ in self._samples() if source is not None]
        if not sources:
            return Recomputed(0, 0.0)
        checked = self._call(sources, NUM_CHECKED_ROWS).checked
        if checked is None:
            raise RemoteCommandError(f"{COMPUTING}: received no comparison", node=self.rank.node)
        return checked

    def _samples(self) -> list[tuple[DatasetSlice | None, int, int]]:
        """Return private, public and validation samples, with their number and the views of each."""
        rank, prepared = self.rank, self.context.prepared
        num_validation = prepared.validation.num_samples if prepared.validation else 0
        num_views = max(1, prepared.recipe.views)
        return [
            (rank.private, rank.num_private - rank.num_repeated, num_views),
            (rank.public, rank.num_public, num_views),
            (self.validation, num_validation, 1),
        ]

    def _call(self, sources: Sequence[DatasetSlice], num_checked: int) -> Extracted:
        """Have the machine compute features of `sources`, or check stored ones."""
        prepared, recipe = self.context.prepared, self.context.prepared.recipe
        spec = ExtractSpec(
            sources[0],
            FEATURE_STORE,
            self.prefix,
            self.rank.runtime,
            more_sources=tuple(sources[1:]),
            augmented=Augmented(recipe.augment, recipe.seed, recipe.views) if recipe.views else None,
            num_checked=num_checked,
            num_plain=int(self.validation is not None),
        )
        machine, worker = (self.context.space, self.rank.node), prepared.worker
        return call_machine(*machine, worker, "extract", spec, Extracted, self.note, doing=COMPUTING)

    def _check(self, info: DatasetInfo, num_samples: int) -> None:
        """Raise RemoteCommandError unless these can be the features of that many samples."""
        check_info(info, self.rank.node, COMPUTING, may_be_empty=True)
        expected, precision = find_features(self.context.prepared).shape, self.prefix.precision
        shape = info.sample_shape
        is_shape = all(shape) and equals(expected, shape)  # 0 is any size in the model's alone
        if (info.num_samples, info.dtype) != (num_samples, precision) or not is_shape:
            raise RemoteCommandError(
                f"{COMPUTING}: received {info.num_samples} features of shape {shape} and type "
                f"{info.dtype}, expected {num_samples} of {expected} and {precision}",
                node=self.rank.node,
            )


def check_parts(extracted: Extracted, expected: int, node: str, doing: str) -> None:
    """Raise RemoteCommandError unless a machine has answered for as many sources as it was given."""
    if len(extracted.parts) != expected:
        problem = f"{doing}: received {len(extracted.parts)} data sets, expected {expected}"
        raise RemoteCommandError(problem, node=node)


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
    """Return the bytes of one sample's features. None: the host cannot train alone on all of them."""
    if why_not_alone(job, prepared):
        return None
    return count_feature_bytes(find_features(prepared).shape, FLOAT32)


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
    alone, model = plan.for_host_alone(), divide_model(context, precision)
    (host,) = read_plan(alone.ranks, context).ranks
    num_samples = context.prepared.public.num_samples
    if _gather(host, (), model, context):
        events.say(f"features of all {num_samples:,} public samples are on the host, which trains alone")
        return alone, None
    data, computed = compute_features(read_plan(plan.ranks, context), model, context)
    events.say(computed.describe())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(".gather", dir=context.space.project.state) as directory:
        parts, num_bytes = _fetch_features(data, model, context, Path(directory))
        _gather(host, parts, model, context)
    events.say(
        f"the host trains alone: {format_bytes(num_bytes)} of features of public samples fetched from "
        f"{len(data.ranks) - 1} nodes in {format_seconds(time.monotonic() - began)}"
    )
    return alone, computed


def _fetch_features(
    data: RunData, model: RunModel, context: RunContext, directory: Path
) -> tuple[tuple[GatheredPart, ...], int]:
    """Fetch the features of all nodes into `directory`. Return all parts, and the bytes fetched."""
    space, worker = context.space, context.prepared.worker.path
    row_bytes = count_feature_bytes(find_features(context.prepared).shape, model.prefix.precision)

    def fetch(rank: RankSpec) -> GatheredPart:
        assert rank.public is not None
        start, path = rank.public_start, Path(rank.public.images)
        if rank.node != HOST_NAME:
            limit = rank.num_public * row_bytes + MAX_HEADER_BYTES
            spec = SendSpec(path.parent.name, rank.public.images_sha256, limit, FEATURE_STORE)
            path = directory / f"{rank.rank}.npy"
            session, python = space.sessions[rank.node], space.fleet.python_of(rank.node)
            with path.open("wb") as file:
                fetch_results(
                    session, python, worker, spec, file, traffic_class=TrafficClass.FEATURES, doing=FETCHING
                )
        return GatheredPart(rank.node, str(path), rank.public.images_sha256, start, start + rank.num_public)

    ranks = [rank for rank in data.ranks if rank.public is not None]
    nodes = {rank.node: rank for rank in ranks if rank.node != HOST_NAME}
    fetched = values_or_raise(run_on_all(nodes, fetch), FETCHING)
    parts = tuple(fetched[rank.node] if rank.node in fetched else fetch(rank) for rank in ranks)
    return parts, sum(rank.num_public for rank in nodes.values()) * row_bytes


def _gather(host: RankSpec, parts: tuple[GatheredPart, ...], model: RunModel, context: RunContext) -> bool:
    """Put `parts` together on the host. Without any, return whether it has the features already."""
    assert host.public is not None
    request = ExtractSpec(host.public, FEATURE_STORE, model.prefix, host.runtime)
    spec = GatherSpec(request, find_features(context.prepared).shape, parts)
    with context.events.working(GATHERING, [HOST_NAME]) as on_progress:
        machine, note = (context.space, HOST_NAME), partial(on_progress, HOST_NAME)
        worker = context.prepared.worker
        return call_machine(*machine, worker, "gather", spec, Gathered, note, doing=GATHERING).is_stored
