"""One process in place of all ranks: what rank 0 computes to judge the vectors of one step.

Every comparison comes with two measures of what it is worth, both from this model and these samples:

- the spread: how far rank 0's own vector moves when each weight moves by the rounding of the type that its
  layer computes in. Kernels of other processors and other numbers of threads round as differently;
- one sample: how far the vector moves when one sample of the batch is another one. A difference of this size
  is a sample that was lost or counted twice, and must be far outside of the spread to be visible.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from csdctl.worker.compute.custom_step import AnyStep, CustomStep
from csdctl.worker.compute.keras_internals import flatten_layers
from csdctl.worker.compute.statistics import Snapshot
from csdctl.worker.compute.step import Step
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.events import Compared
from csdctl.worker.protocol.run_spec import RankSpec

ROUNDOFFS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a type; the finest type first."""


def compute_type(model: Any) -> str:
    """Return the coarsest type that a layer with weights computes in."""
    found = {layer.compute_dtype for layer in flatten_layers(model) if layer.weights} & set(ROUNDOFFS)
    coarsest: str = max(found or {model.compute_dtype}, key=ROUNDOFFS.__getitem__)
    return coarsest


def widen(model: Any) -> None:
    """Let layers that compute in 16 bits compute in float32 from now on; the weights keep their type.

    In 16 bits, kernels differ by as much as a sample: some add in 16 bits, others in 32.
    """
    for layer in (model, *flatten_layers(model)):
        if layer.compute_dtype in ("float16", "bfloat16"):
            layer.dtype_policy = _make_policy("float32", layer.dtype_policy.variable_dtype)


def _make_policy(dtype: str, variable_dtype: str) -> Any:
    """Return the policy of a layer that computes in `dtype` with weights of another type."""
    from keras import DTypePolicy

    class Policy(DTypePolicy):  # type: ignore[misc]
        @property
        def variable_dtype(self) -> str:
            return variable_dtype

    return Policy(dtype)


NUM_DRAWS = 3
"""Number of random roundings of the weights; the spread is their largest effect."""
NEAR = 8.0
"""Distance from one batch of all samples, in spreads, that needs no explanation."""
MAX_REASON_CHARS = 400
LOSS_ROUNDING = 1e-5
"""Relative difference of the loss of one batch and of its parts that rounding in float32 explains."""
COUPLED = "a layer or loss that compares samples of a batch: the loss of its parts is off by {:.0e}"
SMALLEST = 2.0**-126
"""The smallest float32 that every processor adds; some take smaller ones for 0."""


class ExactSum:
    """Adds the ranks' vectors in float64, to judge their sum in float32."""

    def __init__(self, size: int) -> None:
        self._sum, self._magnitudes, self._count = np.zeros(size), np.zeros(size), 0

    def add(self, vector: Array) -> None:
        """Add one rank's vector, shape (size,)."""
        self._sum += vector
        self._magnitudes += np.abs(vector)
        self._count += 1

    @property
    def rounding(self) -> float:
        """The largest `difference` of a sum in float32, in whatever order (Higham 1993)."""
        return self._count * ROUNDOFFS["float32"]

    def difference(self, total: Array) -> float:
        """Return how far `total` is off: of all elements the most, relative to Σ |term|.

        NaN if an element is not finite.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong = np.maximum(np.abs(total - self._sum) - self._count * SMALLEST, 0)
            return float(np.where(wrong == 0, 0, wrong / self._magnitudes).max(initial=0))


class Reference:
    """Computes the vectors of all `ranks` in this process, with each rank's samples and random states.

    Starts from the weights as they are when it is created, and leaves them in any state.
    """

    def __init__(
        self,
        step: AnyStep,
        seed: int,
        ranks: Sequence[RankSpec],
        sizes: Sequence[int],
        draw: Callable[[int, int], tuple[Array, Array]],
        weight: float = 1.0,
    ) -> None:
        """`sizes`: the batch size of each of the ranks; `weight`: of each sample in this step's vectors.

        `draw` returns the samples of a rank, given their number.
        """
        self._draw = draw
        self._step, self._seed = step, seed
        self._ranks, self._sizes = ranks, sizes
        self._weight = weight
        self._start = Snapshot(step.model.variables if isinstance(step, Step) else step.state)
        self._weights = [weight for weight in step.model.weights if str(weight.dtype) in ROUNDOFFS]
        types = {"float32", *(str(weight.dtype) for weight in self._weights)}
        self._roundoff = max(ROUNDOFFS[dtype] for dtype in types)
        """Rounding of gradients, which have the type of their weights and are summed in float32."""
        self.drawing: list[str] = []
        """The layers that have drawn random numbers for the latest vector."""
        self.sent, self._own = np.zeros(step.layout.step_size), np.zeros(step.layout.step_size)
        """The sum of what the ranks have sent so far, and of what this process has computed."""
        self.of_ranks: list[Compared] = []
        """The comparisons so far."""
        self.one_batch: Compared | None = None
        """Comparison with one batch of all samples; None where such a batch has another gradient."""
        self.not_one_batch: tuple[str, ...] = ()
        """Why it has."""

    @property
    def by_parts(self) -> float:
        """Relative difference of all ranks' gradient from that of their batches in turn."""
        return _relative(self.sent - self._own, self._own, self._step.layout.gradients)

    def samples(self, number: int) -> tuple[Array, Array]:
        """Return the samples of the rank with this number among the ranks, and one more."""
        rank, count = self._ranks[number].rank, self._sizes[number] + 1
        return self._draw(rank, count)

    def compare(self, sent: Array) -> None:
        """Compare the vector `sent` of the next rank with that of this process."""
        own, spread, one_sample = self.measure(len(self.of_ranks))
        self.of_ranks.append(Compared(self._relative(sent - own, own), spread, one_sample))
        self._own += own
        self.sent += sent

    def measure(self, number: int) -> tuple[Array, float, float]:
        """Return the vector of a rank, float64, its spread, and what one sample makes of it."""
        columns, n = self.samples(number), self._sizes[number]
        if n == 0:
            return np.zeros(self._step.layout.step_size), self._roundoff, 1.0
        batch = [column[:-1] for column in columns]
        own = self._compute(number, batch)
        moves = [self._compute(number, batch, draw=draw) - own for draw in range(NUM_DRAWS)]
        other = self._compute(number, [np.concatenate([column[-1:], column[1:-1]]) for column in columns])
        one_sample = self._relative(other - own, own)
        # Where all weights are 0, moving them changes nothing; the terms of the sum are rounded all the same.
        floor = self._roundoff * (1 + n * one_sample)
        return own, max(floor, *(self._relative(move, own) for move in moves)), one_sample

    def compare_one_batch(self) -> None:
        """Compare what all ranks have sent with one batch of all their samples; after `compare` of each."""
        self.not_one_batch = self._find_reasons()
        if self.not_one_batch:
            return
        own = self.measure_one_batch()
        shares = [
            one.one_sample * n / sum(self._sizes)
            for one, n in zip(self.of_ranks, self._sizes, strict=True)
            if n
        ]
        difference = _relative(self.sent - own, own, self._step.layout.gradients)
        found = Compared(difference, max(one.spread for one in self.of_ranks), min(shares))
        is_apart = not found.difference <= NEAR * found.spread
        if is_apart and (reason := self._find_coupling()):
            self.not_one_batch = (reason,)
        else:
            self.one_batch = found

    def measure_one_batch(self) -> Array:
        """Return the vector of one batch of all ranks' samples, float64."""
        columns = zip(*(self.samples(number) for number in range(len(self._ranks))), strict=True)
        return self._compute(0, [np.concatenate([part[:-1] for part in column]) for column in columns])

    def _find_coupling(self) -> str:
        """Return how the samples of a batch depend on each other, by Keras' losses; '' if not.

        Of a loss that is not divided by samples nothing is known: csdctl itself counts what it is divided by.
        """
        assert isinstance(self._step, Step)
        if self._step.objective.counts_elements:
            return ""
        ranks = [number for number, size in enumerate(self._sizes) if size]
        batches = [[part[:-1] for part in self.samples(number)] for number in ranks]
        whole = [np.concatenate(column) for column in zip(*batches, strict=True)]
        (mean, summed), *parts = self._step.objective.losses(self._from_start([whole, *batches]))
        shares = [self._sizes[number] / sum(self._sizes) for number in ranks]
        together = sum(part[0] * share + part[1] for part, share in zip(parts, shares, strict=True))
        apart = abs(together - mean - summed) / max(abs(mean + summed), SMALLEST)
        return COUPLED.format(apart) if apart > LOSS_ROUNDING else ""

    def _from_start(self, batches: Iterable[list[Array]]) -> Iterator[list[Array]]:
        """Yield batches, each with the weights of the beginning."""
        for batch in batches:
            self._start.restore()
            yield batch

    def _find_reasons(self) -> tuple[str, ...]:
        """Return why the gradient depends on how samples are divided into batches."""
        normalizing = self._find_normalizing(self._own[self._step.layout.statistics])
        named = {"random numbers": self.drawing, "normalization by the batch": normalizing}
        reasons = [f"{what} in {_list_names(names)}" for what, names in named.items() if names]
        if augmentation := self._step.augmentation:
            reasons.append(f"augmentation by {augmentation.name}")
        if len({rank.weight for rank in self._ranks}) > 1:
            reasons.append("samples of different weight on different ranks")
        return tuple(reason[:MAX_REASON_CHARS] for reason in reasons)

    def _find_normalizing(self, changes: Array) -> list[str]:
        assert isinstance(self._step, Step)
        return self._step.states.find_normalizing(changes)

    def _relative(self, change: Array, whole: Array) -> float:
        layout = self._step.layout
        count = slice(layout.count, layout.count + 1)
        return _relative(change, whole, layout.gradients, layout.statistics, count)

    def _compute(self, number: int, batch: Iterable[Array], draw: int | None = None) -> Array:
        """Return the vector of a rank, float64; with `draw`, of weights that moved by their rounding."""
        rank, step = self._ranks[number], self._step
        self._start.restore()
        if draw is not None:
            self._round_otherwise(np.random.default_rng([self._seed, rank.rank, draw]))
        step.seeds.set_step(0, rank.rank)
        step.micro_batch_size = rank.micro_batch_size
        vector: Array = np.array(step.local(*batch), np.float64)
        self.drawing = step.seeds.find_drawing(0)
        return vector * (rank.weight / self._weight)

    def _round_otherwise(self, generator: np.random.Generator) -> None:
        roundoff = np.float32(ROUNDOFFS[compute_type(self._step.model)])
        for variable in self._weights:
            value = np.asarray(variable).astype(np.float32)
            # Two roundings wide: half of the weights that are stored in this type become a neighbour.
            moves = generator.random(value.shape, np.float32) * np.float32(4) - np.float32(2)
            variable.assign(value * (1 + moves * roundoff))


class CustomReference(Reference):
    """The same of a model with its own train_step: Keras computes the gradients without csdctl's graph."""

    _step: CustomStep

    def __init__(self, *arguments: Any, totals: Sequence[Array]) -> None:
        """`totals`: the sums of the step over all ranks, which later sums of the same step depend on."""
        super().__init__(*arguments)
        self._totals = totals

    def measure_update(self, after: Sequence[Array]) -> float:
        """Return how far the trained variables `after` the ranks' step are off, relative to its changes."""
        trained = {id(one) for _, variables in self._step.applied for one in variables}
        self._start.restore()
        start = [np.asarray(one.value).astype(np.float64) for one in self._step.state]
        self._compute(0, [column[:-1] for column in self.samples(0)])
        own = [np.asarray(one.value).astype(np.float64) for one in self._step.state]
        rows = zip(self._step.state, start, own, after, strict=True)
        changed = [(last - first, found - last) for one, first, last, found in rows if id(one) in trained]
        size, apart = (np.sqrt(sum(float(np.sum(pair[at] ** 2)) for pair in changed)) for at in (0, 1))
        return float(apart / size) if size else (np.inf if apart else 0.0)

    def _compute(self, number: int, batch: Iterable[Array], draw: int | None = None) -> Array:
        rank, step = self._ranks[number], self._step
        self._start.restore()
        if draw is not None:
            self._round_otherwise(np.random.default_rng([self._seed, rank.rank, draw]))
        step.seeds.set_step(0, rank.rank)
        samples, labels = batch
        vector = step.replay(samples, labels, self._totals)
        self.drawing = step.seeds.find_drawing(0) + ["tf.random"] * step.has_draws
        return vector * (rank.weight / self._weight)

    def _find_normalizing(self, changes: Array) -> list[str]:
        return self._step.find_normalizing(changes)

    def _find_coupling(self) -> str:
        """Return which of the sums differ from those of one batch, and by how much."""
        own, layout, position, wrong = self.measure_one_batch(), self._step.layout, 0, []
        spread = max(one.spread for one in self.of_ranks)
        for number, part in enumerate(self._step.layouts[:-1], start=1):
            at = slice(position, position := position + part.num_gradients)
            apart = _relative(self.sent - own, own, at)
            if apart > NEAR * spread:
                wrong.append(f"{number}, {part.name}, by {apart:.0e}")
        assert layout.gradients.stop == position
        return NOT_MEAN.format("; ".join(wrong)) if wrong else ""


NOT_MEAN = (
    "a loss that is not a mean over the samples of the batch, or compares them: the gradient of one batch of "
    "all samples differs in sum {}"
)


def _list_names(names: Sequence[str], at_most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - at_most} more" if len(distinct) > at_most else ""
    return ", ".join(distinct[:at_most]) + more


def _relative(change: Array, whole: Array, *parts: slice) -> float:
    """Return how large the `change` of a vector is, relative to each of the parts of the `whole`."""
    square = 0.0
    for part in parts:
        changed, norm = (float(np.linalg.norm(vector[part])) for vector in (change, whole))
        square += (changed / norm) ** 2 if norm else (np.inf if changed else 0.0)
    return float(np.sqrt(square))
