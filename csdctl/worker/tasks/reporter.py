"""What a rank reports of its work, as events, and the sums over steps in them."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from csdctl.worker.compute.step import Sums, add_sums
from csdctl.worker.data.schedule import Segment
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.machine import Thermometer, peak_memory_bytes, resident_bytes
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.events import (
    EpochEnd,
    Finished,
    Joined,
    LinkLost,
    Misbehaved,
    Paused,
    Pong,
    Progress,
    Ready,
    Rebalanced,
    Traffic,
    WaitingFor,
)
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.progress import Position


@dataclass(frozen=True)
class StepResult:
    """One step of this rank."""

    samples: int
    """Of this rank."""
    global_samples: int
    """Of all ranks."""
    compute_s: float
    wait_s: float
    sums: Sums
    """Of all ranks."""
    input_s: float = 0.0
    """Of compute_s: reading samples."""
    others_s: float | None = 0.0
    """Of wait_s: until the slowest rank had computed; None where that is not known."""
    is_stopping: bool = False
    """Whether a stop was requested."""


@dataclass
class StepTotals:
    """The steps of this rank since this object was created; times in seconds."""

    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    input_s: float = 0.0
    others_s: float | None = 0.0
    cpu_started: float = field(default_factory=time.process_time)
    sums: Sums = field(default_factory=lambda: Sums(0.0, (), 0.0))
    """Of all ranks."""
    global_samples: int = 0
    """Of all ranks, whatever their weights."""

    def add(self, step: StepResult) -> None:
        """Add one step."""
        self.steps += 1
        self.samples += step.samples
        self.global_samples += step.global_samples
        self.compute_s += step.compute_s
        self.wait_s += step.wait_s
        self.input_s += step.input_s
        if self.others_s is not None:
            self.others_s = None if step.others_s is None else self.others_s + step.others_s
        self.sums = add_sums([self.sums, step.sums])

    def local_fields(self) -> dict[str, Any]:
        """Return the fields that the events of every rank have."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "compute_s": round(self.compute_s, 6),
            "wait_s": round(self.wait_s, 6),
            "wall_s": round(time.monotonic() - self.started, 6),
            "input_s": round(self.input_s, 6),
            "others_s": None if self.others_s is None else round(self.others_s, 6),
            "cpu_s": round(time.process_time() - self.cpu_started, 6),
        }


def global_fields(sums: Sums, global_samples: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields that rank 0 adds: samples, mean loss and metrics of all ranks."""
    return {
        "global_samples": global_samples,
        "loss": sums.mean_loss,
        "accuracy": metrics.get("accuracy"),
        "metrics": dict(metrics),
    }


class Reporter:
    """Emits the events of rank `me` of `spec`; rank 0 adds what holds for all ranks."""

    def __init__(self, spec: RunSpec, me: RankSpec) -> None:
        self._nodes = [rank.node for rank in spec.ranks]
        self._rank, self._node = me.rank, me.node
        self._thermometer = Thermometer()
        self.metrics: Callable[[Sums], Mapping[str, float]] = lambda sums: {}
        """Returns the metrics of summed states by name; known once the model is loaded."""

    def ready(self, num_samples: int, setup_s: float) -> None:
        """Report that model and data are loaded."""
        emit(Ready(self._rank, self._node, num_samples, round(setup_s, 3)))

    def pong(self, number: int) -> None:
        """Answer a ping; may be called from any thread."""
        emit(Pong(self._rank, self._node, number))

    def joined(
        self,
        generation: int,
        position: Position,
        segment: Segment,
        communicator: Communicator,
        num_lost: int,
    ) -> None:
        """Report that the group's ranks hold the same state."""
        emit(
            Joined(
                self._rank,
                self._node,
                generation,
                position.epoch,
                position.step,
                segment.stop_step,
                position.total_steps,
                {str(share.rank): share.batch_size for share in segment.shares},
                communicator.collective,
                round(communicator.sum_s, 6),
                num_lost,
            )
        )

    def link_lost(self, generation: int, position: Position) -> None:
        """Report that this rank is cut off from its group."""
        emit(LinkLost(self._rank, self._node, generation, position.epoch, position.step))

    def misbehaved(self, culprit: int, message: str) -> None:
        """Report that rank `culprit` of the run has sent what no rank may send."""
        emit(Misbehaved(self._rank, self._node, culprit, message))

    def paused(self, generation: int) -> None:
        """Report that the group was left as ordered."""
        emit(Paused(self._rank, self._node, generation))

    def waiting_for(self, nodes: Sequence[str]) -> None:
        """Report nodes whose part of a sum has not arrived for seconds."""
        emit(WaitingFor(self._rank, self._node, tuple(nodes)))

    def progress(self, position: Position, totals: StepTotals) -> None:
        """Report the steps since the last report."""
        fields = totals.local_fields()
        fields |= {"memory_bytes": resident_bytes(), "temperature_c": self._thermometer.read_c()}
        if self._rank == 0:
            fields |= global_fields(totals.sums, totals.global_samples, self.metrics(totals.sums))
        emit(Progress(self._rank, self._node, epoch=position.epoch, step=position.step, **fields))

    def rebalanced(
        self, position: Position, slowest: int, slowdown: float, batch_sizes: Mapping[int, int]
    ) -> None:
        """Report the batch sizes from the next step on."""
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

    def traffic(self, communicator: Communicator, generation: int, ranks: Sequence[int]) -> None:
        """Report what the ranks of the group have sent to each other; call on all ranks."""
        sent = tuple(
            dataclasses.replace(row, sender=ranks[row.sender], receiver=ranks[row.receiver])
            for row in communicator.traffic()
        )
        if self._rank == 0 and sent:
            emit(Traffic(self._rank, self._node, generation, sent))

    def epoch_end(
        self, epoch: int, weights_hash: str, totals: StepTotals, global_results: Mapping[str, Any]
    ) -> None:
        """Report the end of an epoch; `global_results` are the fields that rank 0 adds."""
        fields = {**totals.local_fields(), **global_results}
        emit(EpochEnd(self._rank, self._node, epoch=epoch, weights_hash=weights_hash, **fields))

    def finished(self, position: Position, weights_hash: str, model_path: str | None, reason: str) -> None:
        """Report the completion record."""
        epochs_done = position.epoch - (0 if position.segment else 1)
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
