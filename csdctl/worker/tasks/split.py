"""Training with a model that is cut in two: the nodes compute the prefix, rank 0 the head of all samples.

A rank computes the prefix of its micro-batches one after the other, and sends each output to rank 0. Then it
computes the backward passes in the same order, as the gradients arrive. Rank 0 takes micro-batches of the
ranks in turn. So it computes the head of one while the ranks compute others (docs/decisions/0030).
"""

import math
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array, fields_of
from csdctl.worker.engine.layout import Sums
from csdctl.worker.engine.split import PrefixStep, SplitStep, micro_batch_sizes
from csdctl.worker.engine.step import StepEngine
from csdctl.worker.engine.tensorflow_c import OUT_OF_MEMORY, TensorFlowError, are_finite
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import PeerFaultError, RankLostError, is_minority
from csdctl.worker.process.errors import describe
from csdctl.worker.protocol.events import ACTIVATIONS
from csdctl.worker.tasks.task import ModelTask
from csdctl.worker.tasks.train import StepSums, Train

Bytes = bytearray | bytes
_LOSS_COUNT = struct.Struct("<f")


class Exchange:
    """Passes the micro-batches of one step through the cut, on one rank."""

    def __init__(self, shared: PrefixStep, communicator: Communicator, labels: Array) -> None:
        """`labels`: zero or more of them, for their shape and type."""
        self._shared, self._communicator = shared, communicator
        self._empty_labels = labels[:0]
        self._shape = shared.split.shape
        self.waited_s = 0.0
        """Seconds in which this rank waited for other ranks."""

    def on_node(self, samples: Array, labels: Array, sizes: Sequence[int], out: Array) -> None:
        """Compute this rank's vector into `out`, together with rank 0."""
        shared, communicator = self._shared, self._communicator
        out[:] = 0
        starts = np.cumsum([0, *sizes])
        awaited = [_LOSS_COUNT.size + self._output_bytes(size) for size in sizes]
        for number, (start, size) in enumerate(zip(starts, sizes, strict=False)):
            part = slice(start, start + size)
            outputs = shared.forward(samples[part], number)
            content = outputs.tobytes() + labels[part].tobytes()
            began = time.perf_counter()
            communicator.send(0, content, ACTIVATIONS)
            self.waited_s += time.perf_counter() - began
        for number, size in enumerate(sizes):
            received = self._receive(0, awaited[number])
            (loss_count,) = _LOSS_COUNT.unpack_from(received)
            gradient = np.frombuffer(received, shared.activation_type, offset=_LOSS_COUNT.size)
            shared.backward(gradient.reshape(size, *self._shape), loss_count, out)

    def on_host(
        self,
        samples: Array,
        labels: Array,
        ranks: Sequence[int],
        weights: Sequence[float],
        sizes: Sequence[Sequence[int]],
        out: Array,
    ) -> None:
        """Compute rank 0's vector into `out`. `ranks`, with their `weights` and `sizes`, take part.

        Raises StepVoidError when one of them is lost, or sends what cannot be taken.
        """
        shared = self._shared
        assert isinstance(shared, SplitStep)
        out[:] = 0
        shared.begin()
        starts = np.cumsum([0, *sizes[0]])

        def compute_own(number: int) -> None:
            part = slice(*starts[number : number + 2])
            outputs = shared.forward(samples[part], number)
            shared.backward(*shared.head(outputs, labels[part], weights[0], ranks[0], number), out)

        wrong: set[int] = set()
        for number in range(max(map(len, sizes))):
            if number < len(sizes[0]):
                compute_own(number)
            for rank, parts, weight in zip(ranks[1:], sizes[1:], weights[1:], strict=True):
                if number < len(parts) and not self._add_part(shared, rank, number, parts[number], weight):
                    wrong.add(rank)
        if is_minority(sorted(wrong), len(ranks)):  # of most ranks, the training diverges
            for rank in wrong:
                self._communicator.evict(rank, "sent activations or labels that are not finite")
            self._communicator.give_up_step()
        shared.add_sums_to(out)

    def _add_part(self, shared: SplitStep, rank: int, number: int, size: int, weight: float) -> bool:
        """Add the head of a rank's micro-batch. Return whether the received numbers are finite."""
        try:
            return self._take_part(shared, rank, number, size, weight)
        except PeerFaultError as fault:
            self._communicator.evict(rank, fault.message)
        except RankLostError:
            pass
        self._communicator.give_up_step()
        raise AssertionError("it was given up")

    def _take_part(self, shared: SplitStep, rank: int, number: int, size: int, weight: float) -> bool:
        received = self._receive(rank, self._message_bytes(size))
        empty, num_bytes = self._empty_labels, self._output_bytes(size)
        outputs = np.frombuffer(memoryview(received)[:num_bytes], shared.activation_type)
        labels = np.frombuffer(received, empty.dtype, offset=num_bytes).reshape(size, *empty.shape[1:])
        try:
            shaped = outputs.reshape(size, *self._shape)
            gradient, loss_count = shared.head(shaped, labels, weight, rank, number)
        except TensorFlowError as error:  # such as a class that the model does not have
            if error.code == OUT_OF_MEMORY:
                raise
            raise PeerFaultError(rank, f"sent data that the model cannot take: {describe(error)}") from None
        content = _LOSS_COUNT.pack(loss_count) + gradient.tobytes()
        self._communicator.send(rank, content, ACTIVATIONS)
        return all(map(are_finite, (outputs, *fields_of(labels).values())))

    def _output_bytes(self, size: int) -> int:
        num_bytes: int = size * math.prod(self._shape) * self._shared.activation_type.itemsize
        return num_bytes

    def _message_bytes(self, size: int) -> int:
        empty = self._empty_labels
        return self._output_bytes(size) + size * int(empty.dtype.itemsize) * math.prod(empty.shape[1:])

    def _receive(self, rank: int, num_bytes: int) -> Bytes:
        began = time.perf_counter()
        received = self._communicator.receive(rank, num_bytes, ACTIVATIONS)
        self.waited_s += time.perf_counter() - began
        if len(received) != num_bytes:
            raise PeerFaultError(rank, f"sent {len(received)} bytes of activations, expected {num_bytes}")
        return received


class SplitParts(ModelTask):
    """The base of tasks whose model is cut in two."""

    @property
    def summed(self) -> Any:
        """The engine of the prefix, whose vectors the ranks sum."""
        return self._split

    @property
    def max_message_bytes(self) -> int:
        """As in `Task`: activations and labels of a whole batch, which rank 0 receives in parts."""
        labels = self.example(0)[1]
        num_bytes = math.prod(self._split.split.shape) * self._split.activation_type.itemsize
        num_bytes += int(labels.dtype.itemsize) * math.prod(labels.shape[1:])
        return max(super().max_message_bytes, int(max(self.max_batch_sizes.values()) * num_bytes))

    @property
    def values(self) -> Sequence[Array]:
        """Weights of the prefix and the state of their optimizer."""
        return self._split.values

    @values.setter
    def values(self, values: Sequence[Array]) -> None:
        self._split.values = values

    def sizes_of(self, rank: int, count: int) -> list[int]:
        """Return the sizes of the micro-batches of `count` samples on a rank."""
        assert self.spec.split
        limit = self.spec.ranks[rank].micro_batch_size
        return micro_batch_sizes(count, self.spec.split.num_micro_batches, limit)

    def exchange(
        self,
        communicator: Communicator,
        batch: tuple[Array, Array],
        ranks: Sequence[int],
        counts: Sequence[int],
        out: Array,
    ) -> float:
        """Compute this rank's vector, together with the other ranks. Return the seconds of waiting for them.

        `ranks` and `counts`: the ranks that take part, and their numbers of samples.
        """
        split = self._split
        split.forget()
        exchange = Exchange(split, communicator, batch[1])
        samples, labels = self.step.augment(*batch)
        if not self.is_root:
            exchange.on_node(samples, labels, self.sizes_of(self.me.rank, len(samples)), out)
            return exchange.waited_s
        weights = [self.spec.ranks[rank].weight for rank in ranks]
        sizes = [self.sizes_of(rank, count) for rank, count in zip(ranks, counts, strict=True)]
        exchange.on_host(samples, labels, ranks=ranks, weights=weights, sizes=sizes, out=out)
        return exchange.waited_s

    def _load_step(self) -> StepEngine:
        engine = super()._load_step()
        kind = SplitStep if self.is_root else PrefixStep
        self._split: PrefixStep = kind(engine, weight=self.me.weight)
        return engine

    def _warm_up(self) -> None:
        """Compute a micro-batch, and take an optimizer step that is not kept."""
        split, engine = self._split, self.step
        before = engine.values
        out = np.zeros(split.layout.step_size, np.float32)
        samples, labels = self.example(max(self.sizes_of(self.me.rank, self.me.batch_size), default=0))
        # The head of a micro-batch of the largest size, whatever rank it is from.
        size = max(max(self.sizes_of(rank.rank, rank.batch_size), default=0) for rank in self.spec.ranks)
        of_cut = np.zeros((size, *split.split.shape), split.activation_type)
        of_labels = np.zeros((size, *labels.shape[1:]), labels.dtype)
        engine.set_step(0, 0.0)
        outputs = split.forward(samples) if len(samples) else None
        if isinstance(split, SplitStep):
            split.begin()
            split.head(of_cut, of_labels, 1.0, 0, 0)
        if outputs is not None:
            split.backward(np.zeros_like(outputs), 1.0, out)
        out[[split.layout.divisor, split.layout.count]] = 1
        split.apply(out)
        engine.values = before


class Split(SplitParts, Train):
    """Trains the model in two parts, as the run's `split` says."""

    def _take(
        self, communicator: Communicator, samples: Array, labels: Array, copies: Array | None, sums: StepSums
    ) -> Sums:
        ranks = [share.rank for share in self.progress.segment.shares]
        out = communicator.local[self.layout.step]
        batch = samples, labels
        sums.waited_s += self.exchange(communicator, batch, ranks, self.progress.step_samples, out)
        return self._split.apply(sums(0, out))
