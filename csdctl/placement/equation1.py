"""Equation 1 of the STANNIS paper: shards in proportion to batch sizes, so that all ranks end together.

    steps per epoch = dataset_k / batchsize_k, the same for every rank k

Private samples stay on their node and count first; public samples fill the shard up. A rank whose
private samples alone need more steps makes the epoch longer for itself; the others then have empty
last steps, which the exact weighted step allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from csdctl.worker.shares import public_shares


class PlacementError(ValueError):
    """The samples cannot be placed as asked."""


@dataclass(frozen=True)
class RankLoad:
    """What placement has to know of one rank."""

    name: str
    batch_size: int
    num_private: int = 0


@dataclass(frozen=True)
class Placed:
    """The shard of one rank: its own private samples and public[public_start:public_stop]."""

    name: str
    batch_size: int
    num_private: int
    public_start: int
    public_stop: int

    @property
    def num_public(self) -> int:
        """Public samples of this rank."""
        return self.public_stop - self.public_start

    @property
    def num_samples(self) -> int:
        """All samples of this rank in one epoch."""
        return self.num_private + self.num_public

    @property
    def num_steps(self) -> int:
        """Steps until this rank has read its shard."""
        return ceil(self.num_samples / self.batch_size)


def place_shards(ranks: Sequence[RankLoad], num_public: int) -> list[Placed]:
    """Every public sample on exactly one rank, every private one on its own, in order of `ranks`.

    Raises PlacementError for a batch size below 1, without ranks, or when there is no sample at all.
    """
    if not ranks:
        raise PlacementError("there is no rank to place samples on")
    for rank in ranks:
        if rank.batch_size < 1:
            raise PlacementError(f"{rank.name}: batch size must be at least 1, received {rank.batch_size}")
        if rank.num_private < 0 or num_public < 0:
            raise PlacementError(f"{rank.name}: a number of samples cannot be negative")
    if num_public + sum(rank.num_private for rank in ranks) == 0:
        raise PlacementError("there is no sample to train on")
    wanted = public_shares(
        [rank.batch_size for rank in ranks], [rank.num_private for rank in ranks], num_public
    )
    placed, start = [], 0
    for rank, share in zip(ranks, wanted, strict=True):
        placed.append(Placed(rank.name, rank.batch_size, rank.num_private, start, start + share))
        start += share
    return placed


def steps_per_epoch(placed: Sequence[Placed]) -> int:
    """Steps of the whole epoch: those of the rank that needs most."""
    return max(shard.num_steps for shard in placed)
