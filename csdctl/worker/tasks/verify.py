"""Verification: one step of all ranks against one process, on the user's own model and fleet.

Two questions are answered apart from each other. Is the sum that the ranks apply the sum of what each of them
computed? Each rank also sends its vector to rank 0, which adds them in float64. And has each rank computed
what one process computes from the same samples? Rank 0 does that, with each rank's random states
(reference.py). Layers that compute in 16 bits compute in float32 here: rounding to 16 bits hides a sample.

The samples are random, drawn from (seed, rank) wherever they are needed: no private sample is sent, and rank
0 can repeat the computation of all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from csdctl.worker.compute.custom_step import CustomStep
from csdctl.worker.compute.keras_internals import find_smallest_embedding
from csdctl.worker.compute.split import SplitStep, micro_batch_size
from csdctl.worker.compute.statistics import Snapshot
from csdctl.worker.data.arrays import Array, fields_of
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import PeerFaultError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.datasets import SAMPLE_WEIGHT
from csdctl.worker.protocol.events import STATE, VERIFIED, Verified
from csdctl.worker.protocol.json_codec import MaxLength
from csdctl.worker.protocol.run_spec import RankSpec
from csdctl.worker.tasks.reference import CustomReference, ExactSum, Reference, compute_type, widen
from csdctl.worker.tasks.split import SplitParts
from csdctl.worker.tasks.task import Group, ModelTask

MAX_SAMPLES = 16
"""Largest number of samples of a rank: enough for unequal batches, few enough for rank 0 to compute all."""
MAX_INTEGER = 128
"""Integers are drawn below this and below the size of every embedding, where nothing is known of the data."""
MAX_COLUMNS = 1024
"""Largest number of columns of a table whose columns have ranges of their own."""
Column = tuple[float, float]
Ranges = dict[str, Annotated[tuple[Column, ...], MaxLength(MAX_COLUMNS, 1)]]
"""The smallest and largest value of each column, or of all, by field of the samples ('' without fields)."""


def verified_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Return how many samples each rank takes: none where the plan has none, and not the same number on all.

    With equal numbers, a plain mean of the ranks' means would be right.
    """
    sizes = [min(size, MAX_SAMPLES) for size in batch_sizes]
    takers = [number for number, size in enumerate(sizes) if size]
    if len({sizes[number] for number in takers}) == 1:
        for number in takers[1::2]:
            sizes[number] = max(1, sizes[number] - max(1, sizes[number] // 4))
    return sizes


def find_ranges(samples: Array) -> Ranges:
    """Return the ranges of `samples`: an input may be a class that a layer compares with, or in metres."""
    found: Ranges = {}
    for name, values in fields_of(samples).items():
        is_table = values.ndim == 2 and values.shape[1] <= MAX_COLUMNS
        columns = values.astype(np.float64).reshape(-1, values.shape[1] if is_table else 1)
        columns = columns[np.isfinite(columns).all(axis=1)]
        if columns.size:
            found[name] = tuple(zip(columns.min(axis=0).tolist(), columns.max(axis=0).tolist(), strict=True))
    return found


def draw_samples(
    seed: int,
    rank: int,
    count: int,
    example: tuple[Array, Array],
    model: Any,
    ranges: Ranges | None = None,
) -> tuple[Array, Array]:
    """Return the first `count` random samples of rank `rank`, the same on every machine.

    Each sample has an amplitude of its own, and small labels are frequent: samples that are much alike have
    nearly the same gradient, so that one could be taken for another, and with balanced classes the gradients
    of an untrained model cancel.
    """
    limit = min(MAX_INTEGER, find_smallest_embedding(model) or MAX_INTEGER)
    sizes = [max(2, int(output.shape[-1] or 0)) for output in getattr(model, "outputs", None) or ()]
    samples, labels = (np.empty((count, *array.shape[1:]), array.dtype) for array in example)
    for number in range(count):
        generator = np.random.default_rng([seed, rank, number])
        _draw_sample(generator, samples[number : number + 1], limit, (ranges or {}).get)
        _draw_labels(generator, labels[number : number + 1], sizes)
    return samples, labels


def _draw_sample(
    generator: np.random.Generator, sample: Array, limit: int, find_range: Callable[[str], Any]
) -> None:
    """Fill in `sample`: in the range of the data; of fields without one, in [0, `limit`) or [0, 1).

    A model may have embeddings of different sizes, as of words and of their kinds: each is looked up with its
    own field or column, whose values the model takes.
    """
    for name in sample.dtype.names or [""]:
        values = sample[name or ...]
        drawn = generator.random(values.shape) * (1 - generator.random())
        is_integer, found = values.dtype.kind in "iu", find_range(name)
        if found is None:
            values[...] = drawn * limit if is_integer else drawn
            continue
        low, high = np.array(found).T
        if is_integer:
            if values.ndim > 2:  # one range for columns of different meaning
                high = np.minimum(high, limit - 1) if limit < MAX_INTEGER else high
            drawn = np.floor(drawn * (high - low + 1))
        else:
            drawn *= high - low
        values[...] = low + drawn


def _draw_labels(generator: np.random.Generator, labels: Array, sizes: Sequence[int]) -> None:
    """Fill in `labels`; structured ones have a field for each output, with its size, and one for weights."""
    for number, name in enumerate(labels.dtype.names or [...]):
        values = labels[name]
        if name == SAMPLE_WEIGHT:
            values[...] = 0.5 + generator.random(values.shape)
        elif values.dtype.kind in "iu":
            size = sizes[number] if number < len(sizes) else 2  # of an output that is known only by a call
            values[...] = np.minimum(generator.geometric(0.6, values.shape) - 1, size - 1)
        elif values.ndim == 2 and values.shape[1] > 1:  # one-hot
            values[...] = np.arange(values.shape[1]) == min(generator.geometric(0.6), values.shape[1]) - 1
        else:
            values[...] = generator.random(values.shape)


MAX_UPDATE_DIFFERENCE = 0.01
"""Largest difference of what one step changes that rounding explains; a sum applied twice makes 1."""
NUM_LOOKED_AT = 64
"""Samples of rank 0 that tell the ranges of values."""


class Verify(ModelTask):
    """Takes one step, and compares its gradient with that of one process."""

    is_resumable = False
    _weights_hash = ""
    _dtype = ""
    """The coarsest type that a layer of the user's model computes in."""

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples; of the head of a model, features."""
        samples, labels = super().example(count)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def run(self, group: Group) -> str:
        """Take the step; raises WorkerError when ranks are missing, or hold different weights after it."""
        if missing := [rank.node for rank in self.spec.ranks if rank.rank not in group.ranks]:
            raise WorkerError(
                f"verification needs all ranks of the plan, and {', '.join(missing)} is lost",
                remedy="check it with `csdctl doctor`, or leave it out with --exclude",
            )
        communicator = group.communicator
        self._sizes = verified_sizes([rank.batch_size for rank in self.spec.ranks])
        self._ranges = communicator.allgather(self._find_ranges() if self.is_root else {}, Ranges)[0]
        self._start = Snapshot(self.whole_model.variables)
        verified = self._take_step(communicator)
        self._weights_hash, different = self.share_hash(communicator)
        if different:
            raise self.other_weights("one step", different)
        if verified:
            emit(replace(verified, weights_hash=self._weights_hash))
        return VERIFIED

    def finish(self, reason: str) -> None:
        """Report the completion record."""
        self.reporter.finished(self.progress.position, self._weights_hash, None, reason)

    def load_model(self) -> Any:
        """Return the run's model, whose layers compute in 32 bits at least, unless it is split."""
        model = super().load_model()
        self._dtype = compute_type(model)
        if not self.spec.split:
            widen(model)
        return model

    def _take_step(self, communicator: Communicator) -> Verified | None:
        """Take the step; return what is found on rank 0, without the hash of the weights."""
        if isinstance(self.step, CustomStep):
            return self._take_custom(communicator, self.step)
        own = np.zeros_like(communicator.local)
        own[self.layout.step] = vector = self._compute()
        after = Snapshot(self.step.model.variables)
        total = np.array(communicator.sum(own)[self.layout.step])
        self._start.restore()
        reference = self._make_reference() if self.is_root else None
        exact = ExactSum(total.size)
        for sent in _gather(communicator, vector):
            exact.add(sent)
            if reference:
                reference.compare(sent)
        verified = self._describe(exact, total, reference, communicator.collective) if reference else None
        after.restore()
        self.step.apply(total)
        return verified

    def _take_custom(self, communicator: Communicator, step: CustomStep) -> Verified | None:
        """Take a step of several sums; raises WorkerError if optimizers made something else of them."""
        # Learning rates are part of the state, and were 0 while the step reached full speed.
        step.set_step(0, self.spec.recipe.learning_rate or 0.0)
        start, parts, totals = Snapshot(step.state), list[Array](), list[Array]()

        def exchange(number: int, part: Array) -> Array:
            own = np.zeros_like(communicator.local)
            own[step.layouts[number].step] = part
            parts.append(part.copy())
            totals.append(np.array(communicator.sum(own)[step.layouts[number].step]))
            return totals[-1]

        step.run(*self._draw(self.me.rank, self._sizes[self.me.rank]), exchange)
        after = Snapshot(step.state)
        values = [np.asarray(one.value).astype(np.float64) for one in step.state]
        start.restore()
        reference = self._make_reference(totals) if self.is_root else None
        exact = ExactSum(step.layout.step_size)
        for sent in _gather(communicator, step.join(parts)):
            exact.add(sent)
            if reference:
                reference.compare(sent)
        verified = None
        if reference:
            verified = self._describe(exact, step.join(totals), reference, communicator.collective)
            assert isinstance(reference, CustomReference)
            update = reference.measure_update(values)
            if not update <= MAX_UPDATE_DIFFERENCE:
                raise WorkerError(
                    f"the optimizers changed the weights differently from one process with the same "
                    f"gradients: the change is off by {update:.0e}, expected at most "
                    f"{MAX_UPDATE_DIFFERENCE:.0e}",
                    remedy="please report it, with the model",
                )
        after.restore()
        return verified

    def _find_ranges(self) -> Ranges:
        """Return the ranges of the samples, by those of this rank."""
        return find_ranges(self.reader.first(NUM_LOOKED_AT)[0])

    def _draw(self, rank: int, count: int) -> tuple[Array, Array]:
        """Return the random samples of a rank; of the head of a model, their features."""
        seed, example = self.spec.recipe.seed, self.reader.empty_batch()
        samples, labels = draw_samples(seed, rank, count, example, self.whole_model, self._ranges)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def _compute(self) -> Array:
        """Return this rank's vector."""
        self.step.set_step(0, self.spec.recipe.learning_rate or 0.0)
        return np.array(self.step.local(*self._draw(self.me.rank, self._sizes[self.me.rank])))

    def _describe(self, exact: ExactSum, total: Array, reference: Reference, collective: str) -> Verified:
        """Compare all ranks with one batch of all samples; return the result."""
        reference.compare_one_batch()
        compared_in = compute_type(self.step.model)
        return Verified(
            *(self.me.rank, self.me.node, sum(self._sizes), tuple(self._sizes), self._dtype or compared_in),
            exact.difference(total),
            exact.rounding,
            compared_in,
            tuple(reference.of_ranks),
            reference.by_parts,
            reference.one_batch,
            reference.not_one_batch,
            "",
            collective,
        )

    def _make_reference(self, totals: Sequence[Array] = ()) -> Reference:
        ranks: Sequence[RankSpec] = self.spec.ranks
        if split := self.spec.split:
            sizes = (
                micro_batch_size(size, split.num_micro_batches, rank.micro_batch_size)
                for rank, size in zip(ranks, self._sizes, strict=True)
            )
            ranks = [replace(rank, micro_batch_size=size) for rank, size in zip(ranks, sizes, strict=True)]
        # The vectors of a split step have every rank's own weight; those of the whole model rank 0's.
        arguments = self.step, self.spec.recipe.seed, ranks, self._sizes, self._draw, self.me.weight
        return CustomReference(*arguments, totals=totals) if totals else Reference(*arguments)


def _gather(communicator: Communicator, vector: Array) -> Iterator[Array]:
    """Send `vector` to rank 0, which yields those of all ranks, in their order, its own first."""
    if communicator.rank:
        for rank in range(1, communicator.size):
            if rank == communicator.rank:
                communicator.send(0, vector, STATE)
            else:
                communicator.relay(rank, 0, vector.nbytes, STATE)
        return
    yield vector
    for rank in range(1, communicator.size):
        received = communicator.receive(rank, vector.nbytes, STATE)
        if len(received) != vector.nbytes:
            raise PeerFaultError(rank, f"sent {len(received)} bytes, expected {vector.nbytes}")
        yield np.frombuffer(received, vector.dtype)


class VerifySplit(SplitParts, Verify):
    """Takes one step through the cut, and compares its gradient with that of one process.

    The ranks compute a step one after the other, together with rank 0, so that the gradient of each is known;
    then all at once.
    """

    def _take_step(self, communicator: Communicator) -> Verified | None:
        split = self._split
        reference = self._make_reference() if self.is_root else None
        gradients = slice(split.layout.statistics.stop)
        exact = ExactSum(gradients.stop)
        for number in range(len(self._sizes)):
            counts = [size if rank == number else 0 for rank, size in enumerate(self._sizes)]
            total = self._sum_of(communicator, counts)
            exact.add(total[gradients])
            if reference and isinstance(split, SplitStep):
                reference.compare(split.vector(total).astype(np.float64))
        total = self._sum_of(communicator, self._sizes)
        verified = None
        if reference and isinstance(split, SplitStep):
            reference.sent = split.vector(total).astype(np.float64)
            verified = self._describe(exact, total[gradients], reference, communicator.collective)
        self._start.restore()
        split.apply(total)
        return verified

    def _sum_of(self, communicator: Communicator, counts: list[int]) -> Array:
        """Return the summed vector of a step from the beginning, in which the ranks have `counts` samples."""
        recipe, me, layout = self.spec.recipe, self.me, self.layout
        self._start.restore()
        self._split.set_step(0, recipe.learning_rate or 0.0)
        samples, labels = (part[: counts[me.rank]] for part in self._draw(me.rank, counts[me.rank]))
        vector = np.zeros_like(communicator.local)
        ranks = [rank.rank for rank in self.spec.ranks]
        self.exchange(communicator, (samples, labels), ranks, counts, vector[layout.step])
        return np.array(communicator.sum(vector)[layout.step])
