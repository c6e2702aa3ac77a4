"""Verification: one step of all ranks against Keras, on the user's own model and fleet.

Rank 0 answers four questions:

- Is the sum that the ranks apply the sum of their vectors? Each rank also sends its vector to rank 0, which
  adds them in float64 (`ExactSum`).
- Has each rank computed what Keras computes from the same samples? Rank 0 repeats the step of every rank by
  the model's own train_step: eagerly, without a graph of csdctl, with the rank's random states (`Reference`).
- Is the sum the gradient of one batch of all samples, as Keras computes it?
- Does Keras' optimizer make the same state of the sum? Has Keras the same loss in evaluation?

Layers that compute in 16 bits compute in float32 here, because rounding to 16 bits hides a sample. All
weights are moved before the step: a compiled step that does not read them would be right at the initial ones.
The samples are random, drawn from (seed, rank) on any machine. So no private sample is sent, and rank 0 can
repeat the computation of every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from csdctl.worker.data.arrays import Array, fields_of
from csdctl.worker.engine.split import micro_batch_size
from csdctl.worker.engine.step import ROUNDOFFS, StepEngine, StepInfo
from csdctl.worker.engine.tensorflow_c import BFLOAT16
from csdctl.worker.group.bf16 import from_bf16, to_bf16
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import LinkLostError, PeerFaultError, RankLostError, StepVoidError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import SAMPLE_WEIGHT, list_names
from csdctl.worker.protocol.events import STATE, VERIFIED, Compared, Verified
from csdctl.worker.protocol.json_codec import MaxLength
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import RankSpec
from csdctl.worker.tasks.split import SplitParts
from csdctl.worker.tasks.task import ModelTask, Task

if TYPE_CHECKING:
    from csdctl.worker.compute.keras_step import KerasStep

MAX_SAMPLES = 16
"""Largest batch size of a rank: enough for unequal batches, and rank 0 has the time to repeat all of them."""
MAX_MOVE = 1 / 16
"""Weights move by at most this share of themselves before the step."""
NUM_DRAWS = 2
"""Number of random roundings of the weights for each rank; its spread is the largest effect."""
NEAR = 8.0
"""A difference from one batch of all samples of up to so many spreads needs no explanation."""
MAX_LOSS_ROUNDING = 1e-5
"""Relative difference between the loss of one batch and of its parts that float32 explains."""
MAX_UPDATE_DIFFERENCE, MAX_EVALUATION_DIFFERENCE = 0.01, 1e-3
"""Relative to what the step changes, and to the loss. A sum that is applied twice makes 1."""
COUPLED = "a layer or loss that compares samples of a batch: the loss of its parts is off by {:.0e}"
UPDATE_ROUNDINGS = 8
"""Two computations of a variable's new value may differ by so many roundings of its type."""
SMALLEST = 2.0**-126
"""The smallest float32 that every processor adds; some take smaller ones for 0."""
MAX_INTEGER = 128
"""Integers are drawn below this, and below the size of every embedding, where the data has no range."""
MAX_COLUMNS = 1024
"""Largest number of columns of a table whose columns have ranges of their own."""

Range = Annotated[tuple[tuple[float, float], ...], MaxLength(MAX_COLUMNS, 1)]
Ranges = dict[str, Range]
"""The smallest and largest value of each column, or of all, by field of the samples ('' without fields)."""


class ExactSum:
    """Adds the ranks' vectors in float64, to judge their sum in float32."""

    def __init__(self, size: int, num_wire_roundings: int = 0) -> None:
        """`num_wire_roundings`: how often a vector is rounded to bfloat16 on its way."""
        self.value, self._magnitudes, self._count = np.zeros(size), np.zeros(size), 0
        self._wire_rounding = (1 + ROUNDOFFS["bfloat16"]) ** num_wire_roundings - 1

    def add(self, vector: Array) -> None:
        """Add one rank's vector, shape (size,)."""
        self.value += vector
        self._magnitudes += np.abs(vector)
        self._count += 1

    @property
    def rounding(self) -> float:
        """The largest `difference` of a sum in float32, in whatever order (Higham 1993)."""
        return self._wire_rounding + self._count * ROUNDOFFS["float32"]

    def difference(self, total: Array) -> float:
        """Return the largest difference of an element of `total`, relative to Σ |term|. NaN if not finite."""
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.maximum(np.abs(total - self.value) - self._count * SMALLEST, 0)
            return float(np.where(errors == 0, 0, errors / self._magnitudes).max(initial=0))


class Reference:
    """Computes the vectors of all `ranks` on rank 0, with each rank's samples and random states.

    Every comparison comes with two measures of what it is worth, both from this model and these samples:

    - the spread: how far rank 0's vector moves when each weight moves by the rounding of the type that its
      layer computes in. Kernels of other processors and other numbers of threads round as differently.
    - one sample: how far the vector moves when one sample of the batch is another one. A difference of this
      size is a sample that was lost or counted twice. It must be far above the spread to be visible.
    """

    def __init__(
        self,
        step: "KerasStep",
        ranks: Sequence[RankSpec],
        draw: Callable[[int, int], tuple[Array, Array]],
        totals: Sequence[Array] = (),
    ) -> None:
        """`ranks` have the batch sizes of the step. `draw` returns the samples of a rank, given their number.

        `totals`: of an own train_step, the sums of the step over all ranks. The engine of `step` has the
        state before the step, and the weight of rank 0.
        """
        self._step, self._engine = step, step.engine
        self._ranks, self._draw, self._totals = ranks, draw, totals
        self._takers = [rank for rank in ranks if rank.batch_size]
        self._start, info = self._engine.values, self._engine.info
        types = {variable.dtype for variable in info.variables[: info.num_weights]} & set(ROUNDOFFS)
        self._roundoff = max(ROUNDOFFS[dtype] for dtype in {"float32", *types})
        """Rounding of gradients, which have the type of their weights and are summed in float32."""
        self.of_ranks: list[Compared] = []
        """The comparisons so far."""

    def compare(self, vector: Array) -> None:
        """Compare the vector that the next rank has sent with the vector of this process."""
        expected, spread, one_sample = self.measure(self._ranks[len(self.of_ranks)])
        difference = self._relative(self._step.as_keras(vector) - expected, expected)
        self.of_ranks.append(Compared(difference, spread, one_sample))

    def measure(self, rank: RankSpec) -> tuple[Array, float, float]:
        """Return Keras' vector of a rank, float64, its spread, and what one sample makes of it."""
        if not rank.batch_size:
            return np.zeros(self._step.layout.step_size), self._roundoff, 1.0
        columns = self._draw(rank.rank, rank.batch_size + 1)
        samples, labels = (column[:-1] for column in columns)
        vector = self._by_engine(rank, samples, labels)
        moved = [self._by_engine(rank, samples, labels, draw) for draw in range(NUM_DRAWS)]
        exchanged, exchanged_labels = (np.concatenate([column[-1:], column[1:-1]]) for column in columns)
        one_sample = self._relative(self._by_engine(rank, exchanged, exchanged_labels) - vector, vector)
        # Where all weights are 0, moving them changes nothing, but the terms of the sum are rounded.
        floor = self._roundoff * (1 + rank.batch_size * one_sample)
        spread = max(floor, *(self._relative(result - vector, vector) for result in moved))
        return self._by_keras(rank, samples, labels), spread, one_sample

    def compare_one_batch(self, total: Array) -> tuple[Compared | None, tuple[str, ...]]:
        """Compare the ranks' sum with one batch of all samples, or return why its gradient is another one."""
        if reasons := self._find_reasons(total):
            return None, reasons
        expected, num_samples = self.measure_one_batch(), sum(rank.batch_size for rank in self._ranks)
        difference = _relative(self._step.as_keras(total) - expected, expected, self._step.layout.gradients)
        one_sample = min(
            compared.one_sample * rank.batch_size / num_samples
            for compared, rank in zip(self.of_ranks, self._ranks, strict=True)
            if rank.batch_size
        )
        spread = max(compared.spread for compared in self.of_ranks)
        is_near = difference <= NEAR * spread
        if not is_near and (reason := self._find_coupling()):
            return None, (reason,)
        return Compared(difference, spread, one_sample), ()

    def measure_one_batch(self) -> Array:
        """Return Keras' vector of one batch of all ranks' samples, float64."""
        return self._by_keras(self._ranks[0], *_join(self._draw_batches()))

    def measure_update(self, after: Sequence[Array], total: Array) -> float:
        """Return how far the state `after` the step is off Keras' state, relative to what the step changes.

        `total`: the summed vector. For an own train_step, Keras takes the whole step of the first batch, and
        the variables of its optimizers are compared. Infinite if an optimizer did not step as often.
        """
        info = self._engine.info
        if info.sums:
            self._by_keras(self._takers[0], *self._draw_batches()[0])
            expected = self._step.values
        else:
            expected = self._step.apply(self._start, total)
        groups = info.updated or [[place] for place in range(len(expected))]
        return max(self._measure_change(group, expected, after) for group in groups)

    def measure_evaluation(self) -> float:
        """Return the relative difference of rank 0's loss in evaluation, 0 for an own train_step."""
        samples, labels = self._draw(0, self._ranks[0].batch_size)
        if self._engine.info.sums or not len(samples):
            return 0.0
        self._engine.values = self._start
        expected = self._step.evaluate(self._start, samples, labels)
        loss = self._engine.evaluate(samples, labels).mean_loss
        return abs(loss - expected) / max(abs(expected), SMALLEST)

    def _measure_change(
        self, places: Sequence[int], expected: Sequence[Array], actual: Sequence[Array]
    ) -> float:
        """Return how far variables are off after their change, relative to it, beyond their rounding.

        Infinite for an integer that is wrong, such as the number of an optimizer's steps.
        """
        change = error = 0.0
        for place in places:
            roundoff = ROUNDOFFS.get(self._engine.info.variables[place].dtype, 0.0)
            before, by_keras, value = (_widen(state[place]) for state in (self._start, expected, actual))
            if roundoff:
                rounding = UPDATE_ROUNDINGS * roundoff * np.maximum(np.abs(before), np.abs(by_keras))
                change += float(np.sum((by_keras - before) ** 2))
                error += float(np.sum(np.maximum(np.abs(value - by_keras) - rounding, 0) ** 2))
            elif (value != by_keras).any():
                return float(np.inf)
        return float(np.sqrt(error / change)) if change else float(np.inf if error else 0.0)

    def _draw_batches(self) -> list[tuple[Array, Array]]:
        return [self._draw(rank.rank, rank.batch_size) for rank in self._takers]

    def _find_reasons(self, total: Array) -> tuple[str, ...]:
        """Return why the gradient depends on how samples are divided into batches."""
        engine = self._engine
        layers = {
            "random numbers": engine.info.drawing,
            "normalization by the batch": engine.find_normalizing(total[engine.layout.statistics]),
        }
        reasons = [
            f"{reason} in {list_names(list(dict.fromkeys(names)), 3)}"
            for reason, names in layers.items()
            if names
        ]
        if engine.augmentation:
            reasons.append(f"augmentation by {engine.augmentation.name}")
        if len({rank.weight for rank in self._ranks}) > 1:
            reasons.append("samples of different weight on different ranks")
        return tuple(reason[:400] for reason in reasons)

    def _find_coupling(self) -> str:
        """Return how the samples of a batch depend on each other, by Keras' losses, '' if they do not.

        A loss that is not divided by the number of samples shows nothing: csdctl itself counts its divisor.
        """
        info, batches = self._engine.info, self._draw_batches()
        if info.sums:
            return "a loss that is not a mean over the samples of the batch, or compares them"
        if info.divides_gradients:
            return ""
        shares = [len(samples) for samples, _ in batches]
        (mean, summed), *parts = self._step.losses(self._start, [_join(batches), *batches])
        loss = mean + summed
        of_parts = sum(
            part[0] * share / sum(shares) + part[1] for part, share in zip(parts, shares, strict=True)
        )
        difference = abs(of_parts - loss) / max(abs(loss), SMALLEST)
        if difference <= MAX_LOSS_ROUNDING:
            return ""
        return COUPLED.format(difference)

    def _relative(self, change: Array, vector: Array) -> float:
        layout = self._step.layout
        parts = [layout.gradients, layout.statistics, slice(layout.count, layout.count + 1)]
        if not self._engine.info.sums:  # the loss
            parts.append(slice(layout.sums.start, layout.sums.start + 1))
        return _relative(change, vector, *parts)

    def _by_keras(self, rank: RankSpec, samples: Array, labels: Array) -> Array:
        """Return a rank's vector by Keras, float64."""
        self._begin(rank)
        return self._step.vector(self._start, samples, labels, self._totals) * rank.weight

    def _by_engine(self, rank: RankSpec, samples: Array, labels: Array, draw: int | None = None) -> Array:
        """Return a rank's vector, float64. With `draw`, of weights that moved by their rounding."""
        engine = self._engine
        self._begin(rank)
        engine.values = self._start
        if draw is not None:
            generator = np.random.default_rng([rank.rank, draw])
            # Two roundings wide: half of the weights that are stored in this type become a neighbour.
            engine.values = move_weights(engine, generator, 2 * ROUNDOFFS[engine.info.compute_type])
        vector = self._step.as_keras(engine.local_sums(samples, labels, self._totals))
        engine.values = self._start
        return vector * (rank.weight / self._ranks[0].weight)

    def _begin(self, rank: RankSpec) -> None:
        self._engine.position = 0, rank.rank
        self._engine.micro_batch_size = rank.micro_batch_size


def move_weights(engine: StepEngine, generator: np.random.Generator, max_move: float) -> list[Array]:
    """Return the state of `engine` with other weights: each moves by up to `max_move` of itself."""
    values, info = engine.values, engine.info
    for place, variable in enumerate(info.variables[: info.num_weights]):
        if variable.dtype in ROUNDOFFS:
            move = generator.random(variable.shape, np.float32) * np.float32(2 * max_move)
            moved = _widen(values[place]) * (1 + move - np.float32(max_move))
            if values[place].dtype == BFLOAT16:
                halves = np.empty(moved.size, np.uint16)
                to_bf16(moved.astype(np.float32).reshape(-1), halves)
                values[place] = halves.view(BFLOAT16).reshape(moved.shape)
            else:
                values[place] = moved.astype(values[place].dtype)
    return values


def _widen(value: Array) -> Array:
    """Return numbers as float64, of bfloat16 too. Integers as they are."""
    if value.dtype == BFLOAT16:
        value = from_bf16(value["bfloat16"])
    return value if value.dtype.kind in "iub" else value.astype(np.float64)


def _join(batches: Sequence[tuple[Array, Array]]) -> list[Array]:
    """Return samples and labels of several batches as one batch."""
    return [np.concatenate(column) for column in zip(*batches, strict=True)]


def _relative(change: Array, vector: Array, *parts: slice) -> float:
    """Return the norm of `change` in each part of the `vector`, relative to it, over all parts."""
    square = 0.0
    for part in parts:
        changed, norm = float(np.linalg.norm(change[part])), float(np.linalg.norm(vector[part]))
        square += (changed / norm) ** 2 if norm else (np.inf if changed else 0.0)
    return float(np.sqrt(square))


def choose_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Return the batch sizes of the step, which are unequal, given the plan's.

    With equal sizes, a plain mean of the ranks' means would be right. A rank without samples gets none.
    """
    sizes = [min(size, MAX_SAMPLES) for size in batch_sizes]
    takers = [rank for rank, size in enumerate(sizes) if size]
    if len({*sizes} - {0}) == 1:
        for rank in takers[1::2]:
            sizes[rank] = max(1, 3 * sizes[rank] // 4)
    return sizes


def find_ranges(samples: Array) -> Ranges:
    """Return the ranges of `samples`: an input may be a class that a layer compares with, or in metres."""
    ranges: Ranges = {}
    for name, values in fields_of(samples).items():
        is_table = values.ndim == 2 and values.shape[1] <= MAX_COLUMNS
        columns = values.astype(np.float64).reshape(-1, values.shape[1] if is_table else 1)
        columns = columns[np.isfinite(columns).all(axis=1)]
        if columns.size:
            ranges[name] = tuple(zip(columns.min(axis=0).tolist(), columns.max(axis=0).tolist(), strict=True))
    return ranges


def draw_samples(
    rank: int, count: int, *, seed: int, example: tuple[Array, Array], info: StepInfo, ranges: Ranges
) -> tuple[Array, Array]:
    """Return the first `count` random samples of rank `rank`, the same on every machine.

    Samples are in the range of the data. Fields without one are in [0, the size of the smallest embedding) or
    [0, 1). Each sample has an amplitude of its own, and small labels are frequent: samples that are much
    alike have nearly the same gradient, so that one could be taken for another. With balanced classes the
    gradients of an untrained model cancel.
    """
    size = max(count, MAX_SAMPLES + 1)
    generator = np.random.default_rng([seed, rank])
    samples, labels = (np.empty((size, *array.shape[1:]), array.dtype) for array in example)
    limit = min(MAX_INTEGER, info.num_indices or MAX_INTEGER)
    for name, values in fields_of(samples).items():
        drawn = generator.random(values.shape) * (1 - generator.random((size,) + (1,) * (values.ndim - 1)))
        is_integer = values.dtype.kind in "iu"
        low, high = np.array(ranges.get(name, [(0, limit - 1 if is_integer else 1)])).T
        # Columns with one range may be indices of embeddings of different sizes.
        if is_integer and values.ndim > 2 and limit < MAX_INTEGER:
            high = np.minimum(high, limit - 1)
        values[...] = low + (np.floor(drawn * (high - low + 1)) if is_integer else drawn * (high - low))
    for number, (name, values) in enumerate(fields_of(labels).items()):
        if name == SAMPLE_WEIGHT:
            values[...] = 0.5 + generator.random(values.shape)
        elif values.dtype.kind in "iu":
            # An output whose size is known only by a call has two classes.
            num_classes = max([2, *info.output_sizes[number : number + 1]])
            values[...] = np.minimum(generator.geometric(0.6, values.shape), num_classes) - 1
        elif values.ndim == 2 and values.shape[1] > 1:  # one-hot
            classes = np.minimum(generator.geometric(0.6, size), values.shape[1]) - 1
            values[...] = np.arange(values.shape[1]) == classes[:, None]
        else:
            values[...] = generator.random(values.shape)
    return samples[:count], labels[:count]


class Verify(ModelTask):
    """Takes one step, and compares it with Keras."""

    _weights_hash = ""
    settle = Task.settle

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples, or their features if the model is a head."""
        samples, labels = super().example(count)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def run(self, communicator: Communicator) -> str:
        """Take the step. Raises WorkerError when ranks are missing, or hold different weights after it."""
        self._check_members(communicator)
        sizes = choose_sizes([rank.batch_size for rank in self.spec.ranks])
        self._ranks = [
            replace(rank, batch_size=size) for rank, size in zip(self.spec.ranks, sizes, strict=True)
        ]
        self._ranges = communicator.gather(self._find_ranges() if self.is_root else {}, Ranges)[0]
        self.step.values = self._move_weights()
        self.step.set_step(0, self.spec.recipe.learning_rate or 0.0)
        try:
            comparisons = self._take_step(communicator)
        except PeerFaultError as fault:
            raise WorkerError(f"{self.spec.ranks[fault.rank].node}: {fault}") from None
        except (RankLostError, StepVoidError):
            self._check_members(communicator)
            raise
        self._weights_hash, different = self.share_hash(communicator)
        if different:
            raise self.other_weights("one step", different)
        if self.is_root:
            self.reporter.emit(Verified, **comparisons, weights_hash=self._weights_hash)
        return VERIFIED

    def finish(self, reason: str) -> None:
        """Report the completion record."""
        self.reporter.finished(self.progress.position, self._weights_hash, None, reason)

    def _find_ranges(self) -> Ranges:
        return find_ranges(self.reader.first(64)[0])

    def _move_weights(self) -> list[Array]:
        """Return the state before the step, the same on all ranks."""
        return move_weights(self.step, np.random.default_rng(self.spec.recipe.seed), MAX_MOVE)

    def _check_members(self, communicator: Communicator) -> None:
        """Raise WorkerError unless all ranks of the plan take part. The others wait until rank 0 ends."""
        missing = [rank.node for rank in self.spec.ranks if rank.rank not in communicator.members]
        if missing and not self.is_root:
            communicator.gather(None, type(None))
            raise LinkLostError
        if missing:
            raise WorkerError(
                f"verification needs all ranks of the plan; lost: {', '.join(missing)}",
                remedy="check it with `csdctl doctor`, or leave it out",
            )

    def _draw(self, rank: int, count: int) -> tuple[Array, Array]:
        """Return the random samples of a rank, or their features if the model is a head."""
        samples, labels = draw_samples(
            rank,
            count,
            seed=self.spec.recipe.seed,
            example=self.reader.first(0),
            info=self.step.info,
            ranges=self._ranges,
        )
        return (self.to_features(samples) if self.spec.head else samples), labels

    def _sum(self, communicator: Communicator, vector: Array) -> Array:
        """Return the sum of `vector` over all ranks. Raises as `_check_members`, and StepVoidError."""
        total = np.array(communicator.sum(vector))
        self._check_members(communicator)
        return total

    def _take_step(self, communicator: Communicator) -> dict[str, Any]:
        """Take the step. Return what rank 0 measures as fields of `Verified`, without the weights' hash."""
        step, start = self.step, self.step.values
        parts: list[Array] = []
        totals: list[Array] = []

        def exchange(number: int, part: Array) -> Array:
            vector = np.zeros_like(communicator.local)
            vector[step.layouts[number].step] = part
            parts.append(part.copy())
            totals.append(self._sum(communicator, vector)[step.layouts[number].step])
            return totals[-1]

        step.run(*self._draw(self.me.rank, self._ranks[self.me.rank].batch_size), exchange)
        after, step.values = step.values, start
        reference = self._make_reference(totals if step.info.sums else ()) if self.is_root else None
        exact = self._make_exact_sum(step.layout.step_size)
        for vector in _gather(communicator, step.join(parts)):
            exact.add(vector)
            if reference:
                reference.compare(vector)
        comparisons = {}
        if reference:
            self._check_against_keras(reference, after, step.join(totals))
            comparisons = self._describe(reference, exact, step.join(totals), exact.value)
        step.values = after
        return comparisons

    def _make_exact_sum(self, size: int) -> ExactSum:
        if self.spec.recipe.compression != BF16:
            return ExactSum(size)
        # Vectors are rounded before each level of the sum, and the total once more.
        return ExactSum(
            size, num_wire_roundings=3 if len({rank.server for rank in self.spec.ranks}) > 1 else 2
        )

    def _make_reference(self, totals: Sequence[Array] = ()) -> Reference:
        """Return what repeats the ranks' steps, by Keras' own step of the model."""
        from csdctl.worker.compute.keras_step import load_keras_step

        step = load_keras_step(self.spec, self.me, self.step, self.example(0))
        return Reference(step, self._ranks, self._draw, totals)

    def _check_against_keras(self, reference: Reference, after: Sequence[Array], total: Array) -> None:
        """Raise WorkerError for a state after the step, or a loss in evaluation, that is not Keras'."""
        update, evaluation = reference.measure_update(after, total), reference.measure_evaluation()
        for what, difference, most in (
            ("the change of weights and optimizer by one step", update, MAX_UPDATE_DIFFERENCE),
            ("the loss in evaluation", evaluation, MAX_EVALUATION_DIFFERENCE),
        ):
            if not difference <= most:
                raise WorkerError(
                    f"{what} differs from Keras' by {difference:.0e}, expected at most {most:.0e}",
                    remedy="please report it, with the model",
                )

    def _describe(
        self, reference: Reference, exact: ExactSum, total: Array, model_total: Array
    ) -> dict[str, Any]:
        """Return the comparisons as fields of `Verified`.

        `total`: the sum of what was added to `exact`. `model_total`: the summed vector of the whole model.
        """
        one_batch, not_one_batch = reference.compare_one_batch(model_total)
        sizes, info = tuple(rank.batch_size for rank in self._ranks), self.step.info
        return {
            "global_batch": sum(sizes),
            "batch_sizes": sizes,
            "dtype": info.model_type,
            "sum_difference": exact.difference(total),
            "sum_rounding": exact.rounding,
            "compared_in": info.compute_type,
            "of_ranks": tuple(reference.of_ranks),
            "one_batch": one_batch,
            "not_one_batch": not_one_batch,
        }


def _gather(communicator: Communicator, vector: Array) -> Iterator[Array]:
    """Send `vector` to rank 0, which yields the vectors of all ranks, in their order, its own first."""
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
    """Takes one step through the cut, and compares it with Keras' step of the whole model.

    The ranks compute a step one after the other, together with rank 0, so that the gradient of each is known.
    Then all at once.
    """

    def _make_reference(self, totals: Sequence[Array] = ()) -> Reference:
        assert self.spec.split
        for number, rank in enumerate(self._ranks):
            size = micro_batch_size(rank.batch_size, self.spec.split.num_micro_batches, rank.micro_batch_size)
            self._ranks[number] = replace(rank, micro_batch_size=size)
        return super()._make_reference(totals)

    def _take_step(self, communicator: Communicator) -> dict[str, Any]:
        split: Any = self._split
        sizes = [rank.batch_size for rank in self._ranks]
        reference = self._make_reference() if self.is_root else None
        gradients = slice(split.layout.statistics.stop)
        exact = self._make_exact_sum(gradients.stop)
        for number in range(len(sizes)):
            total = self._sum_of(communicator, [size * (rank == number) for rank, size in enumerate(sizes)])
            exact.add(total[gradients])
            if reference:
                reference.compare(split.vector(total))
        total = self._sum_of(communicator, sizes)
        model_total = split.vector(total) if reference else total
        self.step.position = 0, self.me.rank
        split.apply(total)
        if not reference:
            return {}
        after = self.step.values
        self._check_against_keras(reference, after, model_total)
        comparisons = self._describe(reference, exact, total[gradients], model_total)
        self.step.values = after
        return comparisons

    def _sum_of(self, communicator: Communicator, counts: list[int]) -> Array:
        """Return the summed vector of a step from the beginning, in which the ranks have `counts` samples."""
        rank = self.me.rank
        self.step.position = 0, rank
        vector = np.zeros_like(communicator.local)
        self.exchange(
            communicator,
            self._draw(rank, counts[rank]),
            ranks=range(len(counts)),
            counts=counts,
            out=vector[self.layout.step],
        )
        total: Array = self._sum(communicator, vector)[self.layout.step]
        return total
