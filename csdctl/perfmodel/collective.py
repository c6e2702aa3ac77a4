"""The time of a sum over the ranks, by bytes and ranks; pure.

    seconds = fixed + per_rank · (ranks - 1) + (per_byte + per_rank_byte · (ranks - 1)) · bytes

A star sends every rank's vector to the host and back: its time grows with ranks × bytes. The time of a
collective whose ranks send simultaneously grows with the bytes alone. All four coefficients are at least 0.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveCost:
    """The coefficients of a sum on a fleet."""

    fixed_s: float = 0.0
    per_rank_s: float = 0.0
    per_byte_s: float = 0.0
    per_rank_byte_s: float = 0.0

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds to sum vectors of `num_bytes` over `num_ranks`; 0 for one rank."""
        if num_ranks < 2:
            return 0.0
        others = num_ranks - 1
        per_byte_s = self.per_byte_s + self.per_rank_byte_s * others
        return self.fixed_s + self.per_rank_s * others + per_byte_s * num_bytes
