"""Equation 1 of the STANNIS paper: shards proportional to batch sizes, so that all ranks finish together.

    steps per epoch = dataset_k / batchsize_k, the same for every rank k

Private samples stay on their node and are counted first. Public samples fill the rest of the shard. A rank
whose private samples need more steps makes the epoch longer. The last steps of the other ranks are then
empty, which the exact weighted step supports.

Nodes with few private samples get more public samples (top-up), or repeat their own until their ratio of
samples to batch size equals the largest of all nodes (repeat). The paper, section IV, leaves both open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from csdctl.worker.protocol.equation1 import public_shares


class PlacementError(ValueError):
    """The samples cannot be placed as requested."""


@dataclass(frozen=True)
class RankLoad:
    """The batch size and private samples of one rank."""

    name: str
    batch_size: int
    """0: the rank does not train."""
    num_private: int = 0
    """Distinct private samples."""


@dataclass(frozen=True)
class Placed:
    """The shard of one rank: its own private samples and public[public_start:public_stop]."""

    name: str
    batch_size: int
    num_private: int
    """Private samples read in an epoch, repeated ones included."""
    public_start: int
    public_stop: int
    num_repeated: int = 0
    """Repeated reads among `num_private`."""

    @property
    def weight(self) -> float:
        """The weight of each sample read, so that repeated samples count once in total. 0…1."""
        return 1.0 - self.num_repeated / self.num_samples if self.num_samples else 1.0

    @property
    def num_public(self) -> int:
        """Public samples of this rank in one epoch."""
        return self.public_stop - self.public_start

    @property
    def num_samples(self) -> int:
        """All samples of this rank in one epoch."""
        return self.num_private + self.num_public

    @property
    def num_steps(self) -> int:
        """Number of steps to read the shard."""
        return ceil(self.num_samples / self.batch_size) if self.batch_size else 0


def place_shards(ranks: Sequence[RankLoad], num_public: int, *, is_repeating: bool = False) -> list[Placed]:
    """Assign every public sample to exactly one rank, and private samples to their own. In order of `ranks`.

    `is_repeating`: ranks with few private samples repeat them instead of getting more public samples. Raises
    PlacementError for batch size 0 with private samples, when no rank trains, or when there are no samples.
    """
    if not any(rank.batch_size for rank in ranks):
        raise PlacementError("no rank trains: all batch sizes are 0")
    for rank in ranks:
        if rank.num_private and not rank.batch_size:
            raise PlacementError(f"{rank.name}: batch size must be at least 1, for its private samples")
    if num_public + sum(rank.num_private for rank in ranks) == 0:
        raise PlacementError("there are no samples to train on")
    private = [rank.num_private for rank in ranks]
    if is_repeating:
        most = max(Fraction(rank.num_private, rank.batch_size) for rank in ranks if rank.batch_size)
        private = [int(most * rank.batch_size) if rank.num_private else 0 for rank in ranks]
    shares = public_shares([rank.batch_size for rank in ranks], private, num_public)
    placed, start = [], 0
    for rank, share, num_private in zip(ranks, shares, private, strict=True):
        num_repeated = num_private - rank.num_private
        placed.append(Placed(rank.name, rank.batch_size, num_private, start, start + share, num_repeated))
        start += share
    return placed


def steps_per_epoch(placed: Sequence[Placed]) -> int:
    """Return the number of steps of the epoch: the maximum over the ranks."""
    return max(shard.num_steps for shard in placed)
