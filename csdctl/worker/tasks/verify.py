"""Verification: one step of all ranks against one process, on the user's own model and fleet.

Two questions are answered apart from each other. Is the sum that the ranks apply the sum of what each of them
computed? Each rank also sends its vector to rank 0, which adds them in float64. And has each rank computed
what one process computes from the same samples? Rank 0 does that, with each rank's random states
(`Reference`). Layers that compute in 16 bits compute in float32 here: rounding to 16 bits hides a sample.

The samples are random, drawn from (seed, rank) wherever they are needed: no private sample is sent, and rank
0 can repeat the computation of all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from csdctl.worker.compute.backend import keras
from csdctl.worker.compute.compile import AnyStep
from csdctl.worker.compute.custom_step import CustomStep
from csdctl.worker.compute.keras_internals import find_smallest_embedding, flatten_layers
from csdctl.worker.compute.split import SplitStep, micro_batch_size
from csdctl.worker.compute.statistics import Snapshot
from csdctl.worker.compute.step import Step
from csdctl.worker.data.arrays import Array, fields_of
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

    class Policy(keras.DTypePolicy):  # type: ignore[misc]
        @property
        def variable_dtype(self) -> str:
            return variable_dtype

    return Policy(dtype)


NUM_DRAWS = 3
"""Number of random roundings of the weights; the spread is their largest effect."""
NEAR = 8.0
"""Distance from one batch of all samples, in spreads, that needs no explanation."""
LOSS_ROUNDING = 1e-5
"""Relative difference of the loss of one batch and of its parts that rounding in float32 explains."""
COUPLED = "a layer or loss that compares samples of a batch: the loss of its parts is off by {:.0e}"
SMALLEST = 2.0**-126
"""The smallest float32 that every processor adds; some take smaller ones for 0."""


class ExactSum:
    """Adds the ranks' vectors in float64, to judge their sum in float32."""

    def __init__(self, size: int, spec: RunSpec | None = None) -> None:
        """`spec`: its compression also rounds; None: nothing else than float32 does."""
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
    """Computes the vectors of all `ranks` in this process, with each rank's samples and random states.

    Every comparison comes with two measures of what it is worth, both from this model and these samples:

    - the spread: how far rank 0's own vector moves when each weight moves by the rounding of the type that
      its layer computes in. Kernels of other processors and other numbers of threads round as differently;
    - one sample: how far the vector moves when one sample of the batch is another one. A difference of this
      size is a sample that was lost or counted twice, and must be far outside of the spread to be visible.

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
        normalizing = self._step.find_normalizing(self._own[self._step.layout.statistics])
        named = {"random numbers": self.drawing, "normalization by the batch": normalizing}
        reasons = [
            f"{what} in {list_names(list(dict.fromkeys(names)), 3)}" for what, names in named.items() if names
        ]
        if augmentation := self._step.augmentation:
            reasons.append(f"augmentation by {augmentation.name}")
        if len({rank.weight for rank in self._ranks}) > 1:
            reasons.append("samples of different weight on different ranks")
        return tuple(reason[:400] for reason in reasons)

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
        vector = self._vector(*batch)
        self.drawing = step.seeds.find_drawing(0) + ["tf.random"] * getattr(step, "has_draws", False)
        return vector * (rank.weight / self._weight)

    def _vector(self, samples: Array, labels: Array) -> Array:
        return np.array(self._step.local(samples, labels), np.float64)

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
        """Return how far what the optimizers changed is off `after` the ranks' step, relative to its changes.

        The trained variables count as one, and the variables of each optimizer, as Adam's first step hardly
        depends on the scale of the gradient. Infinite if an optimizer did not step once for each of its sums.
        """
        step = self._step
        self._start.restore()
        start = [np.asarray(one.value).astype(np.float64) for one in step.state]
        self._compute(0, [column[:-1] for column in self.samples(0)])
        own = [np.asarray(one.value).astype(np.float64) for one in step.state]
        rows = {id(one): row for one, *row in zip(step.state, start, own, after, strict=True)}
        optimizers = [optimizer for optimizer, _ in step.applied]
        for optimizer in optimizers:
            first, _, found = rows.get(id(optimizer.iterations), (0, 0, optimizers.count(optimizer)))
            if found - first != optimizers.count(optimizer):
                return float(np.inf)
        groups = [[one for _, variables in step.applied for one in variables]]
        groups += [[one for one in each.variables if one is not each.iterations] for each in optimizers]
        return max(_change_apart([rows[id(one)] for one in group if id(one) in rows]) for group in groups)

    def _vector(self, samples: Array, labels: Array) -> Array:
        return self._step.replay(samples, labels, self._totals)

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
        if not wrong:
            return ""
        why = "a loss that is not a mean over the samples of the batch, or compares them"
        return f"{why}: the gradient of one batch of all samples differs in sum {'; '.join(wrong)}"


def _change_apart(rows: Sequence[Sequence[Array]]) -> float:
    """Return how far variables are off after their change, relative to it; rows of (before, after, found)."""
    size = np.sqrt(sum(float(np.sum((after - before) ** 2)) for before, after, _ in rows))
    apart = np.sqrt(sum(float(np.sum((found - after) ** 2)) for _, after, found in rows))
    return float(apart / size) if size else float(np.inf if apart else 0.0)


def _relative(change: Array, whole: Array, *parts: slice) -> float:
    """Return how large the `change` of a vector is, relative to each of the parts of the `whole`."""
    square = 0.0
    for part in parts:
        changed, norm = (float(np.linalg.norm(vector[part])) for vector in (change, whole))
        square += (changed / norm) ** 2 if norm else (np.inf if changed else 0.0)
    return float(np.sqrt(square))


MAX_SAMPLES = 16
"""Largest number of samples of a rank: enough for unequal batches, few enough for rank 0 to compute all."""
MAX_INTEGER = 128
"""Integers are drawn below this and below the size of every embedding, where nothing is known of the data."""
MAX_COLUMNS = 1024
"""Largest number of columns of a table whose columns have ranges of their own."""
Ranges = dict[str, Annotated[tuple[tuple[float, float], ...], MaxLength(MAX_COLUMNS, 1)]]
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
    seed: int, rank: int, count: int, example: tuple[Array, Array], model: Any, ranges: Ranges | None = None
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


class Verify(ModelTask):
    """Takes one step, and compares its gradient with that of one process."""

    _weights_hash = ""
    _dtype = ""
    """The coarsest type that a layer of the user's model computes in."""

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples; of the head of a model, features."""
        samples, labels = super().example(count)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def settle(
        self, communicator: Communicator, before: Sequence[int], hashes: Mapping[int, str] = {}
    ) -> None:
        """Tell those that have joined who takes part; there is no state."""
        for rank in communicator.admitted if self.is_root else ():
            communicator.give_state(rank, b"")
        if self.is_root:
            self.reporter.emit(Joined, 1, 0, 0, 0, dict.fromkeys(map(str, communicator.members), 0), True)

    def run(self, communicator: Communicator) -> str:
        """Take the step; raises WorkerError when ranks are missing, or hold different weights after it."""
        self._check_members(communicator)
        self._sizes = verified_sizes([rank.batch_size for rank in self.spec.ranks])
        self._ranges = communicator.gather(self._find_ranges() if self.is_root else {}, Ranges)[0]
        self._start = Snapshot(self.whole_model.variables)
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

    def _check_members(self, communicator: Communicator) -> None:
        """Raise WorkerError unless all ranks of the plan take part; the others wait until rank 0 ends."""
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
        """Return the sum of `vector` over all ranks; raises as `_check_members`, and StepVoidError."""
        total = np.array(communicator.sum(vector))
        self._check_members(communicator)
        return total

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
        total = self._sum(communicator, own)[self.layout.step]
        self._start.restore()
        reference = self._make_reference() if self.is_root else None
        verified = self._judge(communicator, vector, total, reference)
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
            totals.append(self._sum(communicator, own)[step.layouts[number].step])
            return totals[-1]

        step.run(*self._draw(self.me.rank, self._sizes[self.me.rank]), exchange)
        after = Snapshot(step.state)
        values = [np.asarray(one.value).astype(np.float64) for one in step.state]
        start.restore()
        reference = self._make_reference(totals) if self.is_root else None
        verified = self._judge(communicator, step.join(parts), step.join(totals), reference)
        if isinstance(reference, CustomReference):
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

    def _judge(
        self, communicator: Communicator, vector: Array, total: Array, reference: Reference | None
    ) -> Verified | None:
        """Compare this rank's `vector` and all others, and their sum `total`; rank 0 has the `reference`."""
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
        """Return the random samples of a rank; of the head of a model, their features."""
        seed, example = self.spec.recipe.seed, self.reader.first(0)
        samples, labels = draw_samples(seed, rank, count, example, self.whole_model, self._ranges)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def _compute(self) -> Array:
        """Return this rank's vector."""
        self.step.set_step(0, self.spec.recipe.learning_rate or 0.0)
        return np.array(self.step.local(*self._draw(self.me.rank, self._sizes[self.me.rank])))

    def _describe(self, exact: ExactSum, total: Array, reference: Reference) -> Verified:
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

    The ranks compute a step one after the other, together with rank 0, so that the gradient of each is known;
    then all at once.
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
                reference.compare(split.vector(total).astype(np.float64))
        total = self._sum_of(communicator, self._sizes)
        verified = None
        if reference and isinstance(split, SplitStep):
            reference.sent = split.vector(total).astype(np.float64)
            verified = self._describe(exact, total[gradients], reference)
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
        total: Array = self._sum(communicator, vector)[layout.step]
        return total
