"""Training by features on the host alone: all machines compute features of public samples, the host trains.

A sum over the ranks takes as long for a small head as for a large one. Where all samples are public, their
features may leave the nodes; the host then needs no sum, and the nodes no TensorFlow. Features that the host
has are found by the next run.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.reporting.numbers import format_bytes, format_seconds
from csdctl.shipping.deliver import Delivery
from csdctl.shipping.results import fetch_results
from csdctl.shipping.worker_calls import watch_worker
from csdctl.transport.many import run_on_all, values_or_raise
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Session
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.features import (
    FEATURE_STORE,
    FLOAT32,
    ExtractSpec,
    FeatureOptions,
    Gathered,
    GatheredPart,
    GatherSpec,
    SendSpec,
)
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.workflows.data.deploy import cut_shards
from csdctl.workflows.data.features import (
    COMPUTING,
    FeatureRun,
    compute_features,
    count_feature_bytes,
    divide_for,
    find_features,
)
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.placement import place_plan
from csdctl.workflows.train.preparation import PreparationObserver
from csdctl.workflows.train.spec import build_spec
from csdctl.workflows.workspace.workspace import Workspace

FETCHING, GATHERING = "fetching features", "gathering features"
MAX_HEADER_BYTES = 1 << 16


class GatherObserver(PreparationObserver, Protocol):
    """Shows how features are computed and fetched."""

    def on_delivery(self, node: str, delivery: Delivery, /) -> None:
        """Files have reached `node`."""


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


def leave_to_host(
    plan: Plan,
    job: Job,
    prepared: Prepared,
    space: Workspace,
    options: FeatureOptions,
    observer: GatherObserver,
) -> tuple[Plan, FeatureRun | None]:
    """Return the plan with which the host trains alone, and the features that were computed for it.

    These are None if the host has all of them. Where it cannot train alone, the plan is `plan` itself. Raises
    PartialError naming the machines that failed.
    """
    if len(plan.ranks) == 1:
        return plan, None
    if why_not := why_not_alone(job, prepared):
        observer.say(f"all ranks train on their own features, not the host alone: there is {why_not}")
        return plan, None
    alone = plan.for_host_alone()
    gatherer = _Gatherer(job, prepared, space, options, observer)
    wanted = gatherer.build_spec(alone)
    num_samples = prepared.public.num_samples
    if gatherer.gather(wanted, ()):
        observer.say(f"features of all {num_samples:,} public samples are on the host, which trains alone")
        return alone, None
    spec = gatherer.build_spec(plan)
    shards = cut_shards(place_plan(plan, prepared, job, space.fleet), prepared.public, job, space.project)
    with observer.preparing(COMPUTING, [rank.node for rank in spec.ranks]) as on_progress:
        run = compute_features(spec, prepared, shards, space, options, observer.on_delivery, on_progress)
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

    job: Job
    prepared: Prepared
    space: Workspace
    options: FeatureOptions
    observer: GatherObserver

    def build_spec(self, plan: Plan) -> RunSpec:
        """Return what the ranks of `plan` read, as a run of which nothing is kept."""
        job, prepared, space = self.job, self.prepared, self.space
        placed = place_plan(plan, prepared, job, space.fleet)
        shards = cut_shards(placed, prepared.public, job, space.project)
        scratch = space.project.new_scratch()
        spec = build_spec(scratch, job, plan, placed, prepared, shards, space)
        shutil.rmtree(scratch.path, ignore_errors=True)
        return spec

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
            found = watch_worker(
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
