"""The plans of a scaling series, from one plan: its host with the first 0, 1, 2 … of its nodes; pure.

Section V of the STANNIS paper, figures 6 and 7. Weak: every rank keeps its batch size. Strong: all ranks
together keep the batch size of the whole plan, divided in proportion to the plan's batch sizes.
"""

from collections.abc import Sequence

from csdctl.errors import InputError
from csdctl.tuning.plan import Plan, RankPlan

WEAK, STRONG = KINDS = ("weak", "strong")


def choose_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of nodes of a series where none are asked for: 0, 1, 2, 4 … and `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return (0, *(count for count in powers if count < most), *([most] if most else []))


def plan_point(plan: Plan, kind: str, num_nodes: int, most: int) -> Plan:
    """Return the plan of one point of the series of `plan` that ends with `most` nodes.

    Raises InputError where there are not so many, where nobody would train, and where a share does not fit in
    memory.
    """
    host, *nodes = plan.ranks
    if num_nodes > len(nodes):
        raise InputError(
            f"received {num_nodes} nodes, but the plan has {len(nodes)}",
            remedy="give fewer with --nodes, or run `csdctl tune` for more",
        )
    if not num_nodes and not host.batch_size:
        raise InputError(
            "the host does not train in this plan: there is no run with 0 nodes",
            remedy="leave 0 out of --nodes",
        )
    ranks = [host, *nodes[:num_nodes]]
    if kind == STRONG:
        ranks = _divide(sum(rank.batch_size for rank in plan.ranks[: most + 1]), ranks)
    changed = {"ranks": ranks, "predicted": None, "strategies": [], "left_out": [], "trains_on_host": False}
    return plan.model_copy(update=changed)


def _divide(global_batch: int, ranks: Sequence[RankPlan]) -> list[RankPlan]:
    """Divide `global_batch` among ranks in proportion to their batch sizes, by largest remainders."""
    weights = [rank.batch_size for rank in ranks]
    exact = [global_batch * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in exact]
    by_remainder = sorted(range(len(ranks)), key=lambda number: sizes[number] - exact[number])
    for number in by_remainder[: global_batch - sum(sizes)]:
        sizes[number] += 1
    for rank, size in zip(ranks, sizes, strict=True):
        if rank.max_batch_size and size > rank.max_batch_size:
            raise InputError(
                f"{rank.node} would take {size:,} of the {global_batch:,} samples of a step with "
                f"{len(ranks) - 1} nodes, but at most {rank.max_batch_size:,} fit in its memory",
                remedy="start the strong series with more nodes (--nodes), or with smaller batch sizes",
            )
    return [rank.model_copy(update={"batch_size": size}) for rank, size in zip(ranks, sizes, strict=True)]
