"""Which rank reads which samples of an epoch, step by step, even when batch sizes or members change midway.

An epoch is a sequence of segments with constant batch sizes. When they change, equation 1 divides the public
samples that are left: the end of a rank's part is reassigned to others, and the host reads it for them. No
sample is skipped, none is read twice. All ranks compute the same segments without communication. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from csdctl.worker.protocol.equation1 import public_shares
from csdctl.worker.protocol.json_codec import Count, RankNumber


@dataclass(frozen=True)
class Span:
    """Positions start…stop of the public samples of rank `rank`, in its order of this epoch."""

    rank: RankNumber
    start: Count
    stop: Count

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Share:
    """Samples that one rank has left in the epoch: its own, private and public, and reassigned ones."""

    rank: RankNumber
    batch_size: Count
    private_start: Count
    private_stop: Count
    public_start: Count
    public_stop: Count
    reassigned: tuple[Span, ...] = ()
    """Public samples of other ranks that this rank reads in their place."""

    @property
    def num_private(self) -> int:
        """Private samples left."""
        return self.private_stop - self.private_start

    @property
    def num_public(self) -> int:
        """Own public samples left."""
        return self.public_stop - self.public_start

    @property
    def num_reassigned(self) -> int:
        """Samples left that were reassigned from other ranks."""
        return sum(map(len, self.reassigned))

    @property
    def num_samples(self) -> int:
        """All samples left."""
        return self.num_private + self.num_public + self.num_reassigned

    @property
    def num_steps(self) -> int:
        """Steps until no samples are left."""
        return ceil(self.num_samples / self.batch_size) if self.batch_size else 0

    def after(self, num_steps: int) -> "Share":
        """Return what is left after `num_steps` steps."""
        return self._between(num_steps * self.batch_size, self.num_samples)

    def batch(self, number: int) -> "Share":
        """Return the samples of step `number` of the segment, counted from 0."""
        return self._between(number * self.batch_size, (number + 1) * self.batch_size)

    def _between(self, start: int, stop: int) -> "Share":
        first, last = (self._split(min(self.num_samples, count)) for count in (start, stop))
        return replace(
            self,
            private_start=self.private_start + first[0],
            private_stop=self.private_start + last[0],
            public_start=self.public_start + first[1],
            public_stop=self.public_start + last[1],
            reassigned=slice_spans(self.reassigned, first[2], last[2]),
        )

    def _split(self, count: int) -> tuple[int, int, int]:
        """Return how many of the first `count` samples are private, public and reassigned, in proportion."""
        if not count:
            return 0, 0, 0
        num_owned = self.num_private + self.num_public
        num_own = count * num_owned // self.num_samples
        num_private = num_own * self.num_private // num_owned if num_owned else 0
        return num_private, num_own - num_private, count - num_own


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of an epoch during which batch sizes and members are constant."""

    start_step: Count
    shares: tuple[Share, ...]
    unread: tuple[Span, ...] = ()
    """Private samples of ranks that are absent, by their own numbers: read when the rank comes back."""

    @property
    def stop_step(self) -> int:
        """Number of steps in the epoch if it ends with this segment."""
        return self.start_step + max(share.num_steps for share in self.shares)

    @property
    def global_batch(self) -> int:
        """Samples in a full step, over all members."""
        return sum(share.batch_size for share in self.shares)

    def samples_by_rank(self, step: int) -> list[int]:
        """Return the number of samples of every member in step `step` of the epoch."""
        num_before = step - self.start_step
        return [
            min(share.batch_size, max(0, share.num_samples - num_before * share.batch_size))
            for share in self.shares
        ]


@dataclass(frozen=True)
class OwnSamples:
    """Number of samples that are assigned to a rank at the start of an epoch."""

    num_private: int
    num_public: int


def begin_epoch(samples: Sequence[OwnSamples], batch_sizes: Mapping[int, int]) -> Segment:
    """Return the first segment. Members have `batch_sizes`. They read the public samples of absent ranks."""
    shares = [
        Share(rank, size, *(0, samples[rank].num_private), *(0, samples[rank].num_public))
        for rank, size in sorted(batch_sizes.items())
    ]
    absent = [rank for rank in range(len(samples)) if rank not in batch_sizes]
    public = [Span(rank, 0, samples[rank].num_public) for rank in absent]
    unread = tuple(Span(rank, 0, samples[rank].num_private) for rank in absent)
    return Segment(0, _divide(shares, public), unread)


def change_segment(
    segment: Segment, step: int, batch_sizes: Mapping[int, int], uncounted: Collection[int] = ()
) -> Segment:
    """Return the segment from step `step` of the epoch on. A rank without a batch size has left.

    The other members read the public samples of a rank that left. One that comes back reads the private
    samples that it had left. The latest step did not count what the ranks `uncounted` have read in it.
    """
    num_steps = step - segment.start_step
    private = {span.rank: (span.start, span.stop) for span in segment.unread}
    shares = {rank: Share(rank, size, *private.get(rank, (0, 0)), 0, 0) for rank, size in batch_sizes.items()}
    public: list[Span] = []
    unread = [span for span in segment.unread if span.rank not in batch_sizes]
    for earlier in segment.shares:
        share = earlier.after(num_steps - (earlier.rank in uncounted))
        if share.rank in batch_sizes:
            shares[share.rank] = replace(share, batch_size=batch_sizes[share.rank])
        else:
            public += [Span(share.rank, share.public_start, share.public_stop), *share.reassigned]
            unread.append(Span(share.rank, share.private_start, share.private_stop))
    members = [share for _, share in sorted(shares.items())]
    return Segment(step, _divide(members, public), tuple(unread))


def slice_spans(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Return samples start…stop of consecutive spans."""
    sliced, offset = [], 0
    for span in spans:
        first, last = max(0, start - offset), min(len(span), stop - offset)
        if first < last:
            sliced.append(Span(span.rank, span.start + first, span.start + last))
        offset += len(span)
    return tuple(sliced)


def _divide(shares: Sequence[Share], absent: Sequence[Span]) -> tuple[Share, ...]:
    num_public = sum(share.num_public + share.num_reassigned for share in shares) + sum(map(len, absent))
    sizes, num_private = zip(*((share.batch_size, share.num_private) for share in shares), strict=True)
    targets = public_shares(sizes, num_private, num_public)
    kept, free = [], list(absent)
    for share, target in zip(shares, targets, strict=True):
        # Own samples are on the rank's own disk: it returns reassigned samples first.
        num_own = min(share.num_public, target)
        num_reassigned = min(share.num_reassigned, target - num_own)
        free += slice_spans(share.reassigned, num_reassigned, share.num_reassigned)
        if num_own < share.num_public:
            free.append(Span(share.rank, share.public_start + num_own, share.public_stop))
        spans = slice_spans(share.reassigned, 0, num_reassigned)
        kept.append(replace(share, public_stop=share.public_start + num_own, reassigned=spans))
    divided, num_given = [], 0
    for share, target in zip(kept, targets, strict=True):
        missing = target - share.num_public - share.num_reassigned
        spans = (*share.reassigned, *slice_spans(free, num_given, num_given + missing))
        divided.append(replace(share, reassigned=spans))
        num_given += missing
    return tuple(divided)
