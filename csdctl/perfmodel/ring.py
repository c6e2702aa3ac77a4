"""How long a ring takes to sum over the ranks; pure.

Horovod's allreduce (STANNIS paper, section II.B): each rank passes 2 (p − 1) / p of the vector on to its
neighbour, all at the same time. The more ranks, the less another one changes: the paper saw its slow-down
fade out beyond 5 to 6 devices.
"""

from dataclasses import dataclass
from typing import Protocol


class SumCost(Protocol):
    """What a sum over the ranks costs, whichever way it goes round."""

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Seconds to sum vectors of `num_bytes` over `num_ranks`; 0 for one rank."""


@dataclass(frozen=True)
class RingCost:
    """Seconds that one link of the ring needs for a byte."""

    per_byte_s: float = 0.0

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Seconds to sum vectors of `num_bytes` over `num_ranks`; 0 for one rank, which sums nothing."""
        return ring_share(num_ranks) * num_bytes * self.per_byte_s


def ring_share(num_ranks: int) -> float:
    """How often the vector goes over each link: 2 (p − 1) / p; 0 for one rank."""
    return 2 * (num_ranks - 1) / num_ranks if num_ranks > 1 else 0.0
