"""Who predicts which samples.

Private samples on their node, validation data on the host, public samples divided by speed.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.placement.equation1 import Placed, RankLoad, place_shards
from csdctl.shipping.store import StoredFile
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.run_spec import DatasetSlice, Runtime
from csdctl.workflows.data.deploy import cut_shards, whole
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.predict.request import PRIVATE, PUBLIC, VALIDATION, PredictRequest
from csdctl.workflows.train.plan import build_equal_plan, default_runtime, resolve_plan
from csdctl.workflows.workspace.workspace import Workspace


@dataclass(frozen=True)
class Part:
    """Samples that one machine predicts."""

    data: str
    """PUBLIC, VALIDATION or PRIVATE."""
    owner: str
    """The machine where the samples lie; HOST_NAME but for private ones."""
    machine: str
    """The machine that predicts them."""
    source: DatasetSlice
    num_samples: int
    runtime: Runtime
    start: int = 0
    """Where a part of the public samples starts in their permutation."""
    files: tuple[StoredFile, ...] = ()
    """The samples, where they must be sent to the machine."""

    @property
    def label(self) -> str:
        """The name for the progress and for messages."""
        if self.data == PRIVATE:
            return self.machine
        return self.data if self.machine == HOST_NAME else f"{self.data} on {self.machine}"

    def rows(self, prepared: Prepared, seed: int) -> Any:
        """Return the number of each sample in its data set, shape (n,), in the order of the results."""
        import numpy as np

        if self.data != PUBLIC:
            return np.arange(self.num_samples)
        # As worker.data.rows_of: the part is a slice of a permutation, in the order of the file.
        permutation = np.random.default_rng(seed).permutation(prepared.public.num_samples)
        return np.sort(permutation[self.start : self.start + self.num_samples])


def divide_samples(
    request: PredictRequest, prepared: Prepared, space: Workspace, num_private: Mapping[str, int], say: Say
) -> list[Part]:
    """Return the parts in the order of the rows: host before nodes, then by node.

    `num_private` has the private samples of nodes that are absent too: the division stays the same without
    them, and the host takes their public samples.
    """
    parts: list[Part] = []
    host = default_runtime(HOST_NAME, space.fleet, space.facts)
    if PUBLIC in request.on:
        parts += _divide_public(request, prepared, space, num_private, say)
    if VALIDATION in request.on and prepared.validation:
        validation = prepared.validation
        parts.append(Part(VALIDATION, HOST_NAME, HOST_NAME, whole(validation), validation.num_samples, host))
    if PRIVATE in request.on:
        for node in space.fleet.nodes:
            info = prepared.private[node.name]
            runtime = default_runtime(node.name, space.fleet, space.facts)
            parts.append(Part(PRIVATE, node.name, node.name, whole(info), info.num_samples, runtime))
    return parts


def on_host(part: Part, prepared: Prepared, job: Job, runtime: Runtime) -> Part:
    """Return a part of the public samples as the host predicts it."""
    stop = part.start + part.num_samples
    source = dataclasses.replace(
        whole(prepared.public), start=part.start, stop=stop, permutation_seed=job.recipe.seed
    )
    return dataclasses.replace(part, machine=HOST_NAME, source=source, runtime=runtime, files=())


def _divide_public(
    request: PredictRequest, prepared: Prepared, space: Workspace, num_private: Mapping[str, int], say: Say
) -> list[Part]:
    job, fleet = request.job, request.fleet
    host = default_runtime(HOST_NAME, fleet, space.facts)
    plan = _find_plan(request, space, say)
    own = dict(num_private) if PRIVATE in request.on else {}
    if VALIDATION in request.on and prepared.validation:
        own[HOST_NAME] = prepared.validation.num_samples
    placed = _place(plan, prepared, own, fleet)
    shards = cut_shards(
        [shard for shard in placed if shard.name in space.fleet.machines and shard.num_public],
        prepared.public,
        job,
        space.project,
    )
    runtimes = {rank.node: rank.runtime for rank in plan.ranks} if plan else {}
    parts = []
    for shard in placed:
        if not shard.num_public:
            continue
        part = Part(
            PUBLIC,
            HOST_NAME,
            shard.name,
            whole(prepared.public),
            shard.num_public,
            runtimes.get(shard.name, host),
            shard.public_start,
        )
        if shard.name in shards:
            images, labels = shards[shard.name]
            source = DatasetSlice(
                images.path, labels.path, images_sha256=images.sha256, labels_sha256=labels.sha256
            )
            parts.append(dataclasses.replace(part, source=source, files=(images, labels)))
        elif job.is_everywhere and shard.name in space.fleet.machines:
            parts.append(dataclasses.replace(on_host(part, prepared, job, part.runtime), machine=shard.name))
        else:
            parts.append(on_host(part, prepared, job, host))
    return parts


def _find_plan(request: PredictRequest, space: Workspace, say: Say) -> Plan | None:
    """Return what public samples are divided by; None: the host predicts them alone."""
    if request.batch_size:
        return build_equal_plan(request.job, request.fleet, space.facts, request.batch_size)
    if request.plan_path or space.project.plan(request.job.name).exists():
        return resolve_plan(request.job, space, say, path=request.plan_path)
    say("no plan divides the public samples: the host predicts them alone (`csdctl tune` makes a plan)")
    return None


def _place(plan: Plan | None, prepared: Prepared, own: Mapping[str, int], fleet: Fleet) -> list[Placed]:
    """Return which public samples each machine predicts, such that all are done at about the same time.

    `own` are the other samples that a machine predicts.
    """
    num_public = prepared.public.num_samples
    ranks = [rank for rank in plan.ranks if rank.node in fleet.machines] if plan else []
    if not any(rank.batch_size for rank in ranks):
        return [Placed(HOST_NAME, 1, 0, 0, num_public)]
    loads = [
        RankLoad(rank.node, rank.batch_size, own.get(rank.node, 0) if rank.batch_size else 0)
        for rank in ranks
    ]
    return place_shards(loads, num_public)
