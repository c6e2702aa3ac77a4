"""The strategy `features`: each machine computes the frozen part of the model once for its own samples.

Features stay on the machine that made them, in a cache by content. What is then trained is the model's head,
with the same step, on fewer numbers. Where all samples are public, their features may leave the nodes, and
the host trains the head alone: it then needs no sum, and the nodes no TensorFlow.
"""

import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from csdctl.documents import build_atomically, save_json
from csdctl.errors import InputError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.reporting.numbers import format_bytes, format_seconds
from csdctl.shipping.store import StoredFile, hash_file, store_file
from csdctl.shipping.worker_calls import call_worker, fetch_results
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import within
from csdctl.transport.session import Session
from csdctl.tuning.plan import Plan
from csdctl.tuning.strategies import FEATURES
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.features import (
    FEATURE_STORE,
    FLOAT16,
    FLOAT32,
    LITERT,
    Augmented,
    Converted,
    ConvertSpec,
    Extracted,
    ExtractSpec,
    FeatureOptions,
    Gathered,
    GatheredPart,
    GatherSpec,
    Recomputed,
    SendSpec,
)
from csdctl.worker.protocol.model_info import FeatureInfo
from csdctl.worker.protocol.run_spec import DatasetSlice, HeadSpec, Prefix, RankSpec, RunSpec
from csdctl.workflows.data.deploy import deploy_files, whole
from csdctl.workflows.data.model import BUILD_DEADLINE_S, HASHES, have_hashes
from csdctl.workflows.data.prepare import OnPrepareProgress, PreparationObserver, Prepared, check_info
from csdctl.workflows.train.run import RunInputs
from csdctl.workflows.train.spec import ShardFiles, plan_reading
from csdctl.workflows.train.strategies.strategy import RunContext, Strategy
from csdctl.workflows.workspace.workspace import Workspace

COMPUTING = "computing features"
LITE_FILE = "prefix.tflite"
CHECKED_ROWS = 256
"""Number of stored features of each machine that `verify` computes again."""


class Features(Strategy):
    """Each machine computes the features of its samples once; what is trained is the model's head."""

    name = FEATURES

    def __init__(self, options: FeatureOptions) -> None:
        self._options = options
        self._gathered: FeatureRun | None = None
        """The features that all machines have computed for the host, which trains alone."""

    def choose_ranks(self, plan: Plan, context: RunContext) -> Plan:
        """Return the plan with the host alone, if it says so and the job allows it. Raises PartialError."""
        if plan.trains_on_host:
            plan, self._gathered = leave_to_host(plan, context, self._options)
        return plan

    def build_inputs(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run of the model's head, after the features of all samples have been computed.

        Raises InputError if the model has no frozen part, and PartialError naming the machines that failed.
        """
        options = self._options
        run = compute_features(inputs.spec, inputs.shards, context, options)
        if self._gathered is None:
            context.observer.say(run.describe())
        made = self._gathered or run
        content = {
            "layer": made.layer,
            "precision": options.precision,
            "engine": options.engine,
            "num_computed": made.num_computed,
            "elapsed_s": made.elapsed_s,
        }
        inputs.directory.save_manifest(inputs.directory.load_manifest() | {"features": content})
        return RunInputs(inputs.directory, run.spec, run.prepared, {})

    def build_verification(self, inputs: RunInputs, context: RunContext) -> RunInputs:
        """Return the run of the model's head, whose ranks compute the features of what they draw."""
        options = replace(self._options, precision=FLOAT32)
        divided = divide_for(inputs.spec, inputs.prepared, options, context.space)
        machines = context.space.fleet.machines
        shards = {name: (*inputs.shards.get(name, ()), *divided.files) for name in machines}
        return RunInputs(inputs.directory, divided.spec, divided.prepared, shards)

    def recompute_stored(self, inputs: RunInputs, context: RunContext) -> dict[str, Recomputed]:
        """Compute some of the stored features of each machine there again, and compare them.

        Raises InputError if the model has no frozen part, and PartialError naming the machines that failed.
        """
        space = context.space
        divided = divide_for(inputs.spec, context.prepared, self._options, space)
        made = _prepare_machines(divided, inputs.spec, inputs.shards, context, lambda *_: None)
        sessions = {name: space.sessions[name] for name in made}
        found = run_on_all(sessions, lambda session: made[session.name].recompute(CHECKED_ROWS))
        return values_or_raise(found, "computing stored features again")


@dataclass(frozen=True)
class FeatureRun:
    """A run that trains the head of a model on features."""

    spec: RunSpec
    prepared: Prepared
    """With the head in place of the whole model."""
    layer: str
    """The last layer of the frozen part."""
    shape: tuple[int, ...]
    """Shape of one sample's features."""
    precision: str
    num_samples: int
    num_computed: int
    """Samples whose features were not in a cache."""
    elapsed_s: float

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
    """Return what is known of the model's frozen part; raises InputError if it has none."""
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
            remedy="freeze its first layers (base.trainable = False), and put augmentation behind them "
            "or train with --strategy data-parallel",
        )
    return info.features


def compute_features(
    spec: RunSpec, shards: ShardFiles, context: RunContext, options: FeatureOptions
) -> FeatureRun:
    """Compute the features of all samples of `spec` where they are; return the run of the model's head.

    Raises InputError if the model has no frozen part, and PartialError naming the machines that failed.
    """
    began, space = time.monotonic(), context.space
    features = find_features(context.prepared)
    with context.observer.preparing(COMPUTING, [rank.node for rank in spec.ranks]) as on_progress:
        divided = divide_for(spec, context.prepared, options, space)
        made = _prepare_machines(divided, spec, shards, context, on_progress)

        def on_machine(session: Session) -> tuple[RankSpec, DatasetSlice | None]:
            private, public, validation = made[session.name].extract()
            return replace(made[session.name].rank, private=private, public=public), validation

        sessions = {name: space.sessions[name] for name in made}
        found = values_or_raise(run_on_all(sessions, on_machine), COMPUTING)
    ranks = tuple(found[rank.node][0] if rank.node in found else rank for rank in spec.ranks)
    return FeatureRun(
        replace(divided.spec, ranks=ranks, validation=found[HOST_NAME][1]),
        divided.prepared,
        features.layer,
        features.shape,
        options.precision,
        sum(machine.num_samples for machine in made.values()),
        sum(machine.num_computed for machine in made.values()),
        time.monotonic() - began,
    )


def _prepare_machines(
    divided: "Divided",
    spec: RunSpec,
    shards: ShardFiles,
    context: RunContext,
    on_progress: OnPrepareProgress,
) -> dict[str, "_Extraction"]:
    """Send each machine of `spec` what it needs to compute features."""
    prepared, space = context.prepared, context.space
    machines = [rank.node for rank in spec.ranks if rank.node in space.fleet.machines]
    missing = {name: [*divided.files, *shards.get(name, ())] for name in machines if name != HOST_NAME}
    deploy_files(missing, space.fleet, space.sessions, context.on_delivery)
    features = find_features(prepared)
    return {
        rank.node: _Extraction(rank, spec.validation, divided.prefix, features, prepared, space, on_progress)
        for rank in spec.ranks
        if rank.node in machines
    }


@dataclass(frozen=True)
class Divided:
    """A run of the model's head, whose samples are still those of the whole model."""

    spec: RunSpec
    prepared: Prepared
    """With the head in place of the whole model."""
    prefix: Prefix
    files: tuple[StoredFile, ...]
    """Files that a machine needs to compute features."""


def divide_for(spec: RunSpec, prepared: Prepared, options: FeatureOptions, space: Workspace) -> Divided:
    """Return the run of the model's head, with its frozen part as the engine in `options` takes it.

    Raises InputError if the model has no frozen part.
    """
    features, whole_model = find_features(prepared), prepared.model
    architecture, weights, head_architecture, head_weights = whole_model.parts
    input_range, code = prepared.recipe.input_range, whole_model.user_code
    prefix = Prefix(architecture.path, weights.path, input_range, options.precision, code)
    head = HeadSpec(prefix, whole_model.architecture.path, whole_model.weights.path, features.head_weights)
    divided = Divided(
        replace(spec, architecture=head_architecture.path, weights=head_weights.path, head=head),
        replace(prepared, model=replace(whole_model, architecture=head_architecture, weights=head_weights)),
        prefix,
        (prepared.worker, architecture, weights, *([whole_model.code] if whole_model.code else [])),
    )

    return _convert(divided, space) if options.engine == LITERT else divided


def _convert(divided: Divided, space: Workspace) -> Divided:
    """Return the run with its prefix as a LiteRT model too, converted on the host once for each content."""
    prefix, project = divided.prefix, space.project
    worker = divided.prepared.worker
    parts = [worker.path, prefix.architecture, prefix.weights, prefix.code.archive if prefix.code else ""]
    key = hashlib.sha256("\n".join(Path(part).name for part in parts).encode()).hexdigest()[:16]
    directory = project.models / f"lite-{key}"
    if not have_hashes(directory, [LITE_FILE]):
        with build_atomically(directory) as aside:
            converting = ConvertSpec(prefix, str(aside / LITE_FILE))
            call_worker(
                space.sessions[HOST_NAME],
                sys.executable,
                worker.path,
                "convert",
                converting,
                Converted,
                doing="converting the model for LiteRT",
                patience=within(BUILD_DEADLINE_S),
            )
            save_json(aside / HASHES, {LITE_FILE: hash_file(aside / LITE_FILE)})
    stored = store_file(directory / LITE_FILE, project.root, TrafficClass.MODEL)
    converted, head = replace(prefix, lite=stored.path), divided.spec.head
    assert head is not None
    spec = replace(divided.spec, head=replace(head, prefix=converted))
    return replace(divided, spec=spec, prefix=converted, files=(*divided.files, stored))


@dataclass
class _Extraction:
    """The features of one machine."""

    rank: RankSpec
    validation: DatasetSlice | None
    """Validation data of the run; the host computes its features."""
    prefix: Prefix
    features: FeatureInfo
    prepared: Prepared
    space: Workspace
    on_progress: OnPrepareProgress
    num_samples: int = 0
    num_computed: int = 0

    def extract(self) -> list[DatasetSlice | None]:
        """Return the features of private, public and validation samples; None where there are none."""
        wanted = self._wanted()
        sources = [(source, count, views) for source, count, views in wanted if source is not None]
        if not sources:
            return [None for _ in wanted]
        node = self.rank.node
        found = self._call([source for source, _, _ in sources], 0)
        check_parts(found, len(sources), node, COMPUTING)
        num_rows = [count * views for _, count, views in sources]
        for info, count in zip(found.parts, num_rows, strict=True):
            self._check(info, count)
        self.num_samples += sum(num_rows)
        self.num_computed += min(found.num_computed, sum(num_rows))
        features = iter(found.parts)
        return [
            None if source is None else replace(whole(next(features)), num_views=views)
            for source, _, views in wanted
        ]

    def recompute(self, num_rows: int) -> Recomputed:
        """Return how stored rows compare with what the machine computes now."""
        sources = [source for source, _, _ in self._wanted() if source is not None]
        if not sources:
            return Recomputed(0, 0.0)
        found = self._call(sources, num_rows)
        if found.checked is None:
            raise RemoteCommandError(f"{COMPUTING}: received no comparison", node=self.rank.node)
        return found.checked

    def _wanted(self) -> list[tuple[DatasetSlice | None, int, int]]:
        """Return private, public and validation samples, with their number and the views of each."""
        rank, prepared = self.rank, self.prepared
        is_host = rank.node == HOST_NAME
        num_validation = prepared.validation.num_samples if prepared.validation else 0
        num_views = max(1, prepared.recipe.views)
        return [
            (rank.private, rank.num_private - rank.num_repeated, num_views),
            (rank.public, rank.num_public, num_views),
            (self.validation if is_host else None, num_validation, 1),
        ]

    def _call(self, sources: Sequence[DatasetSlice], num_checked: int) -> Extracted:
        """Have the machine compute features of `sources`, or check those that are stored."""
        recipe, node = self.prepared.recipe, self.rank.node
        first, *others = sources
        spec = ExtractSpec(
            first,
            FEATURE_STORE,
            self.prefix,
            self.rank.runtime,
            others=tuple(others),
            augmented=Augmented(recipe.augment, recipe.seed, recipe.views) if recipe.views else None,
            num_checked=num_checked,
            num_plain=int(self.validation is not None and node == HOST_NAME),
        )
        return call_worker(
            self.space.sessions[node],
            self.space.fleet.python_of(node),
            self.prepared.worker.path,
            "extract",
            spec,
            Extracted,
            lambda progress: self.on_progress(node, progress),
            doing=COMPUTING,
        )

    def _check(self, info: DatasetInfo, num_samples: int) -> None:
        """Raise RemoteCommandError unless these can be the features of that many samples."""
        check_info(info, self.rank.node, COMPUTING, may_be_empty=True)
        expected = (num_samples, self.features.shape, self.prefix.precision)
        if (info.num_samples, info.sample_shape, info.dtype) != expected:
            raise RemoteCommandError(
                f"{COMPUTING}: received {info.num_samples} features of shape {info.sample_shape} and type "
                f"{info.dtype}, expected {expected[0]} of {expected[1]} and {expected[2]}",
                node=self.rank.node,
            )


def check_parts(found: Extracted, expected: int, node: str, doing: str) -> None:
    """Raise RemoteCommandError unless a machine has answered for as many sources as it was given."""
    if len(found.parts) != expected:
        problem = f"{doing}: received {len(found.parts)} data sets, expected {expected}"
        raise RemoteCommandError(problem, node=node)


FETCHING, GATHERING = "fetching features", "gathering features"
MAX_HEADER_BYTES = 1 << 16


def why_not_alone(job: Job, prepared: Prepared) -> str:
    """Return why the host cannot train alone on the features of all samples; '' if it can."""
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


def leave_to_host(plan: Plan, context: RunContext, options: FeatureOptions) -> tuple[Plan, FeatureRun | None]:
    """Return the plan with which the host trains alone, and the features that were computed for it.

    These are None if the host has all of them. Where it cannot train alone, the plan is `plan` itself. Raises
    PartialError naming the machines that failed.
    """
    job, prepared, space, observer = context.job, context.prepared, context.space, context.observer
    if len(plan.ranks) == 1:
        return plan, None
    if why_not := why_not_alone(job, prepared):
        observer.say(f"all ranks train on their own features, not the host alone: there is {why_not}")
        return plan, None
    alone = plan.for_host_alone()
    gatherer = _Gatherer(prepared, space, options, observer)
    wanted, _ = plan_reading(alone, prepared, job, space)
    num_samples = prepared.public.num_samples
    if gatherer.gather(wanted, ()):
        observer.say(f"features of all {num_samples:,} public samples are on the host, which trains alone")
        return alone, None
    spec, shards = plan_reading(plan, prepared, job, space)
    run = compute_features(spec, shards, context, options)
    observer.say(run.describe())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(".gather", dir=space.project.state) as directory:
        parts, num_bytes = gatherer.fetch(run, Path(directory))
        gatherer.gather(wanted, parts)
    observer.say(
        f"the host trains alone: {format_bytes(num_bytes)} of features of public samples fetched from "
        f"{len(run.spec.ranks) - 1} nodes in {format_seconds(time.monotonic() - began)}"
    )
    return alone, run


@dataclass(frozen=True)
class _Gatherer:
    """Brings the features of public samples to the host."""

    prepared: Prepared
    space: Workspace
    options: FeatureOptions
    observer: PreparationObserver

    def fetch(self, run: FeatureRun, directory: Path) -> tuple[tuple[GatheredPart, ...], int]:
        """Fetch the features of all nodes into `directory`; return all parts, and the bytes fetched."""
        ranks = {rank.node: rank for rank in run.spec.ranks if rank.public is not None}
        row_bytes = count_feature_bytes(run.shape, run.precision)

        def fetch(session: Session) -> GatheredPart:
            return self._fetch(session, ranks[session.name], row_bytes, directory)

        nodes = {name: self.space.sessions[name] for name in ranks if name != HOST_NAME}
        found = values_or_raise(run_on_all(nodes, fetch), FETCHING)
        if host := ranks.get(HOST_NAME):
            found[HOST_NAME] = _part(host, Path(host.public.images) if host.public else Path())
        num_bytes = sum(ranks[name].num_public for name in nodes) * row_bytes
        return tuple(found[name] for name in ranks), num_bytes

    def _fetch(self, session: Session, rank: RankSpec, row_bytes: int, directory: Path) -> GatheredPart:
        assert rank.public is not None
        target = directory / f"{rank.node}.npy"
        with target.open("wb") as file:
            fetch_results(
                session,
                self.space.fleet.python_of(rank.node),
                self.prepared.worker.path,
                SendSpec(
                    Path(rank.public.images).parent.name,
                    rank.public.images_sha256,
                    rank.num_public * row_bytes + MAX_HEADER_BYTES,
                    FEATURE_STORE,
                ),
                file,
                TrafficClass.FEATURES,
                doing=FETCHING,
            )
        return _part(rank, target)

    def gather(self, spec: RunSpec, parts: tuple[GatheredPart, ...]) -> bool:
        """Put `parts` together on the host; without any, return whether it has the features already."""
        (host,) = spec.ranks
        assert host.public is not None
        prefix = divide_for(spec, self.prepared, self.options, self.space).prefix
        wanted = ExtractSpec(host.public, FEATURE_STORE, prefix, host.runtime)
        with self.observer.preparing(GATHERING, [HOST_NAME]) as on_progress:
            found = call_worker(
                self.space.sessions[HOST_NAME],
                self.space.fleet.python_of(HOST_NAME),
                self.prepared.worker.path,
                "gather",
                GatherSpec(wanted, find_features(self.prepared).shape, parts),
                Gathered,
                lambda progress: on_progress(HOST_NAME, progress),
                doing=GATHERING,
            )
        return found.is_stored


def _part(rank: RankSpec, path: Path) -> GatheredPart:
    assert rank.public is not None
    start = rank.public_start
    return GatheredPart(rank.node, str(path), rank.public.images_sha256, start, start + rank.num_public)
