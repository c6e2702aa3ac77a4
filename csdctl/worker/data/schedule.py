"""Who reads which samples of an epoch, step by step, also when batch sizes or members change in the middle.

Every rank has its own samples: private ones, which nobody else may read, and public ones. An epoch is a
row of legs; within a leg batch sizes stay as they are. When they change, what is left of the public
samples is divided anew by equation 1: a rank lends the end of its public part to others. The host, which
has all public samples, reads them for who has them not on disk. No sample is skipped and none is read twice.

Every rank computes the same legs from the same numbers, so nothing has to be said about them. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from csdctl.worker.protocol.equation1 import public_shares


@dataclass(frozen=True)
class Span:
    """Places start…stop of rank `rank`'s public samples, in its order of this epoch."""

    rank: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Share:
    """What one rank has left of the epoch: its own private and public places, and what others lent it."""

    rank: int
    batch_size: int
    private_start: int
    private_stop: int
    public_start: int
    public_stop: int
    borrowed: tuple[Span, ...] = ()

    @property
    def num_private(self) -> int:
        """Private samples left."""
        return self.private_stop - self.private_start

    @property
    def num_public(self) -> int:
        """Own public samples left."""
        return self.public_stop - self.public_start

    @property
    def num_borrowed(self) -> int:
        """Samples that others lent."""
        return sum(map(len, self.borrowed))

    @property
    def num_samples(self) -> int:
        """All samples left."""
        return self.num_private + self.num_public + self.num_borrowed

    @property
    def num_steps(self) -> int:
        """Steps until nothing is left."""
        return ceil(self.num_samples / self.batch_size) if self.batch_size else 0

    def after(self, num_steps: int) -> "Share":
        """What is left after `num_steps` steps."""
        private, public, borrowed = self._taken(min(self.num_samples, num_steps * self.batch_size))
        return Share(
            self.rank,
            self.batch_size,
            self.private_start + private,
            self.private_stop,
            self.public_start + public,
            self.public_stop,
            cut_spans(self.borrowed, borrowed, self.num_borrowed),
        )

    def batch(self, number: int) -> "Share":
        """What step `number` of the leg, from 0, takes."""
        start, stop = (min(self.num_samples, n * self.batch_size) for n in (number, number + 1))
        (private, public, borrowed), (private_stop, public_stop, borrowed_stop) = map(
            self._taken, (start, stop)
        )
        return Share(
            self.rank,
            self.batch_size,
            self.private_start + private,
            self.private_start + private_stop,
            self.public_start + public,
            self.public_start + public_stop,
            cut_spans(self.borrowed, borrowed, borrowed_stop),
        )

    def _taken(self, count: int) -> tuple[int, int, int]:
        """How the first `count` samples divide: every batch has its part of each kind."""
        if not count:
            return 0, 0, 0
        own = self.num_private + self.num_public
        own_taken = count * own // self.num_samples
        private = own_taken * self.num_private // own if own else 0
        return private, own_taken - private, count - own_taken


@dataclass(frozen=True)
class Segment:
    """Steps of one epoch in which batch sizes and members stay the same."""

    start_step: int
    """The epoch's step it begins with, from 0."""
    shares: tuple[Share, ...]

    @property
    def stop_step(self) -> int:
        """The number of steps of the epoch, if it ends with this leg."""
        return self.start_step + max(share.num_steps for share in self.shares)

    @property
    def global_batch(self) -> int:
        """Samples of a full step."""
        return sum(share.batch_size for share in self.shares)

    def num_samples(self, step: int) -> int:
        """Samples of all members in the epoch's step `step`."""
        before = step - self.start_step
        return sum(
            min(share.batch_size, max(0, share.num_samples - before * share.batch_size))
            for share in self.shares
        )

    def batch(self, step: int) -> tuple[Share, ...]:
        """What every member takes in the epoch's step `step`."""
        return tuple(share.batch(step - self.start_step) for share in self.shares)


@dataclass(frozen=True)
class OwnSamples:
    """How many samples a rank has of its own."""

    num_private: int
    num_public: int


def begin_epoch(own: Sequence[OwnSamples], batch_sizes: Mapping[int, int]) -> Segment:
    """The first leg; `own` by rank, also of those that are away, `batch_sizes` of the members.

    The public samples of a rank that is away are lent to the members.
    """
    shares = [
        Share(rank, size, 0, own[rank].num_private, 0, own[rank].num_public)
        for rank, size in sorted(batch_sizes.items())
    ]
    away = [Span(rank, 0, one.num_public) for rank, one in enumerate(own) if rank not in batch_sizes]
    return Segment(0, _divide(shares, away))


def change_segment(leg: Segment, step: int, batch_sizes: Mapping[int, int]) -> Segment:
    """The leg from the epoch's step `step` on, with other batch sizes; who has none is a member no longer.

    Its private samples are read by nobody any more, its public ones by the others.
    """
    left = [share.after(step - leg.start_step) for share in leg.shares]
    staying = [
        Share(
            share.rank,
            batch_sizes[share.rank],
            share.private_start,
            share.private_stop,
            share.public_start,
            share.public_stop,
            share.borrowed,
        )
        for share in left
        if share.rank in batch_sizes
    ]
    away: list[Span] = []
    for share in left:
        if share.rank not in batch_sizes:
            away += [Span(share.rank, share.public_start, share.public_stop), *share.borrowed]
    return Segment(step, _divide(staying, away))


def cut_spans(pieces: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Samples start…stop of a row of pieces."""
    found, place = [], 0
    for piece in pieces:
        first, last = max(0, start - place), min(len(piece), stop - place)
        if first < last:
            found.append(Span(piece.rank, piece.start + first, piece.start + last))
        place += len(piece)
    return tuple(found)


def _divide(shares: Sequence[Share], away: Sequence[Span]) -> tuple[Share, ...]:
    """Divide the public samples of all `shares`, and those in `away`, by equation 1."""
    num_public = sum(share.num_public + share.num_borrowed for share in shares) + sum(map(len, away))
    wanted = public_shares(
        [share.batch_size for share in shares], [share.num_private for share in shares], num_public
    )
    kept, free = [], list(away)
    for share, want in zip(shares, wanted, strict=True):
        # Own samples lie on the rank's own disk: what it borrowed goes first.
        own = min(share.num_public, want)
        borrowed = min(share.num_borrowed, want - own)
        free += cut_spans(share.borrowed, borrowed, share.num_borrowed)
        if own < share.num_public:
            free.append(Span(share.rank, share.public_start + own, share.public_stop))
        kept.append((own, cut_spans(share.borrowed, 0, borrowed)))
    divided, given = [], 0
    for share, want, (own, borrowed_pieces) in zip(shares, wanted, kept, strict=True):
        missing = want - own - sum(map(len, borrowed_pieces))
        divided.append(
            Share(
                share.rank,
                share.batch_size,
                share.private_start,
                share.private_stop,
                share.public_start,
                share.public_start + own,
                (*borrowed_pieces, *cut_spans(free, given, given + missing)),
            )
        )
        given += missing
    return tuple(divided)
