"""Verification: one step of all ranks against the step that Keras takes of the same global batch.

Each rank takes random samples that are drawn from (seed, rank) on any machine. So no private sample is sent,
and rank 0 has the batch of every rank. It makes three comparisons:

- Each rank's vector against the one Keras computes for the same batch with the model's train_step: eagerly,
  without a graph of csdctl, with the rank's random states.
- The sum over the ranks against the sum of their vectors in float64.
- The state after the step against the state that Keras' optimizer makes of the sum.

Layers that compute in 16 bits compute in float32 here, because rounding to 16 bits hides a sample. All
weights are moved before the step: a compiled step that does not read them would be right at the initial ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from csdctl.worker.data.arrays import Array, fields_of, random_batch
from csdctl.worker.engine.split import micro_batch_size
from csdctl.worker.engine.step import ROUNDOFFS, StepEngine
from csdctl.worker.engine.tensorflow_c import BFLOAT16
from csdctl.worker.group.bf16 import from_bf16, to_bf16
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import LinkLostError, PeerFaultError, RankLostError, StepVoidError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import STATE, VERIFIED, Verified
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import RANGES, RankSpec
from csdctl.worker.tasks.split import SplitParts
from csdctl.worker.tasks.task import ModelTask, Task, TaskContext

if TYPE_CHECKING:
    from csdctl.worker.compute.keras_step import KerasStep

MAX_SAMPLES = 16
"""Largest batch size of a rank: enough for unequal batches, and rank 0 has the time to compute all."""
MAX_MOVE = 1 / 16
"""Weights move by at most this share of themselves before the step."""
NUM_DRAWS = 3
"""Number of random roundings of the weights; the spread is their largest effect."""
MAX_UPDATE_DIFFERENCE = 0.01
"""Relative to what the step changes. Applying a sum twice would give 1."""
UPDATE_ROUNDINGS = 8
"""Two computations of a variable's new value may differ by this many rounding errors of its type."""
SMALLEST_NORMAL = np.finfo(np.float32).tiny
"""The smallest normal float32: some processors flush smaller numbers to zero."""


class Reference:
    """Computes the ranks' vectors as Keras does, from the samples and the random states of each."""

    def __init__(
        self,
        step: "KerasStep",
        ranks: Sequence[RankSpec],
        draw: Callable[[int, int], tuple[Array, Array]],
        totals: Sequence[Array] = (),
    ) -> None:
        """`ranks` have the batch sizes of the step. `draw` returns the samples of a rank, given their number.

        `totals`: of an own train_step, the sums of the step over all ranks. The engine of `step` has the
        state before the step.
        """
        self._step, self._engine, self._start = step, step.engine, step.engine.values
        self._active_ranks = [rank for rank in ranks if rank.batch_size]
        self._draw, self._totals = draw, totals

    def compare(self, rank: RankSpec, vector: Array) -> float:
        """Return how far a rank's vector is off Keras' vector of the same samples, relative to it."""
        expected = self._compute(rank, *self._draw(rank.rank, rank.batch_size))
        return self._relative(self._step.as_keras(vector) - expected, expected)

    def measure(self) -> tuple[float, float]:
        """Return what a comparison is worth, from the first rank's vector by Keras, relative to it.

        First, the spread: how far the vector moves when each weight moves by the rounding of the type that
        its layer computes in. Kernels of other processors and other numbers of threads round as differently.
        Second, how far it moves when one sample is another one. A sample that is lost makes as much.
        """
        rank, info = self._active_ranks[0], self._engine.info
        columns = self._draw(rank.rank, rank.batch_size + 1)
        batch = [column[:-1] for column in columns]
        vector = self._compute(rank, *batch)
        exchanged = self._compute(rank, *(np.concatenate([column[-1:], column[1:-1]]) for column in columns))
        one_sample = self._relative(exchanged - vector, vector)
        spreads = []
        for number in range(NUM_DRAWS):
            # Two roundings wide: half of the weights that are stored in this type become a neighbour.
            generator, move = np.random.default_rng(number), 2 * ROUNDOFFS[info.compute_type]
            moved = self._compute(rank, *batch, values=move_weights(self._engine, generator, move))
            spreads.append(self._relative(moved - vector, vector))
        # Gradients have the type of their weights, and are summed in float32. Where all weights are 0, moving
        # them changes nothing, but the terms of the sum are rounded.
        types = {variable.dtype for variable in info.variables[: info.num_weights]} & set(ROUNDOFFS)
        roundoff = max(ROUNDOFFS[dtype] for dtype in {"float32", *types})
        spreads.append(roundoff * (1 + rank.batch_size * one_sample))
        return float(np.max(spreads)), one_sample  # max() would drop NaN

    def check_update(self, after: Sequence[Array], total: Array) -> None:
        """Raise WorkerError for a state `after` the step that is not Keras'. `total`: the summed vector."""
        difference = self.measure_update(after, total)
        if not difference <= MAX_UPDATE_DIFFERENCE:
            raise WorkerError(
                f"the change of weights and optimizer by one step differs from Keras' by {difference:.0e}, "
                f"expected at most {MAX_UPDATE_DIFFERENCE:.0e}",
                remedy="please report it, with the model",
            )

    def measure_update(self, after: Sequence[Array], total: Array) -> float:
        """Return how far the state `after` the step is off Keras' state, relative to what the step changes.

        For an own train_step, Keras takes the whole step of the first batch, and the variables of its
        optimizers are compared. Infinite if an optimizer did not step as often. NaN if a variable is NaN.
        """
        info = self._engine.info
        if info.sums:
            rank = self._active_ranks[0]
            self._compute(rank, *self._draw(rank.rank, rank.batch_size))
            expected = self._step.values
        else:
            expected = self._step.apply(self._start, total)
        groups = info.updated or [[place] for place in range(len(expected))]
        return float(np.max([self._measure_change(group, expected, after) for group in groups]))

    def _measure_change(
        self, places: Sequence[int], expected: Sequence[Array], actual: Sequence[Array]
    ) -> float:
        """Return how far variables are off after their change, relative to it, beyond their rounding.

        Infinite for an integer that is wrong, such as the number of an optimizer's steps.
        """
        change = error = 0.0
        for place in places:
            roundoff = ROUNDOFFS.get(self._engine.info.variables[place].dtype, 0.0)
            before, by_keras, value = (_as_float64(state[place]) for state in (self._start, expected, actual))
            if roundoff:
                rounding = UPDATE_ROUNDINGS * roundoff * np.maximum(np.abs(before), np.abs(by_keras))
                change += float(np.sum((by_keras - before) ** 2))
                error += float(np.sum(np.maximum(np.abs(value - by_keras) - rounding, 0) ** 2))
            elif (value != by_keras).any():
                return float(np.inf)
        return float(np.sqrt(error / change)) if change else float(np.inf if error else 0.0)

    def _relative(self, change: Array, vector: Array) -> float:
        layout, square = self._step.layout, 0.0
        parts = [layout.gradients, layout.statistics, slice(layout.count, layout.count + 1)]
        if not self._engine.info.sums:  # the loss
            parts.append(slice(layout.sums.start, layout.sums.start + 1))
        for part in parts:
            changed, norm = float(np.linalg.norm(change[part])), float(np.linalg.norm(vector[part]))
            square += (changed / norm) ** 2 if norm else (np.inf if changed else 0.0)
        return float(np.sqrt(square))

    def _compute(
        self, rank: RankSpec, samples: Array, labels: Array, *, values: Sequence[Array] = ()
    ) -> Array:
        """Return a rank's vector by Keras, float64. `values`: another state than before the step."""
        self._engine.position = 0, rank.rank
        self._engine.micro_batch_size = rank.micro_batch_size
        return self._step.vector(values or self._start, samples, labels, self._totals)


def move_weights(engine: StepEngine, generator: np.random.Generator, max_move: float) -> list[Array]:
    """Return the state of `engine` with other weights: each moves by up to `max_move` of itself."""
    values, info = engine.values, engine.info
    for place, variable in enumerate(info.variables[: info.num_weights]):
        if variable.dtype in ROUNDOFFS:
            move = generator.random(variable.shape, np.float32) * np.float32(2 * max_move)
            moved = _as_float64(values[place]) * (1 + move - np.float32(max_move))
            if values[place].dtype == BFLOAT16:
                halves = np.empty(moved.size, np.uint16)
                to_bf16(moved.astype(np.float32).reshape(-1), halves)
                values[place] = halves.view(BFLOAT16).reshape(moved.shape)
            else:
                values[place] = moved.astype(values[place].dtype)
    return values


def _as_float64(value: Array) -> Array:
    """Return numbers of any type in float64, integers as they are."""
    if value.dtype == BFLOAT16:
        value = from_bf16(value["bfloat16"])
    return value if value.dtype.kind in "iub" else value.astype(np.float64)


def measure_sum(total: Array, exact: Array, magnitudes: Array, num_terms: int) -> float:
    """Return the largest difference of an element of `total` from `exact`, relative to Σ |term|.

    NaN if not finite. For `num_terms` in float32, it is at most `num_terms` roundings (Higham 1993).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.maximum(np.abs(total - exact) - num_terms * SMALLEST_NORMAL, 0)
        return float(np.where(errors == 0, 0, errors / magnitudes).max(initial=0))


def choose_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Return the batch sizes of the step, which are unequal, given the plan's.

    With equal sizes, a plain mean of the ranks' means would be right. A rank without samples gets none.
    """
    sizes = [min(size, MAX_SAMPLES) for size in batch_sizes]
    active_ranks = [rank for rank, size in enumerate(sizes) if size]
    if len({*sizes} - {0}) == 1:
        for rank in active_ranks[1::2]:
            sizes[rank] = 3 * sizes[rank] // 4 if sizes[rank] > 1 else 2
    return sizes


class Verify(ModelTask):
    """Takes one step, and compares it with Keras."""

    settle = Task.settle

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        sizes = choose_sizes([rank.batch_size for rank in self.spec.ranks])
        self._ranks = [
            replace(rank, batch_size=size) for rank, size in zip(self.spec.ranks, sizes, strict=True)
        ]
        """The ranks with the batch sizes of the step."""
        self._vector = np.zeros(0, np.float32)
        """This rank's vector."""
        self._totals: list[Array] = []
        """The sums of the step over all ranks."""
        self._weights_hash = ""

    @property
    def max_batch_sizes(self) -> dict[int, int]:
        """As in `ModelTask`. The step has 2 samples on ranks that have 1 in the plan."""
        return {rank: max(2, size) for rank, size in super().max_batch_sizes.items()}

    def run(self, communicator: Communicator) -> str:
        """Take the step. Raises WorkerError when ranks are missing, or hold different weights after it."""
        self._check_members(communicator)
        self.step.values = move_weights(self.step, np.random.default_rng(self.spec.recipe.seed), MAX_MOVE)
        self.step.set_step(0, self.spec.recipe.learning_rate or 0.0)
        try:
            comparisons = self._compare(communicator)
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

    def draw(self, rank: int, count: int) -> tuple[Array, Array]:
        """Return the first `count` random samples of a rank, the same on every machine.

        They are in the range of public data, if the task's arguments have it: a model may take the logarithm
        of its input. Each has an amplitude of its own: otherwise similar samples would have nearly equal
        gradients, and a swapped sample would go unnoticed.
        """
        generator = np.random.default_rng([self.spec.recipe.seed, rank])
        batch = random_batch(generator, self.element_spec, MAX_SAMPLES + 1, self.step.info.num_indices)
        ranges, limit = self.spec.task.arguments.get(RANGES, {}), self.step.info.num_indices
        for name, values in fields_of(batch[0]).items():
            amplitudes = generator.random((len(values),) + (1,) * (values.ndim - 1))
            if name not in ranges:
                values[...] = values * amplitudes
                continue
            low, high = np.array(ranges[name]).T
            is_integer = values.dtype.kind in "iu"
            if is_integer and limit is not None and values.ndim > 2:  # several inputs may have one range
                high = np.minimum(high, limit - 1)
            drawn = generator.random(values.shape) * amplitudes * (high - low + is_integer)
            values[...] = low + (np.floor(drawn) if is_integer else drawn)
        return batch[0][:count], batch[1][:count]

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

    def _compare(self, communicator: Communicator) -> dict[str, Any]:
        """Take the step. Return the fields of `Verified` but the weights' hash on rank 0, otherwise {}."""
        start = self.step.values
        total = self._take_step(communicator)
        after, self.step.values = self.step.values, start
        comparisons: dict[str, Any] = {}
        if self.is_root:
            comparisons = self._compare_vectors(communicator, total, after)
        else:
            self._send_vector(communicator)
        self.step.values = after
        return comparisons

    def _compare_vectors(
        self, communicator: Communicator, total: Array, after: Sequence[Array]
    ) -> dict[str, Any]:
        model_total, reference = self._as_model(total), self._make_reference()
        summed = slice(self.layout.statistics.stop)
        exact, magnitudes, differences = np.zeros(summed.stop), np.zeros(summed.stop), []
        for rank, vector in zip(self._ranks, self._receive_vectors(communicator), strict=True):
            exact += vector[summed]
            magnitudes += np.abs(vector[summed])
            differences.append(reference.compare(rank, self._as_model(vector)))
        reference.check_update(after, model_total)
        spread, one_sample = reference.measure()
        rounding = len(self._ranks) * ROUNDOFFS["float32"]
        if self.spec.recipe.compression == BF16:
            # Vectors are rounded before each level of the sum, and the total once more.
            num_roundings = 3 if len({rank.server for rank in self._ranks}) > 1 else 2
            rounding += (1 + ROUNDOFFS["bfloat16"]) ** num_roundings - 1
        return {
            "batch_sizes": tuple(rank.batch_size for rank in self._ranks),
            "dtype": self.step.info.model_type,
            "sum_difference": measure_sum(total[summed], exact, magnitudes, len(self._ranks)),
            "sum_rounding": rounding,
            "compared_in": self.step.info.compute_type,
            "differences": tuple(differences),
            "spread": spread,
            "one_sample": one_sample,
        }

    def _take_step(self, communicator: Communicator) -> Array:
        step, parts = self.step, list[Array]()
        self._totals = []

        def exchange(number: int, part: Array) -> Array:
            vector = np.zeros_like(communicator.local)
            vector[step.layouts[number].step] = part
            parts.append(part.copy())
            self._totals.append(self._sum(communicator, vector)[step.layouts[number].step])
            return self._totals[-1]

        step.run(*self.draw(self.me.rank, self._ranks[self.me.rank].batch_size), exchange)
        self._vector = step.join(parts)
        return step.join(self._totals)

    def _send_vector(self, communicator: Communicator) -> None:
        communicator.send(0, self._vector, STATE)

    def _receive_vectors(self, communicator: Communicator) -> Iterator[Array]:
        yield self._vector
        for rank in communicator.members[1:]:
            received = communicator.receive(rank, self._vector.nbytes, STATE)
            if len(received) != self._vector.nbytes:
                raise PeerFaultError(rank, f"sent {len(received)} bytes, expected {self._vector.nbytes}")
            yield np.frombuffer(received, self._vector.dtype)

    def _as_model(self, vector: Array) -> Array:
        """Return the whole-model vector equivalent to `vector`. It uses the latest step's head."""
        return vector

    def _sum(self, communicator: Communicator, vector: Array) -> Array:
        """Return the sum of `vector` over all ranks. Raises as `_check_members`, and StepVoidError."""
        total = np.array(communicator.sum(vector))
        self._check_members(communicator)
        return total

    def _make_reference(self) -> Reference:
        from csdctl.worker.compute.keras_step import load_keras_step

        step = load_keras_step(self.spec, self.me, self.step, self.example(0))
        return Reference(step, self._ranks, self.draw, self._totals if self.step.info.sums else ())


class VerifySplit(SplitParts, Verify):
    """Takes one step through the cut, and compares it with Keras' step of the whole model.

    Then the ranks compute a step one after the other, together with rank 0, so that the vector of each is
    known.
    """

    def _take_step(self, communicator: Communicator) -> Array:
        assert self.spec.split
        total = self._sum_of(communicator, [rank.batch_size for rank in self._ranks])
        self._split.apply(total)
        for number, rank in enumerate(self._ranks):
            size = micro_batch_size(rank.batch_size, self.spec.split.num_micro_batches, rank.micro_batch_size)
            self._ranks[number] = replace(rank, micro_batch_size=size)
        return total

    def _send_vector(self, communicator: Communicator) -> None:
        for rank in self._ranks:
            self._vector_of(communicator, rank)

    def _receive_vectors(self, communicator: Communicator) -> Iterator[Array]:
        for rank in self._ranks:
            yield self._vector_of(communicator, rank)

    def _vector_of(self, communicator: Communicator, rank: RankSpec) -> Array:
        sizes = [counted.batch_size if counted is rank else 0 for counted in self._ranks]
        return self._sum_of(communicator, sizes)

    def _as_model(self, vector: Array) -> Array:
        split: Any = self._split
        return np.asarray(split.vector(vector))

    def _sum_of(self, communicator: Communicator, counts: list[int]) -> Array:
        """Return the summed vector of a step from the beginning, in which the ranks have `counts` samples."""
        rank = self.me.rank
        self.step.position = 0, rank
        vector = np.zeros_like(communicator.local)
        self.exchange(
            communicator,
            self.draw(rank, counts[rank]),
            ranks=range(len(counts)),
            counts=counts,
            out=vector[self.layout.step],
        )
        total: Array = self._sum(communicator, vector)[self.layout.step]
        return total
