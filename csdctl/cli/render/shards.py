"""What each rank reads in an epoch, in a few lines of text."""

from math import ceil

from csdctl.worker.protocol.run_spec import RankSpec, RunSpec

MAX_NAMED = 8


def format_shards(spec: RunSpec) -> list[str]:
    """Describe the shards, how often private samples are read, and which nodes make the epoch longer."""
    if len(spec.ranks) <= MAX_NAMED:
        lines = [f"shards: {'; '.join(_describe(rank) for rank in spec.ranks)}"]
    else:
        sizes = [rank.num_private + rank.num_public for rank in spec.ranks]
        lines = [f"shards: {min(sizes):,} to {max(sizes):,} samples a rank"]
    repeating = [rank for rank in spec.ranks if rank.num_repeated]
    for rank in repeating[:MAX_NAMED]:
        different = rank.num_private - rank.num_repeated
        weight = f", each with weight {rank.weight:.2f}" if rank.weight != 1.0 else ""
        lines.append(
            f"{rank.node}: {different:,} private samples are read "
            f"{rank.num_private / different:.2f} times an epoch{weight}"
        )
    if len(repeating) > MAX_NAMED:
        lines.append(f"and {len(repeating) - MAX_NAMED} more nodes read private samples more than once")
    return lines + _describe_late(spec)


def _describe(rank: RankSpec) -> str:
    parts = [(rank.num_private, "private"), (rank.num_public, "public")]
    return f"{rank.node} {', '.join(f'{count:,} {name}' for count, name in parts if count) or 'nothing'}"


def _describe_late(spec: RunSpec) -> list[str]:
    """Name the nodes whose private samples take more steps than the shards of other ranks."""
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
        f"private samples of {', '.join(late[:MAX_NAMED])} take up to {max(steps.values()):,} steps, "
        f"other ranks have samples for {least:,}: more public data, or larger batches there, would help"
    ]
