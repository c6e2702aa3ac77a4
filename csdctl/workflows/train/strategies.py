"""The decisions of a strategy about a run: data-parallel, the default, split and features.

With `features`, machines compute the frozen part of the model once, and the ranks train its head, with the
same step on fewer numbers. Features stay on the machine that made them, in a cache by content. Where all
samples are public, their features may leave the nodes, and only the host trains the head, without a sum.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from csdctl.errors import InputError, RemoteCommandError, option
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.placement.equation1 import Placed
from csdctl.reporting.numbers import format_bytes, format_seconds
from csdctl.shipping.worker_calls import call_worker, fetch_results
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, Plan
from csdctl.worker.protocol import features as protocol
from csdctl.worker.protocol import run_spec
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress, equals
from csdctl.worker.protocol.features import FEATURE_STORE, FLOAT16, FLOAT32, Extracted, GatheredPart
from csdctl.worker.protocol.model_info import CutInfo, FeatureInfo, ModelInfo
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, SplitSpec
from csdctl.workflows.data.compile import as_prefix, files_of
from csdctl.workflows.data.deploy import deploy_files
from csdctl.workflows.data.files import whole
from csdctl.workflows.data.prepare import Prepared, extract_on
from csdctl.workflows.train.request import AUTO, TrainOptions
from csdctl.workflows.train.resolved import ResolvedRun, RunContext, RunData, RunModel, read_plan
from csdctl.workflows.workspace.event_stream import EventStream, OnProgress
from csdctl.workflows.workspace.workspace import worker_on

COMPUTING, FETCHING, GATHERING = "computing features", "fetching features", "gathering features"
MAX_HEADER_BYTES = 1 << 16
"""The longest header of a .npy file with features."""


def _other_strategy() -> str:
    return f"train with {option('strategy')} data-parallel"


class Strategy:
    """Data-parallel: every rank holds the whole model. Other strategies override what they do differently.

    An instance belongs to one run. Its methods are called in the order in which they stand here.
    """

    name: ClassVar[str] = DATA_PARALLEL
    cut = ""
    """The last layer that nodes compute, if the model is split."""
    training_task, verification_task = run_spec.TRAIN, run_spec.VERIFY
    is_balanced = True
    """Whether batch sizes may change during the run."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the ranks that train. Raises InputError or PartialError."""
        return plan

    def resolve(
        self, plan: Plan, context: RunContext, placed: Sequence[Placed] | None = None, *, min_nodes: int = 0
    ) -> ResolvedRun:
        """Return what the ranks of a plan read and compute. `placed`: the samples of a resumed run's ranks.

        Raises InputError if fleet, data or model does not allow it, and PartialError naming failed machines.
        """
        plan = plan if placed else self.choose_ranks(plan, context)
        model = self.divide(context)  # refuses a job before shards are cut
        data = read_plan(plan.ranks, context, placed, min_nodes=min_nodes)
        data, features = self.compute(data, model, context)
        return ResolvedRun(
            context,
            data,
            model,
            task=run_spec.TaskSpec(self.training_task),
            recipe=context.prepared.recipe,
            plan=plan,
            strategy=self.name,
            cut=self.cut,
            is_balanced=self.is_balanced,
            features=features,
        )

    def divide(self, context: RunContext, *, is_verification: bool = False) -> RunModel:
        """Return what the ranks compute, in a verification in 32 bits at least. Raises InputError."""
        model = context.compiler.step(is_wide=True) if is_verification else context.prepared.model
        return RunModel(model, model)

    def compute(self, data: RunData, model: RunModel, context: RunContext) -> tuple[RunData, dict[str, Any]]:
        """Return what the ranks read, and what the manifest says of it. Raises PartialError."""
        return data, {}

    def element_spec(self, prepared: Prepared) -> DatasetInfo:
        """Return the form of the samples that the ranks take."""
        return prepared.public.element_spec


@dataclass
class SplitStrategy(Strategy):
    """Nodes compute the layers up to `cut`, the host the rest, of micro-batches at the same time."""

    name: ClassVar[str] = SPLIT
    cut: str = ""
    num_micro_batches: int = SplitSpec.num_micro_batches
    training_task, verification_task = run_spec.TRAIN_SPLIT, run_spec.VERIFY_SPLIT
    is_balanced = False

    def divide(self, context: RunContext, *, is_verification: bool = False) -> RunModel:
        """Return the two parts of the model. Raises InputError if the job or the model does not allow it."""
        check_split(context)
        cut = find_cut(context.prepared.model.info, self.cut)
        return cut_model(context, cut.layer, self.num_micro_batches)


def cut_model(
    context: RunContext, layer: str, num_micro_batches: int = SplitSpec.num_micro_batches
) -> RunModel:
    """Return the model cut after `layer`. Raises InputError if it cannot be."""
    on_host, on_nodes = context.compiler.split(layer)
    return RunModel(on_host, on_nodes, split=SplitSpec(layer, num_micro_batches, on_nodes.step))


def check_split(context: RunContext) -> None:
    """Raise InputError unless job and fleet allow that a model is split."""
    if context.space.fleet.networks:
        raise InputError("a model is split on one server; this fleet has several", remedy=_other_strategy())
    check_job(context.job)


def check_job(job: Job) -> None:
    """Raise InputError unless the job lets activations of private samples leave their node."""
    if job.noise:
        raise InputError(
            f"{job.path}: data.private.noise hides each sample in a sum, and activations leave their node "
            "one by one",
            remedy=_other_strategy(),
        )
    if job.data.private and job.data.private.activations != "may-leave":
        raise InputError(
            f"{job.path}: splitting the model sends activations and labels of private samples to the host, "
            "which the job does not allow",
            remedy="add `activations: may-leave` to data.private (docs/how-to/split.md), "
            f"or {_other_strategy()}",
        )


def find_cut(info: ModelInfo, layer: str) -> CutInfo:
    """Return the cut after `layer`. Raises InputError that lists the model's cuts."""
    if not info.cuts:
        raise InputError(
            f"{info.name} cannot be split: it is not a functional model with a single tensor "
            "between two layers",
            remedy=_other_strategy(),
        )
    for cut in info.cuts:
        if cut.layer == layer and cut.num_bytes:
            return cut
        if cut.layer == layer:
            problem = f"{info.name} cannot be cut after {layer!r}, whose activations have no fixed size"
            raise InputError(problem, remedy="give its input a fixed shape, or name another cut")
    names = ", ".join(cut.layer for cut in info.cuts)
    what = f"cannot be cut after {layer!r}" if layer else "needs a cut"
    remedy = f"name one of them: {option('cut')} LAYER"
    raise InputError(f"{info.name} {what}; its cuts: {names}", remedy=remedy)


class FeatureStrategy(Strategy):
    """Each machine computes the features of its samples once. The ranks train the model's head."""

    name = FEATURES

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._gathered: FeatureRun | None = None
        """The features that all machines have computed for the host, which trains alone."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the host alone, if it says so and the job allows it. Raises PartialError."""
        say, num_samples = context.events.say, context.prepared.public.num_samples
        if not plan.trains_on_host or len(plan.ranks) == 1:
            return plan
        if why_not := _why_not_alone(context.job, context.prepared):
            say(f"all ranks train on their own features, not the host alone: there is {why_not}")
            return plan
        alone, model = plan.for_host_alone(), self.divide(context)
        (host,) = read_plan(alone.ranks, context).ranks
        if _gather(host, (), model, context):
            say(f"features of all {num_samples:,} public samples are on the host, which trains alone")
            return alone
        data, self._gathered = compute_features(read_plan(plan.ranks, context), model, context)
        say(self._gathered.describe())
        began = time.monotonic()
        with tempfile.TemporaryDirectory(".gather", dir=context.space.project.state) as directory:
            parts, num_bytes = _fetch_features(data, model, context, Path(directory))
            _gather(host, parts, model, context)
        say(
            f"the host trains alone: {format_bytes(num_bytes)} of features of public samples fetched from "
            f"{len(data.ranks) - 1} nodes in {format_seconds(time.monotonic() - began)}"
        )
        return alone

    def divide(self, context: RunContext, *, is_verification: bool = False) -> RunModel:
        """Return the model's head. Raises InputError if the model has no frozen part."""
        prepared, model = context.prepared, context.prepared.model
        precision, has_views = FLOAT32 if is_verification else self._precision, bool(prepared.recipe.views)
        features = find_features(prepared)
        frozen, head = context.compiler.parts(precision, is_wide=is_verification)
        head_spec = run_spec.HeadSpec(
            as_prefix(frozen, precision, has_views=has_views),
            architecture=model.architecture.path,
            weights=model.weights.path,
            head_weights=features.head_weights,
            compiled=model.step,
        )
        files = (prepared.worker, *files_of(frozen, has_views=has_views))
        return RunModel(head, replace(head, info=model.info), head=head_spec, prefix_files=files)

    def compute(self, data: RunData, model: RunModel, context: RunContext) -> tuple[RunData, dict[str, Any]]:
        """Return the features of all samples, which each machine computes. Raises PartialError."""
        data, computed = compute_features(data, model, context)
        if self._gathered is None:
            context.events.say(computed.describe())
        described = asdict(self._gathered or computed)
        del described["num_samples"]
        return replace(data, shards={}), described

    def element_spec(self, prepared: Prepared) -> DatasetInfo:
        """Return the form of features, in which a size that the model leaves open is 8."""
        shape = tuple(size or 8 for size in find_features(prepared).shape)
        form = prepared.public.element_spec
        return replace(form, path="", sample_shape=shape, dtype=FLOAT32, max_values={})


def choose_strategy(options: TrainOptions, plan: Plan) -> Strategy:
    """Return the strategy that the user asks for. Without one, the strategy of `plan`."""
    name = plan.strategy if options.strategy == AUTO else options.strategy
    options.check_strategy_options(name)
    if name == SPLIT:
        cut = options.cut or (plan.cut if plan.strategy == SPLIT else "")
        return SplitStrategy(cut, options.num_micro_batches)
    return FeatureStrategy(options.feature_precision) if name == FEATURES else Strategy()


def strategy_of(spec: RunSpec) -> Strategy:
    """Return the strategy with which a run began."""
    if spec.split:
        return SplitStrategy(spec.split.cut, spec.split.num_micro_batches)
    if spec.head:
        return FeatureStrategy(spec.head.prefix.precision)
    return Strategy()


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
        problem = f"recipe.views is {recipe.views}, and there is no data.augment to make views with"
        raise InputError(problem, remedy="name a function as data.augment, or remove recipe.views")
    if info.features is None:
        raise InputError(
            f"{info.name} cannot be trained by features: it {info.no_features}",
            remedy="freeze its first layers (base.trainable = False), and put augmentation after them "
            f"or train with {option('strategy')} data-parallel",
        )
    return info.features


def compute_features(data: RunData, model: RunModel, context: RunContext) -> tuple[RunData, FeatureRun]:
    """Compute the features of all samples. Return them as what the ranks read. Raises PartialError."""
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
    rank: RankSpec
    prefix: run_spec.Prefix
    validation: DatasetSlice | None
    """Validation samples of the run, whose features the host computes."""
    context: RunContext
    note: Callable[[PrepareProgress], None]
    num_samples: int = 0
    num_computed: int = 0

    def extract(self) -> tuple[RankSpec, DatasetSlice | None]:
        samples = self._samples()
        extracted = self._call(samples) if samples else Extracted((), 0)
        features: dict[str, Any] = {}
        for info, (name, (_, count, num_views)) in zip(extracted.parts, samples.items(), strict=True):
            self._check(info, count * num_views)
            self.num_samples += count * num_views
            features[name] = replace(whole(info), num_views=num_views)
        self.num_computed = min(extracted.num_computed, self.num_samples)
        validation = features.pop("validation", None)
        return replace(self.rank, **features), validation

    def _samples(self) -> dict[str, tuple[DatasetSlice, int, int]]:
        """Return private, public and validation samples, with their number and the views of each."""
        rank, prepared = self.rank, self.context.prepared
        num_validation = prepared.validation.num_samples if prepared.validation else 0
        num_views = max(1, prepared.recipe.views)
        samples: dict[str, tuple[DatasetSlice | None, int, int]] = {
            "private": (rank.private, rank.num_private - rank.num_repeated, num_views),
            "public": (rank.public, rank.num_public, num_views),
            "validation": (self.validation, num_validation, 1),
        }
        return {
            name: (source, count, views)
            for name, (source, count, views) in samples.items()
            if source is not None
        }

    def _call(self, samples: Mapping[str, tuple[DatasetSlice, int, int]]) -> Extracted:
        prepared, recipe = self.context.prepared, self.context.prepared.recipe
        first, *more = (source for source, _, _ in samples.values())
        spec = protocol.ExtractSpec(
            first,
            FEATURE_STORE,
            self.prefix,
            self.rank.runtime,
            more_sources=tuple(more),
            augmented=protocol.Augmented(recipe.augment, recipe.seed, recipe.views) if recipe.views else None,
            num_plain=int(self.validation is not None),
        )
        call = self.context.space, self.rank.node, prepared.worker, spec, self.note
        return extract_on(*call, doing=COMPUTING)

    def _check(self, info: DatasetInfo, num_samples: int) -> None:
        """Raise RemoteCommandError unless these can be the features of that many samples."""
        expected, precision = find_features(self.context.prepared).shape, self.prefix.precision
        shape = info.sample_shape
        is_shape = all(shape) and equals(expected, shape)  # 0 is any size, only in the model's
        if (info.num_samples, info.dtype) != (num_samples, precision) or not is_shape:
            raise RemoteCommandError(
                f"{COMPUTING}: received {info.num_samples} features of shape {shape} and type "
                f"{info.dtype}, expected {num_samples} of {expected} and {precision}",
                node=self.rank.node,
            )


def _why_not_alone(job: Job, prepared: Prepared) -> str:
    """Return why the host cannot train alone on the features of all samples."""
    if prepared.private:
        return f"private samples of {', '.join(prepared.private)}, whose features stay there"
    if prepared.recipe.views:
        return "recipe.views, by which a sample has several features"
    if job.noise:
        return "data.private.noise, which nodes add"
    return ""


def bytes_for_host(job: Job, prepared: Prepared) -> int | None:
    """Return the bytes of one sample's features. None: the host cannot train alone on all of them."""
    return None if _why_not_alone(job, prepared) else _feature_bytes(prepared, FLOAT32)


def _feature_bytes(prepared: Prepared, precision: str) -> int:
    return math.prod(find_features(prepared).shape) * (2 if precision == FLOAT16 else 4)


def _fetch_features(
    data: RunData, model: RunModel, context: RunContext, directory: Path
) -> tuple[tuple[GatheredPart, ...], int]:
    """Fetch the features of all nodes into `directory`. Return all parts, and the bytes fetched."""
    space, worker = context.space, context.prepared.worker.path
    row_bytes = _feature_bytes(context.prepared, model.prefix.precision)

    def fetch(rank: RankSpec) -> GatheredPart:
        assert rank.public is not None
        start, path = rank.public_start, Path(rank.public.images)
        if rank.node != HOST_NAME:
            limit = rank.num_public * row_bytes + MAX_HEADER_BYTES
            spec = protocol.SendSpec(path.parent.name, rank.public.images_sha256, limit, FEATURE_STORE)
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
    request = protocol.ExtractSpec(host.public, FEATURE_STORE, model.prefix, host.runtime)
    spec = protocol.GatherSpec(request, find_features(context.prepared).shape, parts)
    with context.events.working(GATHERING, [HOST_NAME]) as on_progress:
        call = (
            *worker_on(context.space, HOST_NAME, context.prepared.worker),
            "gather",
            spec,
            protocol.Gathered,
        )
        return call_worker(*call, partial(on_progress, HOST_NAME), doing=GATHERING).is_stored
