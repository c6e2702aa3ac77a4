"""The time of a ring that sums over the ranks; pure.

Horovod's allreduce (STANNIS paper, section II.B): each rank sends 2 (p − 1) / p of the vector to its
neighbour, all at the same time. The cost of one more rank decreases with their number: the paper saw no
further slow-down beyond 5 to 6 devices.
"""

from dataclasses import dataclass
from typing import Protocol


class SumCost(Protocol):
    """The cost of a sum over the ranks, by any collective."""

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds to sum vectors of `num_bytes` over `num_ranks`; 0 for one rank."""


@dataclass(frozen=True)
class RingCost:
    """Seconds per byte on one link of the ring."""

    per_byte_s: float = 0.0

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds to sum vectors of `num_bytes` over `num_ranks`; 0 for one rank."""
        return ring_share(num_ranks) * num_bytes * self.per_byte_s


def ring_share(num_ranks: int) -> float:
    """Return how many times the vector crosses each link: 2 (p − 1) / p; 0 for one rank."""
    return 2 * (num_ranks - 1) / num_ranks if num_ranks > 1 else 0.0
