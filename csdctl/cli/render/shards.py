"""What each rank reads in an epoch, in a few lines."""

from math import ceil

from csdctl.worker.protocol.run_spec import RankSpec, RunSpec

MAX_NAMED = 8


def format_shards(spec: RunSpec) -> list[str]:
    """The shards, how often private samples are read, and who makes the epoch longer for all."""
    if len(spec.ranks) <= MAX_NAMED:
        lines = [f"shards: {'; '.join(_describe(rank) for rank in spec.ranks)}"]
    else:
        sizes = [rank.num_private + rank.num_public for rank in spec.ranks]
        lines = [f"shards: {min(sizes):,} to {max(sizes):,} samples a rank"]
    repeating = [rank for rank in spec.ranks if rank.num_repeated]
    for rank in repeating[:MAX_NAMED]:
        different = rank.num_private - rank.num_repeated
        weighing = f", each with weight {rank.weight:.2f}" if rank.weight != 1.0 else ""
        lines.append(
            f"{rank.node}: {different:,} private samples are read "
            f"{rank.num_private / different:.2f} times an epoch{weighing}"
        )
    if len(repeating) > MAX_NAMED:
        lines.append(f"and {len(repeating) - MAX_NAMED} more nodes read private samples more than once")
    return lines + _late(spec)


def _describe(rank: RankSpec) -> str:
    kinds = [(rank.num_private, "private"), (rank.num_public, "public")]
    return f"{rank.node} {', '.join(f'{count:,} {kind}' for count, kind in kinds if count) or 'nothing'}"


def _late(spec: RunSpec) -> list[str]:
    """Nodes whose private samples alone last longer than what the others have."""
    steps = {
        rank.node: ceil((rank.num_private + rank.num_public) / rank.batch_size)
        for rank in spec.ranks
        if rank.batch_size
    }
    least = min(steps.values())
    late = [node for node, count in steps.items() if count > least + 1]
    if not late:
        return []
    return [
        f"private samples of {', '.join(late[:MAX_NAMED])} last for up to {max(steps.values()):,} steps, "
        f"the others have some for {least:,}: more public data, or larger batch sizes there, would help"
    ]
