"""Verification: one step of all ranks against Keras, on the user's own model and fleet.

Three questions are answered apart from each other. Is the sum that the ranks apply the sum of what each of
them computed? Each rank also sends its vector to rank 0, which adds them in float64. Has each rank computed
what Keras computes from the same samples? Rank 0 takes the steps of some ranks by the model's own train_step,
eagerly, without any graph of csdctl's, with the rank's random states (`Reference`). It takes those of the
others by the compiled step, which has computed what Keras computes. And is the state behind
the step the one that Keras' optimizer makes of the sum? Layers that compute in 16 bits compute in float32
here: rounding to 16 bits hides a sample. All weights are moved before: a compiled step that does not read
them would be right at the initial ones.

The samples are random, drawn from (seed, rank) wherever they are needed: no private sample is sent, and rank
0 can repeat the computation of all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from csdctl.worker.data.arrays import Array, fields_of
from csdctl.worker.engine.split import SplitStep, micro_batch_size
from csdctl.worker.engine.step import BFLOAT16, ROUNDOFFS, StepEngine, StepInfo
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import LinkLostError, PeerFaultError, RankLostError, StepVoidError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.datasets import SAMPLE_WEIGHT, list_names
from csdctl.worker.protocol.events import STATE, VERIFIED, Compared, Joined, Verified
from csdctl.worker.protocol.json_codec import MaxLength
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.split import SplitParts
from csdctl.worker.tasks.task import ModelTask

if TYPE_CHECKING:
    from csdctl.worker.compute.keras_step import KerasStep

NUM_DRAWS = 3
"""Number of random roundings of the weights, for ranks whose step Keras takes; the spread is their largest
effect."""
NEAR = 8.0
"""Distance from one batch of all samples, in spreads, that needs no explanation."""
LOSS_ROUNDING = 1e-5
"""Relative difference of the loss of one batch and of its parts that rounding in float32 explains."""
COUPLED = "a layer or loss that compares samples of a batch: the loss of its parts is off by {:.0e}"
UPDATE_ROUNDINGS = 8
"""Roundings of a variable's own type between two computations of its new value."""
SMALLEST = 2.0**-126
"""The smallest float32 that every processor adds; some take smaller ones for 0."""


MAX_SAMPLES = 16
MAX_INTEGER = 128
MAX_COLUMNS = 1024
MAX_DIFFERENCES = 0.01, 1e-3
MOVED = 1 / 16


class ExactSum:
    """Adds the ranks' vectors in float64, to judge their sum in float32."""

    def __init__(self, size: int, spec: RunSpec | None = None) -> None:
        """`spec`: its compression also rounds. None: nothing else than float32 does."""
        self._sum, self._magnitudes, self._count = np.zeros(size), np.zeros(size), 0
        self._num_roundings = 0
        if spec and spec.recipe.compression == BF16:  # servers send the sums of their own nodes to each other
            self._num_roundings = 3 if len({rank.server for rank in spec.ranks}) > 1 else 2

    def add(self, vector: Array) -> None:
        """Add one rank's vector, shape (size,)."""
        self._sum += vector
        self._magnitudes += np.abs(vector)
        self._count += 1

    @property
    def rounding(self) -> float:
        """The largest `difference` of a sum in float32, in whatever order (Higham 1993).

        With bfloat16 on the wire, vectors are rounded before each level of the sum, and the total once more.
        """
        of_wire = (1 + ROUNDOFFS["bfloat16"]) ** self._num_roundings - 1
        return of_wire + self._count * ROUNDOFFS["float32"]

    def difference(self, total: Array) -> float:
        """Return how far `total` is off: of all elements the most, relative to Σ |term|.

        NaN if an element is not finite.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong = np.maximum(np.abs(total - self._sum) - self._count * SMALLEST, 0)
            return float(np.where(wrong == 0, 0, wrong / self._magnitudes).max(initial=0))


class Reference:
    """Computes the vectors of all `ranks`, of some by Keras, with each rank's samples and random states.

    Every comparison comes with two measures of what it is worth, both from this model and these samples:

    - the spread: how far rank 0's own vector moves when each weight moves by the rounding of the type that
      its layer computes in. Kernels of other processors and other numbers of threads round as differently.
    - one sample: how far the vector moves when one sample of the batch is another one. A difference of this
      size is a sample that was lost or counted twice, and must be far outside of the spread to be visible.
    """

    def __init__(
        self,
        step: "KerasStep",
        seed: int,
        ranks: Sequence[RankSpec],
        sizes: Sequence[int],
        draw: Callable[[int, int], tuple[Array, Array]],
        weight: float = 1.0,
        totals: Sequence[Array] = (),
    ) -> None:
        """`sizes`: the batch size of each of the ranks. `weight`: of each sample in the engine's vectors.

        `draw` returns the samples of a rank, given their number. `totals`: of an own train_step, the sums of
        the step over all ranks. The engine's state is that before the step.
        """
        self._draw, self._totals = draw, totals
        self._step, self._engine, self._seed = step, step.engine, seed
        self._ranks, self._sizes, self._weight = ranks, sizes, weight
        takers = [number for number, size in enumerate(sizes) if size]
        kinds = {(ranks[number].weight, ranks[number].micro_batch_size): number for number in takers}
        self._by_keras_too = {*takers[:1], *kinds.values()}
        """The ranks whose steps Keras takes: the first, and the last of each kind of step."""
        self._start = self._engine.values
        info = self._engine.info
        types = {one.dtype for one in info.variables[: info.num_weights]} & set(ROUNDOFFS)
        self._roundoff = max(ROUNDOFFS[dtype] for dtype in {"float32", *types})
        """Rounding of gradients, which have the type of their weights and are summed in float32."""
        self.sent = np.zeros(self._engine.layout.step_size)
        """The sum of what the ranks have sent so far."""
        self._sent, self._own = np.zeros(step.layout.step_size), np.zeros(step.layout.step_size)
        """The same as Keras has it, and the sum of what this process has computed."""
        self.of_ranks: list[Compared] = []
        """The comparisons so far."""
        self.one_batch: Compared | None = None
        """Comparison with one batch of all samples; None where such a batch has another gradient."""
        self.not_one_batch: tuple[str, ...] = ()
        """Why it has."""

    @property
    def by_parts(self) -> float:
        """Relative difference of all ranks' gradient from that of their batches in turn."""
        return _relative(self._sent - self._own, self._own, self._step.layout.gradients)

    def samples(self, number: int) -> tuple[Array, Array]:
        """Return the samples of the rank with this number among the ranks, and one more."""
        rank, count = self._ranks[number].rank, self._sizes[number] + 1
        return self._draw(rank, count)

    def compare(self, sent: Array) -> None:
        """Compare the vector `sent` of the next rank with that of this process."""
        number = len(self.of_ranks)
        own, spread, one_sample = self.measure(number)
        as_keras = self._step.as_keras(sent)
        self.of_ranks.append(Compared(self._relative(as_keras - own, own), spread, one_sample))
        self._own += own
        self._sent += as_keras
        self.sent += sent

    def measure(self, number: int) -> tuple[Array, float, float]:
        """Return the vector of a rank, float64, its spread, and what one sample makes of it."""
        columns, n = self.samples(number), self._sizes[number]
        if n == 0:
            return np.zeros(self._step.layout.step_size), self._roundoff, 1.0
        batch = columns[0][:-1], columns[1][:-1]
        whole = self._by_engine(number, *batch)
        is_by_keras = number in self._by_keras_too
        own = self._by_keras(number, *batch) if is_by_keras else whole
        draws = range(NUM_DRAWS if is_by_keras else 1)
        moves = [self._by_engine(number, *batch, draw=draw) - whole for draw in draws]
        others = [np.concatenate([column[-1:], column[1:-1]]) for column in columns]
        one_sample = self._relative(self._by_engine(number, others[0], others[1]) - whole, whole)
        # Where all weights are 0, moving them changes nothing; the terms of the sum are rounded all the same.
        floor = self._roundoff * (1 + n * one_sample)
        return own, max(floor, *(self._relative(move, whole) for move in moves)), one_sample

    def compare_one_batch(self) -> None:
        """Compare what all ranks have sent with one batch of all their samples. After `compare` of each."""
        self.not_one_batch = self._find_reasons()
        if self.not_one_batch:
            return
        own, sent = self.measure_one_batch(), self._step.as_keras(self.sent)
        shares = [
            one.one_sample * n / sum(self._sizes)
            for one, n in zip(self.of_ranks, self._sizes, strict=True)
            if n
        ]
        difference = _relative(sent - own, own, self._step.layout.gradients)
        compared = Compared(difference, max(one.spread for one in self.of_ranks), min(shares))
        is_apart = not compared.difference <= NEAR * compared.spread
        if is_apart and (reason := self._find_coupling(own)):
            self.not_one_batch = (reason,)
        else:
            self.one_batch = compared

    def measure_one_batch(self) -> Array:
        """Return the vector of one batch of all ranks' samples, float64."""
        columns = zip(*(self.samples(number) for number in range(len(self._ranks))), strict=True)
        samples, labels = (np.concatenate([part[:-1] for part in column]) for column in columns)
        return self._by_keras(0, samples, labels)

    def measure_update(self, after: Sequence[Array], total: Array) -> float:
        """Return how far the state `after` the step is off that of Keras, relative to what the step changes.

        `total`: the summed vector. Of an own train_step, Keras takes the whole step of rank 0's batch, and
        what its optimizers train and keep is compared. Infinite if an optimizer did not step as often.
        """
        info, sizes = self._engine.info, self._sizes
        if info.sums:
            first = next(number for number, size in enumerate(sizes) if size)
            self._by_keras(first, *(column[:-1] for column in self.samples(first)))
            own, groups = self._step.values, info.updated
        else:
            own = self._step.apply(self._start, total)
            groups = tuple((place,) for place in range(len(own)))
        rows = [
            (_wide(start), _wide(mine), _wide(its), ROUNDOFFS.get(one.dtype, 0.0))
            for one, start, mine, its in zip(info.variables, self._start, own, after, strict=True)
        ]
        return max(_change_apart([rows[place] for place in group]) for group in groups)

    def measure_evaluation(self) -> float:
        """Return the relative difference of rank 0's loss in evaluation. 0 of an own train_step."""
        samples, labels = (column[:-1] for column in self.samples(0))
        if self._engine.info.sums or not len(samples):
            return 0.0
        own = self._step.evaluate(self._start, samples, labels)
        return abs(self._engine.evaluate(samples, labels).mean_loss - own) / max(abs(own), SMALLEST)

    def _find_coupling(self, own: Array) -> str:
        """Return how the samples of a batch depend on each other, by Keras' losses. '' if not.

        Of a loss that is not divided by samples nothing is known: csdctl itself counts what it is divided by.
        """
        info = self._engine.info
        if info.sums:
            return self._find_unequal_sums(own)
        if info.divides_gradients:
            return ""
        ranks = [number for number, size in enumerate(self._sizes) if size]
        batches = [[part[:-1] for part in self.samples(number)] for number in ranks]
        whole = [np.concatenate(column) for column in zip(*batches, strict=True)]
        (mean, summed), *parts = self._step.losses(self._start, [whole, *batches])
        shares = [self._sizes[number] / sum(self._sizes) for number in ranks]
        together = sum(part[0] * share + part[1] for part, share in zip(parts, shares, strict=True))
        apart = abs(together - mean - summed) / max(abs(mean + summed), SMALLEST)
        return COUPLED.format(apart) if apart > LOSS_ROUNDING else ""

    def _find_unequal_sums(self, own: Array) -> str:
        """Return which sums of an own train_step differ from those of one batch, and by how much."""
        wrong, position = [], 0
        spread = max(one.spread for one in self.of_ranks)
        for number, part in enumerate(self._engine.info.sums[:-1], start=1):
            at = slice(position, position := position + part.num_gradients)
            apart = _relative(self.sent - own, own, at)
            if apart > NEAR * spread:
                wrong.append(f"{number}, {part.name}, by {apart:.0e}")
        if not wrong:
            return ""
        why = "a loss that is not a mean over the samples of the batch, or compares them"
        return f"{why}: the gradient of one batch of all samples differs in sum {'; '.join(wrong)}"

    def _find_reasons(self) -> tuple[str, ...]:
        """Return why the gradient depends on how samples are divided into batches."""
        engine = self._engine
        normalizing = engine.find_normalizing(self._own[self._step.layout.statistics])
        named = {"random numbers": engine.info.drawing, "normalization by the batch": normalizing}
        reasons = [
            f"{what} in {list_names(list(dict.fromkeys(names)), 3)}" for what, names in named.items() if names
        ]
        if augmentation := engine.augmentation:
            reasons.append(f"augmentation by {augmentation.name}")
        if len({rank.weight for rank in self._ranks}) > 1:
            reasons.append("samples of different weight on different ranks")
        return tuple(reason[:400] for reason in reasons)

    def _relative(self, change: Array, whole: Array) -> float:
        layout = self._step.layout
        parts = [layout.gradients, layout.statistics, slice(layout.count, layout.count + 1)]
        if not self._engine.info.sums:  # the loss
            parts.append(slice(layout.sums.start, layout.sums.start + 1))
        return _relative(change, whole, *parts)

    def _by_keras(self, number: int, samples: Array, labels: Array) -> Array:
        """Return the vector of a rank, float64."""
        self._begin(number)
        return self._step.vector(self._start, samples, labels, self._totals) * self._ranks[number].weight

    def _by_engine(self, number: int, samples: Array, labels: Array, draw: int | None = None) -> Array:
        """Return the vector of a rank, float64. With `draw`, of weights that moved by their rounding."""
        engine, rank = self._engine, self._begin(number)
        if draw is not None:
            roundoff = ROUNDOFFS[engine.info.compute_type]
            generator = np.random.default_rng([self._seed, rank.rank, draw])
            engine.values = move_weights(engine, self._start, generator, 2 * roundoff)
        vector = self._step.as_keras(engine.local_sums(samples, labels, self._totals))
        engine.values = self._start
        return vector * (rank.weight / self._weight)

    def _begin(self, number: int) -> RankSpec:
        rank, engine = self._ranks[number], self._engine
        engine.position = 0, rank.rank
        engine.micro_batch_size = rank.micro_batch_size
        return rank


def move_weights(
    engine: StepEngine, values: Sequence[Array], generator: np.random.Generator, most: float
) -> list[Array]:
    """Return the values of a state with other weights: each moves by up to `most` of itself."""
    moved = list(values)
    for place, one in enumerate(engine.info.variables[: engine.info.num_weights]):
        if one.dtype in ROUNDOFFS:
            # Two roundings wide: half of the weights that are stored in this type become a neighbour.
            moves = generator.random(one.shape, np.float32) * np.float32(2 * most) - np.float32(most)
            moved[place] = _like(_wide(values[place]) * (1 + moves), values[place])
    return moved


def _wide(value: Array) -> Array:
    """Return numbers as float64, of bfloat16 too. Integers as they are."""
    if value.dtype == BFLOAT16:
        value = (value["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    return value if value.dtype.kind in "iub" else value.astype(np.float64)


def _like(value: Array, other: Array) -> Array:
    """Return numbers in the type of `other`. In bfloat16, rounded to the nearest."""
    if other.dtype != BFLOAT16:
        return value.astype(other.dtype)
    bits = value.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.ascontiguousarray(rounded).view(BFLOAT16).reshape(value.shape)


def _change_apart(rows: Sequence[tuple[Array, Array, Array, float]]) -> float:
    """Return how far variables are off after their change, relative to it, beyond their rounding.

    Rows: before, after, what was found, and the rounding of the type. Infinite for an integer that is wrong,
    such as the number of an optimizer's steps.
    """
    size = apart = 0.0
    for before, after, found, roundoff in rows:
        if not roundoff and (found != after).any():
            return float(np.inf)
        of_rounding = UPDATE_ROUNDINGS * roundoff * np.maximum(np.abs(before), np.abs(after))
        size += float(np.sum((after - before) ** 2)) if roundoff else 0.0
        apart += float(np.sum(np.maximum(np.abs(found - after) - of_rounding, 0) ** 2)) if roundoff else 0.0
    return float(np.sqrt(apart / size)) if size else float(np.inf if apart else 0.0)


def _relative(change: Array, whole: Array, *parts: slice) -> float:
    """Return how large the `change` of a vector is, relative to each of the parts of the `whole`."""
    square = 0.0
    for part in parts:
        changed, norm = (float(np.linalg.norm(vector[part])) for vector in (change, whole))
        square += (changed / norm) ** 2 if norm else (np.inf if changed else 0.0)
    return float(np.sqrt(square))


"""Largest number of samples of a rank: enough for unequal batches, few enough for rank 0 to compute all."""
"""Integers are drawn below this and below the size of every embedding, where nothing is known of the data."""
"""Largest number of columns of a table whose columns have ranges of their own."""
Range = Annotated[tuple[tuple[float, float], ...], MaxLength(MAX_COLUMNS, 1)]
Ranges = dict[str, Range]
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
    info: StepInfo,
    ranges: Ranges | None = None,
) -> tuple[Array, Array]:
    """Return the first `count` random samples of rank `rank`, the same on every machine.

    Each sample has an amplitude of its own, and small labels are frequent: samples that are much alike have
    nearly the same gradient, so that one could be taken for another, and with balanced classes the gradients
    of an untrained model cancel.
    """
    limit = min(MAX_INTEGER, info.num_indices or MAX_INTEGER)
    sizes = [max(2, size) for size in info.output_sizes]
    samples, labels = (np.empty((count, *array.shape[1:]), array.dtype) for array in example)
    for number in range(count):
        generator = np.random.default_rng([seed, rank, number])
        _draw_sample(generator, samples[number : number + 1], limit, (ranges or {}).get)
        _draw_labels(generator, labels[number : number + 1], sizes)
    return samples, labels


def _draw_sample(
    generator: np.random.Generator, sample: Array, limit: int, find_range: Callable[[str], Range | None]
) -> None:
    """Fill in `sample`: in the range of the data. Of fields without one, in [0, `limit`) or [0, 1).

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
    """Fill in `labels`. Structured ones have a field for each output, with its size, and one for weights."""
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


"""Largest differences of what a step changes, and of the loss in evaluation, that rounding explains.

A sum that is applied twice makes 1.
"""
"""By how much of themselves weights are moved at most before the step."""


class Verify(ModelTask):
    """Takes one step, and compares its gradient with that of one process."""

    _weights_hash = ""

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples. Of the head of a model, features."""
        samples, labels = super().example(count)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def settle(
        self, communicator: Communicator, before: Sequence[int], hashes: Mapping[int, str] = {}
    ) -> None:
        """Tell those that have joined who takes part. There is no state."""
        for rank in communicator.admitted if self.is_root else ():
            communicator.give_state(rank, b"")
        if self.is_root:
            self.reporter.emit(Joined, 1, 0, 0, 0, dict.fromkeys(map(str, communicator.members), 0), True)

    def run(self, communicator: Communicator) -> str:
        """Take the step. Raises WorkerError when ranks are missing, or hold different weights after it."""
        self._check_members(communicator)
        self._sizes = verified_sizes([rank.batch_size for rank in self.spec.ranks])
        self._ranges = communicator.gather(self._find_ranges() if self.is_root else {}, Ranges)[0]
        self._start = self._move_weights()
        self.step.values = self._start
        self.step.set_step(0, self.spec.recipe.learning_rate or 0.0)
        try:
            verified = self._take_step(communicator)
        except PeerFaultError as fault:
            raise WorkerError(f"{self.spec.ranks[fault.rank].node}: {fault}") from None
        except (RankLostError, StepVoidError):
            self._check_members(communicator)
            raise
        self._weights_hash, different = self.share_hash(communicator)
        if different:
            raise self.other_weights("one step", different)
        if verified:
            emit(replace(verified, weights_hash=self._weights_hash))
        return VERIFIED

    def _move_weights(self) -> list[Array]:
        """Return the state before the step, the same on all ranks."""
        generator = np.random.default_rng(self.spec.recipe.seed)
        return move_weights(self.step, self.step.values, generator, MOVED)

    def _check_members(self, communicator: Communicator) -> None:
        """Raise WorkerError unless all ranks of the plan take part. The others wait until rank 0 ends."""
        missing = [rank.node for rank in self.spec.ranks if rank.rank not in communicator.members]
        if missing and not self.is_root:
            communicator.gather(None, type(None))
            raise LinkLostError
        if missing:
            raise WorkerError(
                f"verification needs all ranks of the plan; lost: {', '.join(missing)}",
                remedy="check it with `csdctl doctor`, or leave it out with --exclude",
            )

    def _sum(self, communicator: Communicator, vector: Array) -> Array:
        """Return the sum of `vector` over all ranks. Raises as `_check_members`, and StepVoidError."""
        total = np.array(communicator.sum(vector))
        self._check_members(communicator)
        return total

    def finish(self, reason: str) -> None:
        """Report the completion record."""
        self.reporter.finished(self.progress.position, self._weights_hash, None, reason)

    def _take_step(self, communicator: Communicator) -> Verified | None:
        """Take the step. Return what is found on rank 0, without the hash of the weights."""
        step, parts, totals = self.step, list[Array](), list[Array]()

        def exchange(number: int, part: Array) -> Array:
            own = np.zeros_like(communicator.local)
            own[step.layouts[number].step] = part
            parts.append(part.copy())
            totals.append(self._sum(communicator, own)[step.layouts[number].step])
            return totals[-1]

        step.run(*self._draw(self.me.rank, self._sizes[self.me.rank]), exchange)
        after = step.values
        step.values = self._start
        reference = self._make_reference(totals if step.info.sums else ()) if self.is_root else None
        vector, total = (step.join(one) if step.info.sums else one[0] for one in (parts, totals))
        verified = self._judge(communicator, vector, total, reference)
        if reference:
            self._check_against_keras(reference, after, total)
        step.values = after
        return verified

    def _check_against_keras(self, reference: Reference, after: Sequence[Array], total: Array) -> None:
        """Raise WorkerError for a state behind the step, or a loss in evaluation, that is not Keras'."""
        what = "the change of weights and optimizer by one step", "the loss in evaluation"
        found = reference.measure_update(after, total), reference.measure_evaluation()
        for name, difference, most in zip(what, found, MAX_DIFFERENCES, strict=True):
            if not difference <= most:
                raise WorkerError(
                    f"{name} differs from Keras' by {difference:.0e}, expected at most {most:.0e}",
                    remedy="please report it, with the model",
                )

    def _judge(
        self, communicator: Communicator, vector: Array, total: Array, reference: Reference | None
    ) -> Verified | None:
        """Compare this rank's `vector` and all others, and their sum `total`. Rank 0 has the `reference`."""
        exact = ExactSum(total.size, self.spec)
        for sent in _gather(communicator, vector):
            exact.add(sent)
            if reference:
                reference.compare(sent)
        return self._describe(exact, total, reference) if reference else None

    def _find_ranges(self) -> Ranges:
        """Return the ranges of the samples, by the first ones of this rank."""
        return find_ranges(self.reader.first(64)[0])

    def _draw(self, rank: int, count: int) -> tuple[Array, Array]:
        """Return the random samples of a rank. Of the head of a model, their features."""
        seed, example = self.spec.recipe.seed, self.reader.first(0)
        samples, labels = draw_samples(seed, rank, count, example, self.step.info, self._ranges)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def _describe(self, exact: ExactSum, total: Array, reference: Reference) -> Verified:
        """Compare all ranks with one batch of all samples. Return the result."""
        reference.compare_one_batch()
        info = self.step.info
        return Verified(
            *(self.me.rank, self.me.node, sum(self._sizes), tuple(self._sizes), info.model_type),
            exact.difference(total),
            exact.rounding,
            info.compute_type,
            tuple(reference.of_ranks),
            reference.by_parts,
            reference.one_batch,
            reference.not_one_batch,
            "",
        )

    def _load_reference(self) -> "KerasStep":
        """Return Keras' own step of the model."""
        from csdctl.worker.compute.keras_step import load_keras_step

        return load_keras_step(self.spec, self.me, self.step, self.example(0))

    def _make_reference(self, totals: Sequence[Array] = ()) -> Reference:
        ranks: Sequence[RankSpec] = self.spec.ranks
        if split := self.spec.split:
            sizes = (
                micro_batch_size(size, split.num_micro_batches, rank.micro_batch_size)
                for rank, size in zip(ranks, self._sizes, strict=True)
            )
            ranks = [replace(rank, micro_batch_size=size) for rank, size in zip(ranks, sizes, strict=True)]
        # The vectors of a split step have every rank's own weight; those of the whole model rank 0's.
        seed, weight = self.spec.recipe.seed, self.me.weight
        return Reference(self._load_reference(), seed, ranks, self._sizes, self._draw, weight, totals)


def _gather(communicator: Communicator, vector: Array) -> Iterator[Array]:
    """Send `vector` to rank 0, which yields those of all ranks, in their order, its own first."""
    if communicator.rank:
        communicator.send(0, vector, STATE)
        return
    yield vector
    for rank in communicator.members[1:]:
        received = communicator.receive(rank, vector.nbytes, STATE)
        if len(received) != vector.nbytes:
            raise PeerFaultError(rank, f"sent {len(received)} bytes, expected {vector.nbytes}")
        yield np.frombuffer(received, vector.dtype)


class VerifySplit(SplitParts, Verify):
    """Takes one step through the cut, and compares its gradient with that of one process.

    The ranks compute a step one after the other, together with rank 0, so that the gradient of each is known.
    Then all at once.
    """

    def _take_step(self, communicator: Communicator) -> Verified | None:
        split = self._split
        reference = self._make_reference() if self.is_root else None
        gradients = slice(split.layout.statistics.stop)
        exact = ExactSum(gradients.stop, self.spec)
        for number in range(len(self._sizes)):
            counts = [size if rank == number else 0 for rank, size in enumerate(self._sizes)]
            total = self._sum_of(communicator, counts)
            exact.add(total[gradients])
            if reference and isinstance(split, SplitStep):
                reference.compare(split.vector(total))
        total = self._sum_of(communicator, self._sizes)
        verified, whole = None, total
        if reference and isinstance(split, SplitStep):
            reference.sent = whole = split.vector(total)
            verified = self._describe(exact, total[gradients], reference)
        self.step.position = 0, self.me.rank
        split.apply(total)
        if reference:
            after = self.step.values
            self._check_against_keras(reference, after, whole)
            self.step.values = after
        return verified

    def _sum_of(self, communicator: Communicator, counts: list[int]) -> Array:
        """Return the summed vector of a step from the beginning, in which the ranks have `counts` samples."""
        me, layout = self.me, self.layout
        self.step.position = 0, me.rank
        samples, labels = (part[: counts[me.rank]] for part in self._draw(me.rank, counts[me.rank]))
        vector = np.zeros_like(communicator.local)
        ranks = [rank.rank for rank in self.spec.ranks]
        self.exchange(communicator, (samples, labels), ranks, counts, vector[layout.step])
        total: Array = self._sum(communicator, vector)[layout.step]
        return total
