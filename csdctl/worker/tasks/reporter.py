"""What a rank says of its training, as events."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from csdctl.worker.data.schedule import Segment
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.events import emit
from csdctl.worker.process.memory import peak_memory_bytes
from csdctl.worker.protocol.events import (
    EpochEnd,
    Finished,
    Joined,
    LinkLost,
    Paused,
    Pong,
    Progress,
    Ready,
    Rebalanced,
    Traffic,
    WaitingFor,
)
from csdctl.worker.protocol.orders import FormGroup
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.state import Position
from csdctl.worker.tasks.totals import StepTotals, overall


class Reporter:
    """Speaks for rank `me` of `spec`; what holds for all ranks is rank 0's to say."""

    def __init__(self, spec: RunSpec, me: RankSpec) -> None:
        self._nodes = [rank.node for rank in spec.ranks]
        self._rank, self._node = me.rank, me.node
        self.metric_names: tuple[str, ...] = ()
        """Of the sums that all ranks add up; known once the model is loaded."""

    def ready(self, num_samples: int, setup_s: float) -> None:
        """Model and data are there."""
        emit(Ready(self._rank, self._node, num_samples, round(setup_s, 3)))

    def alive(self, number: int) -> None:
        """The answer to a question; from any thread."""
        emit(Pong(self._rank, self._node, number))

    def joined(
        self, group: FormGroup, position: Position, leg: Segment, ranks: Communicator, num_lost: int
    ) -> None:
        """The group's ranks hold the same state."""
        emit(
            Joined(
                self._rank,
                self._node,
                group.generation,
                position.epoch,
                position.step,
                leg.stop_step,
                position.total_steps,
                {str(share.rank): share.batch_size for share in leg.shares},
                ranks.collective,
                round(ranks.sum_s, 6),
                num_lost,
            )
        )

    def link_lost(self, group: FormGroup, position: Position) -> None:
        """The way to the others is gone."""
        emit(LinkLost(self._rank, self._node, group.generation, position.epoch, position.step))

    def paused(self, group: FormGroup) -> None:
        """The group was left as ordered."""
        emit(Paused(self._rank, self._node, group.generation))

    def waiting_for(self, nodes: Sequence[str]) -> None:
        """Others have not sent their part for some seconds."""
        emit(WaitingFor(self._rank, self._node, tuple(nodes)))

    def progress(self, position: Position, tally: StepTotals) -> None:
        """What was done since the last time."""
        more = overall(tally.sums, tally.global_samples, self.metric_names) if self._rank == 0 else {}
        emit(
            Progress(
                rank=self._rank,
                node=self._node,
                epoch=position.epoch,
                step=position.step,
                **tally.local(),
                **more,
            )
        )

    def rebalanced(
        self, position: Position, slowest: int, slowdown: float, batch_sizes: Mapping[int, int]
    ) -> None:
        """Batch sizes from the next step on."""
        sizes = {str(rank): size for rank, size in batch_sizes.items()}
        emit(
            Rebalanced(
                self._rank,
                self._node,
                position.epoch,
                position.step,
                self._nodes[slowest],
                round(slowdown, 3),
                sizes,
            )
        )

    def traffic(self, ranks: Communicator, group: FormGroup) -> None:
        """What all have sent since they met; asked by all together."""
        sent = tuple(
            dataclasses.replace(one, sender=group.ranks[one.sender], receiver=group.ranks[one.receiver])
            for one in ranks.traffic()
        )
        if self._rank == 0 and sent:
            emit(Traffic(self._rank, self._node, group.generation, sent))

    def epoch_end(self, epoch: int, weights_hash: str, tally: StepTotals, more: Mapping[str, Any]) -> None:
        """An epoch is done; `more` are the fields that rank 0 adds."""
        emit(
            EpochEnd(
                rank=self._rank,
                node=self._node,
                epoch=epoch,
                weights_hash=weights_hash,
                **tally.local(),
                **more,
            )
        )

    def finished(self, position: Position, weights_hash: str, model_path: str | None, reason: str) -> None:
        """The completion record."""
        epochs_done = position.epoch - (0 if position.leg else 1)
        emit(
            Finished(
                self._rank,
                self._node,
                epochs_done,
                position.total_steps,
                weights_hash,
                peak_memory_bytes(),
                model_path,
                reason,
            )
        )
