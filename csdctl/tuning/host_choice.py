"""The best plan, with or without training on the host, which sums and serves data in any case; pure."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from csdctl.tuning.search import BestPlan, Limits, RankCandidate, find_best
from csdctl.tuning.stannis import TuningError

MIN_GAIN_WITHOUT_HOST = 0.05
"""The host does not train when the fleet is faster by at least this share without it."""


def find_best_ranks(
    host: RankCandidate,
    nodes: Sequence[RankCandidate],
    limits: Limits,
    sum_s: Callable[[int], float],
    overhead_factor: float = 1.0,
) -> BestPlan:
    """Return the fastest plan of the host and `nodes`; it has no batch size for a host that does not train.

    `sum_s(n)` is the time of a sum over n ranks, including the host. Raises TuningError when no plan
    satisfies the limits.
    """
    if not nodes:
        return find_best([host], limits, sum_s, overhead_factor)
    # A host alone has no overhead: the plan that leaves out all nodes is compared without it.
    best = find_best([host, *nodes], limits, sum_s, overhead_factor, lone_overhead_factor=1.0)
    with suppress(TuningError):
        without = find_best(nodes, limits, lambda num_nodes: sum_s(num_nodes + 1), overhead_factor)
        if without.prediction.samples_per_s > best.prediction.samples_per_s * (1 + MIN_GAIN_WITHOUT_HOST):
            return without
    return best
