"""The progress of a run, and which rank computes what of the rest; the same on every rank."""

import dataclasses
from collections.abc import Mapping, Sequence

from csdctl.worker.compute.step import Sums, add_sums
from csdctl.worker.data.schedule import OwnSamples, Segment, Share, begin_epoch, change_segment
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.tasks.position import CallbackState, EpochTotals, Position


class RunProgress:
    """The position of a run. Ranks change it in step, or take it over from rank 0."""

    def __init__(self, spec: RunSpec) -> None:
        """Start at the first step of the first epoch."""
        self.own = [OwnSamples(rank.num_private, rank.num_public) for rank in spec.ranks]
        """The samples of each rank of the run."""
        self._weights = [rank.weight for rank in spec.ranks]
        sizes = {str(rank.rank): rank.batch_size for rank in spec.ranks}
        self.position = Position(1, 0, 0, None, sizes)

    @property
    def segment(self) -> Segment:
        """The current segment of the epoch; exists while a group exists."""
        segment = self.position.segment
        assert segment is not None
        return segment

    @property
    def step_samples(self) -> list[int]:
        """Samples of each rank of the group in the next step."""
        return self.segment.samples_by_rank(self.position.step)

    @property
    def global_samples(self) -> int:
        """Samples of all ranks in the next step."""
        return sum(self.step_samples)

    def weigh(self, samples: Sequence[int]) -> list[float]:
        """Return the sum of the weights of each rank's samples, given their numbers."""
        shares = self.segment.shares
        return [count * self._weights[share.rank] for count, share in zip(samples, shares, strict=True)]

    @property
    def step_in_segment(self) -> int:
        """The number of the next step within the segment, from 0."""
        return self.position.step - self.segment.start_step

    @property
    def epochs_done(self) -> float:
        """Epochs done in the middle of the next step, such as 1.25."""
        position = self.position
        return position.epoch - 1 + (position.step + 0.5) / self.segment.stop_step

    def share_of(self, rank: int) -> Share:
        """Return what `rank` reads in the next step."""
        share = next(share for share in self.segment.shares if share.rank == rank)
        return share.batch(self.step_in_segment)

    def num_lost(self, ranks: Sequence[int]) -> int:
        """Return the number of private samples of ranks outside the group `ranks`."""
        return sum(own.num_private for rank, own in enumerate(self.own) if rank not in ranks)

    def regroup(self, ranks: Sequence[int]) -> None:
        """Divide the rest of the epoch among the ranks of the group."""
        position = self.position
        sizes = {rank: position.batch_sizes[str(rank)] for rank in ranks}
        segment = position.segment
        if segment is None:
            segment = begin_epoch(self.own, sizes)
        elif {share.rank for share in segment.shares} != set(ranks):
            segment = change_segment(segment, position.step, sizes)
        self.position = dataclasses.replace(position, segment=segment)

    def change_batch_sizes(self, sizes: Mapping[int, int]) -> None:
        """Continue the epoch with other batch sizes of the group's ranks."""
        position = self.position
        self.position = dataclasses.replace(
            position,
            segment=change_segment(self.segment, position.step, sizes),
            batch_sizes={**position.batch_sizes, **{str(rank): size for rank, size in sizes.items()}},
        )

    def end_step(self, sums: Sums, global_samples: int) -> None:
        """Count one step with the `sums` of all ranks."""
        position, totals = self.position, self.position.totals
        added = add_sums([Sums(totals.loss, totals.states, totals.weight), sums])
        num_samples = totals.samples + global_samples
        self.position = dataclasses.replace(
            position,
            step=position.step + 1,
            total_steps=position.total_steps + 1,
            totals=EpochTotals(totals.steps + 1, num_samples, added.loss, added.states, added.count),
        )

    def end_epoch(self, callbacks: CallbackState) -> None:
        """Continue with the next epoch."""
        self.position = dataclasses.replace(
            self.position,
            epoch=self.position.epoch + 1,
            step=0,
            segment=None,
            totals=EpochTotals(),
            callbacks=callbacks,
        )
