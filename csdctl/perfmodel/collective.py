"""How long a sum over the ranks takes, by bytes and ranks; pure.

    seconds = fixed + per_rank · (ranks - 1) + (per_byte + per_rank_byte · (ranks - 1)) · bytes

The star carries every rank's vector to the host and back, so that its time grows with ranks × bytes; a
collective whose ranks send at the same time grows with the bytes alone. All four are at least 0.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveCost:
    """Seconds of one sum on a fleet."""

    fixed_s: float = 0.0
    per_rank_s: float = 0.0
    per_byte_s: float = 0.0
    per_rank_byte_s: float = 0.0

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Seconds to sum vectors of `num_bytes` over `num_ranks`; 0 for one rank, which sums nothing."""
        if num_ranks < 2:
            return 0.0
        others = num_ranks - 1
        per_byte_s = self.per_byte_s + self.per_rank_byte_s * others
        return self.fixed_s + self.per_rank_s * others + per_byte_s * num_bytes
