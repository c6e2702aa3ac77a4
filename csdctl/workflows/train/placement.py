"""The shards of a plan's ranks, and what each rank reads."""

import dataclasses
from collections.abc import Mapping, Sequence

from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.launch.network import check_network
from csdctl.placement.equation1 import Placed, PlacementError, RankLoad, place_shards
from csdctl.shipping.store import StoredFile
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec
from csdctl.workflows.data.deploy import whole
from csdctl.workflows.data.prepare import Prepared

ShardFiles = Mapping[str, tuple[StoredFile, ...]]
"""By node: the samples and labels that were cut for it on the host."""


def place_plan(plan: Plan, prepared: Prepared, job: Job, fleet: Fleet) -> list[Placed]:
    """Compute the shards of the plan's ranks from the data as it is now (equation 1).

    Raises InputError when the fleet or the data does not allow the plan.
    """
    _check_nodes(plan, fleet)
    check_network(fleet.network)
    num_private = {name: info.num_samples for name, info in prepared.private.items()}
    loads = [RankLoad(rank.node, rank.batch_size, num_private.get(rank.node, 0)) for rank in plan.ranks]
    try:
        return place_shards(loads, prepared.public.num_samples, is_repeating=job.is_repeating)
    except PlacementError as error:
        raise InputError(str(error), remedy="change the plan's batch sizes or the data") from None


def _check_nodes(plan: Plan, fleet: Fleet) -> None:
    """Raise InputError when a rank of the plan is on a machine outside the fleet."""
    missing = [rank.node for rank in plan.ranks if rank.node not in fleet.machines]
    if missing:
        raise InputError(
            f"the plan needs {format_node_names(missing)}, not among the selected nodes of {fleet.path}",
            remedy="run `csdctl tune` again for these nodes",
        )


def build_rank_specs(
    plan: Plan, placed: Sequence[Placed], prepared: Prepared, shards: ShardFiles, job: Job
) -> tuple[RankSpec, ...]:
    """Return what every rank reads and how it computes, in order of rank."""
    specs = []
    for number, (rank, shard) in enumerate(zip(plan.ranks, placed, strict=True)):
        specs.append(
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
                weight=shard.weight if job.is_weighted_by_data_set else 1.0,
                max_batch_size=rank.max_batch_size,
                micro_batch_size=rank.micro_batch_size,
            )
        )
    return tuple(specs)


def _public_slice(shard: Placed, prepared: Prepared, shards: ShardFiles, job: Job) -> DatasetSlice | None:
    """Return the public samples of a rank as its machine reads them; None when it needs none."""
    if shard.name == HOST_NAME or job.is_everywhere:
        return dataclasses.replace(
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
