"""Equation 1 of the STANNIS paper: shards proportional to batch sizes, so that all ranks finish together.

    steps per epoch = dataset_k / batchsize_k, the same for every rank k

Private samples stay on their node and are counted first. Public samples fill the rest of the shard. A rank
whose private samples need more steps makes the epoch longer. The last steps of the other ranks are then
empty, which the exact weighted step supports.

Nodes with few private samples get more public samples (top-up), or repeat their own until their ratio of
samples to batch size equals the largest of all nodes (repeat). The paper, section IV, leaves both open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil

from csdctl.worker.protocol.equation1 import public_shares


class PlacementError(ValueError):
    """The samples cannot be placed as requested."""


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


def place_shards(
    batch_sizes: Mapping[str, int],
    num_private: Mapping[str, int],
    num_public: int,
    *,
    is_repeating: bool = False,
) -> list[Placed]:
    """Assign every public sample to exactly one rank, and private samples to their own rank.

    `batch_sizes` by rank in order, 0: the rank does not train. `num_private`: distinct private samples of the
    ranks that have some. `is_repeating`: ranks with few private samples repeat them instead of getting more
    public samples. Raises PlacementError for batch size 0 with private samples, when no rank trains, or when
    there are no samples.
    """
    sizes, distinct = [*batch_sizes.values()], [num_private.get(name, 0) for name in batch_sizes]
    if not any(sizes):
        raise PlacementError("no rank trains: all batch sizes are 0")
    for name, size, count in zip(batch_sizes, sizes, distinct, strict=True):
        if count and not size:
            raise PlacementError(f"{name}: batch size must be at least 1, for its private samples")
    if num_public + sum(distinct) == 0:
        raise PlacementError("there are no samples to train on")
    private = distinct
    if is_repeating:
        longest = max(Fraction(count, size) for count, size in zip(distinct, sizes, strict=True) if size)
        private = [int(longest * size) if count else 0 for count, size in zip(distinct, sizes, strict=True)]
    shares = public_shares(sizes, private, num_public)
    columns = zip(batch_sizes.items(), private, distinct, shares, accumulate(shares), strict=True)
    return [
        Placed(name, size, reads, public_start=stop - share, public_stop=stop, num_repeated=reads - count)
        for (name, size), reads, count, share, stop in columns
    ]


def steps_per_epoch(placed: Sequence[Placed]) -> int:
    """Return the number of steps of the epoch: the maximum over the ranks."""
    return max(shard.num_steps for shard in placed)
