"""The progress of a run, the state from which it resumes bit by bit, and the reports of a rank.

`pack` turns the values of variables and `Position` into one array of bytes, for files (checkpointer.py) and
for other ranks. `unpack` checks all of it.
"""

import dataclasses
import hashlib
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.schedule import OwnSamples, Segment, Share, Span, begin_epoch, change_segment
from csdctl.worker.engine.layout import GradientNoise, Sums, add_sums
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.machine import peak_memory_bytes, resident_bytes
from csdctl.worker.process.output import print_line
from csdctl.worker.protocol.events import Event, Finished, Progress, Traffic, event_to_line
from csdctl.worker.protocol.json_codec import SCHEMA, Count, NumSteps, from_json, to_json
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec

_HEAD = struct.Struct("<QQ32s")
"""Bytes of the position's JSON, and of all; SHA-256 of the variables' shapes and types."""
MAX_POSITION_BYTES = 1 << 20
"""Space reserved for a position: dozens of bytes for every rank and every reassigned span."""
_NEW_RUN = "start a new run"


@dataclass(frozen=True)
class EpochTotals:
    """Sums over the steps of the epoch so far and over all ranks."""

    steps: Count = 0
    samples: Count = 0
    loss: float = 0.0
    states: tuple[float, ...] = ()
    """Summed states of the metrics."""
    weight: float = 0.0
    """Divisor of the loss: the number of samples when all weights are 1."""


@dataclass(frozen=True)
class CallbackState:
    """The state of early stopping and of reduce on plateau."""

    best: float | None = None
    best_epoch: Count = 0
    epochs_without_gain: Count = 0
    plateau_best: float | None = None
    epochs_on_plateau: Count = 0
    rate_factor: float = 1.0
    is_stopping: bool = False
    cooldown: Count = 0
    """Epochs that do not count as on a plateau."""


@dataclass(frozen=True)
class Position:
    """The progress of a run, and the division of the rest of the epoch among the ranks."""

    epoch: NumSteps
    """The epoch being trained, from 1."""
    step: Count
    """Steps done in this epoch."""
    total_steps: Count
    """Steps done in the run."""
    segment: Segment | None
    """None between epochs."""
    batch_sizes: dict[str, Count]
    """Batch size of every rank that took part at any time, by its number."""
    totals: EpochTotals = EpochTotals()
    callbacks: CallbackState = CallbackState()
    schema: int = SCHEMA
    run_id: str = ""
    """Of the run that is at this position."""


def pack(values: Sequence[Array], position: Position, out: Array | None = None) -> Array:
    """Return values and position as one array of bytes, uint8. At the start of `out` when given."""
    arrays = [np.asarray(value, order="C") for value in values]
    text = to_json(position).encode()
    size = _HEAD.size + len(text) + sum(array.nbytes for array in arrays)
    packed = np.empty(size, np.uint8) if out is None else out[:size]
    if len(packed) < size:
        raise WorkerError(f"the state has {size} bytes, the buffer only {len(packed)}")
    packed[: _HEAD.size] = np.frombuffer(_HEAD.pack(len(text), size, _hash_form(arrays)), np.uint8)
    place = _HEAD.size + len(text)
    packed[_HEAD.size : place] = np.frombuffer(text, np.uint8)
    for array in arrays:
        packed[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
        place += array.nbytes
    return packed


def max_state_bytes(values: Sequence[Array]) -> int:
    """Return the largest size of what `pack` returns for values of these shapes and types."""
    return _HEAD.size + MAX_POSITION_BYTES + sum(array.nbytes for array in values)


def hash_state(values: Sequence[Array], position: Position) -> str:
    """Return the SHA-256, in hex, of values and position."""
    digest = hashlib.sha256(to_json(position).encode())
    for array in values:
        digest.update(array.tobytes())
    return digest.hexdigest()


def unpack(
    packed: Array, like: Sequence[Array], samples: Sequence[OwnSamples]
) -> tuple[Position, list[Array]]:
    """Return position and values. Raises WorkerError unless the values have the shapes and types of `like`.

    `samples`: of each rank of the run.
    """
    position = position_of(packed, samples)
    length, _, form = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    place = _HEAD.size + length
    expected = place + sum(array.nbytes for array in like)
    if len(packed) != expected or form != _hash_form(like):
        raise WorkerError(
            f"the saved state has {len(packed)} bytes, expected {expected} for this model, "
            "with the shapes and types of its variables",
            remedy="the model or the optimizer has changed since; start a new run",
        )
    values = []
    for array in like:
        values.append(packed[place : place + array.nbytes].copy().view(array.dtype).reshape(array.shape))
        place += array.nbytes
    return position, values


def position_of(packed: Array, samples: Sequence[OwnSamples]) -> Position:
    """Return only the position. Raises WorkerError when it is damaged, or not possible in this run."""
    if len(packed) < _HEAD.size:
        raise WorkerError("the saved state is truncated", remedy=_NEW_RUN)
    length, total, _ = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    if total != len(packed) or length > min(MAX_POSITION_BYTES, total - _HEAD.size):
        raise WorkerError("the saved state is truncated", remedy=_NEW_RUN)
    try:
        position = from_json(Position, packed[_HEAD.size : _HEAD.size + length].tobytes().decode())
        _check(position, samples)
    except ValueError as error:
        raise WorkerError(f"the saved state cannot be read: {error}", remedy=_NEW_RUN) from None
    return position


def _hash_form(arrays: Sequence[Array]) -> bytes:
    return hashlib.sha256(repr([(array.dtype.str, array.shape) for array in arrays]).encode()).digest()


def _check(position: Position, samples: Sequence[OwnSamples]) -> None:
    if position.total_steps < position.step:
        raise ValueError("more steps in the epoch than in the run")
    if set(position.batch_sizes) != {str(rank) for rank in range(len(samples))}:
        raise ValueError("batch sizes of other ranks")
    if position.segment and position.segment.start_step > position.step:
        raise ValueError("a part of the epoch that begins later")
    if position.segment and not all(_is_possible(share, samples) for share in position.segment.shares):
        raise ValueError("samples that the ranks do not have")


def _is_possible(share: Share, samples: Sequence[OwnSamples]) -> bool:
    spans = [*share.reassigned, Span(share.rank, share.public_start, share.public_stop)]
    return (
        all(span.rank < len(samples) for span in spans)
        and all(span.start <= span.stop <= samples[span.rank].num_public for span in spans)
        and share.private_start <= share.private_stop <= samples[share.rank].num_private
    )


class RunProgress:
    """The position of a run. Ranks change it in step, or take it over from rank 0."""

    def __init__(self, spec: RunSpec) -> None:
        """Start at the first step of the first epoch."""
        self.samples = [OwnSamples(rank.num_private, rank.num_public) for rank in spec.ranks]
        """The samples of each rank of the run."""
        self._weights = [rank.weight for rank in spec.ranks]
        sizes = {str(rank.rank): rank.batch_size for rank in spec.ranks}
        self.position = Position(1, 0, 0, None, sizes, run_id=spec.run_id)

    @property
    def segment(self) -> Segment:
        """The current segment of the epoch. Exists while ranks take part."""
        segment = self.position.segment
        assert segment is not None
        return segment

    @property
    def step_samples(self) -> list[int]:
        """Samples of each rank that takes part in the next step."""
        return self.segment.samples_by_rank(self.position.step)

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

    def num_lost(self) -> int:
        """Return the number of samples that no rank has read or will read in this epoch."""
        num_left = sum(share.after(self.step_in_segment).num_samples for share in self.segment.shares)
        num_samples = sum(samples.num_private + samples.num_public for samples in self.samples)
        return num_samples - self.position.totals.samples - num_left

    def regroup(self, ranks: Sequence[int], uncounted: Collection[int] = ()) -> None:
        """Divide the rest of the epoch among `ranks`. The latest step did not count the ranks `uncounted`."""
        position = self.position
        sizes = {rank: position.batch_sizes[str(rank)] for rank in ranks}
        if not any(sizes.values()):
            raise WorkerError("no rank is left that trains: the host has batch size 0", remedy="add a node")
        segment = position.segment
        if segment is None or not position.step:  # before its first step, an epoch is divided anew
            segment = begin_epoch(self.samples, sizes)
        elif uncounted or {share.rank: share.batch_size for share in segment.shares} != sizes:
            segment = change_segment(segment, position.step, sizes, uncounted)
        self.position = dataclasses.replace(position, segment=segment)

    def plan_batch_sizes(self, sizes: Mapping[int, int]) -> None:
        """Set the batch sizes of ranks from the next `regroup` on."""
        changed = {str(rank): size for rank, size in sizes.items()}
        position = self.position
        self.position = dataclasses.replace(position, batch_sizes={**position.batch_sizes, **changed})

    def least_batch_sizes(self) -> dict[int, int]:
        """Return the batch size of each rank with which its private samples do not outlast the epoch."""
        shares = [share.after(self.step_in_segment) for share in self.segment.shares]
        num_left = max(1, sum(share.num_samples for share in shares))
        global_batch = self.segment.global_batch
        return {share.rank: -(-share.num_private * global_batch // num_left) for share in shares}

    def change_batch_sizes(self, sizes: Mapping[int, int]) -> None:
        """Continue the epoch with other batch sizes of the ranks that take part."""
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


@dataclass
class StepTotals:
    """One step of this rank, or the sum over its steps since this object was created. Times in seconds."""

    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    input_s: float = 0.0
    """Part of compute_s in which samples were read."""
    others_s: float | None = 0.0
    """Part of wait_s until the slowest rank had computed; None where that is not known."""
    sums: Sums = field(default_factory=lambda: Sums(0.0, (), 0.0))
    """Sums of all ranks."""
    global_samples: int = 0
    """Samples of all ranks, whatever their weights."""
    noise: GradientNoise = field(default_factory=GradientNoise)
    """The noise of the gradient. Only rank 0 knows it."""
    is_stopping: bool = False
    """Whether a stop was requested in the latest step."""
    started: float = field(default_factory=time.monotonic)
    cpu_started: float = field(default_factory=time.process_time)
    stepped: float = 0.0
    """When the latest step ended, in monotonic seconds."""

    def add(self, step: "StepTotals") -> None:
        """Add one step, which ends now."""
        self.stepped = time.monotonic()
        for name in ("steps", "samples", "compute_s", "wait_s", "input_s", "global_samples", "noise"):
            setattr(self, name, getattr(self, name) + getattr(step, name))
        if self.others_s is not None:
            self.others_s = None if step.others_s is None else self.others_s + step.others_s
        self.sums = add_sums([self.sums, step.sums])

    def local_fields(self) -> dict[str, Any]:
        """Return the fields that the events of every rank have."""
        names = ("steps", "samples", "compute_s", "wait_s", "input_s", "others_s")
        fields = {name: getattr(self, name) for name in names}
        fields["wall_s"] = time.monotonic() - self.started
        fields["cpu_s"] = time.process_time() - self.cpu_started
        return {
            name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()
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
    """Emits the events of rank `me` of a run. Rank 0 adds the results of all ranks."""

    def __init__(self, me: RankSpec, write_line: Callable[[str], None] = print_line) -> None:
        self._me, self._write_line = me, write_line
        self.metrics: Callable[[Sums], Mapping[str, float]] = lambda sums: {}
        """Returns the metrics of summed states by name; known once the model is loaded."""

    def emit(self, kind: type[Event], *values: Any, **fields: Any) -> None:
        """Emit an event of this rank with these further fields. May be called from any thread."""
        self._write_line(event_to_line(kind(self._me.rank, self._me.node, *values, **fields)))

    def progress(
        self, position: Position, totals: StepTotals, *, is_over: bool = False, slow_link: Any = None
    ) -> None:
        """Report the steps since the last report. `is_over`: the time after the last step does not count."""
        fields = totals.local_fields()
        if is_over:
            fields["wall_s"] = round(totals.stepped - totals.started, 6)
        fields["memory_bytes"] = resident_bytes()
        if self._me.rank == 0:
            fields |= global_fields(totals.sums, totals.global_samples, self.metrics(totals.sums))
        self.emit(Progress, epoch=position.epoch, step=position.step, slow_link=slow_link, **fields)

    def traffic(self, communicator: Communicator) -> None:
        """Report, from a rank with a hub, the bytes between it and the ranks behind it."""
        if sent := tuple(communicator.traffic()):
            self.emit(Traffic, sent)

    def finished(self, position: Position, weights_hash: str, model_path: str | None, reason: str) -> None:
        """Report the completion record."""
        self.emit(
            Finished,
            epochs=position.epoch - (0 if position.step else 1),
            steps=position.total_steps,
            weights_hash=weights_hash,
            peak_memory_bytes=peak_memory_bytes(),
            model_path=model_path,
            reason=reason,
        )
