"""A rank's step: a compiled graph, the state of the model, and the random states of a step.

State goes into a function of the graph, and a vector or a new state comes out. Nothing is changed that would
have to be set back. A step can be computed again, and its result may be dropped.
"""

import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from csdctl.worker.data.arrays import Array, fields_of
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.engine.layout import Sums, VectorLayout
from csdctl.worker.engine.tensorflow_c import BFLOAT16, FunctionInfo, GraphSession, Tensors
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.json_codec import Shape, from_json
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import CompiledStep, Runtime

LOCAL, APPLY, EVALUATE, NOISY = "local", "apply", "evaluate", "noisy"
METRICS, SCHEDULE, OWN = "metrics", "schedule", "own_{}"
PREFIX, BACKWARD, HEAD, JOIN = "prefix", "backward", "head", "join"
"""The functions of a graph. `GraphInfo.functions` has their arguments and results. OWN has a number."""
LOSS = "loss"
ROUNDOFFS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a type; the finest type first."""
CHUNK = 1 << 18
"""Elements of the vector that receive noise at a time: a slow node has little memory."""
InfoT = TypeVar("InfoT", bound="GraphInfo")
Exchange = Callable[[int, Array], Array]
"""Sums this rank's part over the ranks, given the number of the sum within the step."""


@dataclass(frozen=True)
class Slice:
    """A part of a vector, such as what one metric has there."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class VariableInfo:
    """A variable of the state."""

    shape: Shape
    dtype: str
    is_zero: bool = False
    """Whether its first value is 0; then it is not in the file of the state."""


@dataclass(frozen=True)
class SumInfo:
    """One of the sums of a step: gradients, changes of state, metrics' states and logs, and n."""

    layout: VectorLayout
    is_summed: bool = False
    """Whether the gradients are those of a sum over the samples, not of a mean."""


@dataclass(frozen=True)
class SplitInfo:
    """A model that is cut in two."""

    shape: Shape
    """The shape of one sample's output of the prefix."""
    dtype: str
    layout: VectorLayout
    """Of the vector of a rank, which has only the prefix."""
    head_shapes: tuple[Shape, ...]
    """The shapes of the head's trainable variables, then of its statistics and sums as one vector."""
    num_head_statistics: int
    state: tuple[int, ...]
    """The variables of the whole model's state that the other ranks have, in their order."""


@dataclass(frozen=True)
class GraphInfo:
    """What a machine must know of a compiled graph beside the graph."""

    functions: dict[str, FunctionInfo]
    variables: tuple[VariableInfo, ...]
    """The state, or weights, that are arguments of the functions."""


@dataclass(frozen=True)
class StepInfo(GraphInfo):
    """What a rank must know of a compiled step beside its graph."""

    num_weights: int
    layout: VectorLayout
    """Of a rank's vector. Of a step with several sums, of all of them together."""
    has_loss_scaling: bool
    """Whether an optimizer skips gradients that are not finite, and scales the loss (mixed_float16)."""
    num_seeds: int
    """The number of generators of random numbers."""
    metrics: tuple[Slice, ...]
    """The metrics' results, and where the state of each metric is."""
    sums: tuple[SumInfo, ...] = ()
    """The sums of the user's train_step, in their order; none for a step with the one of `layout`."""
    logs: tuple[str, ...] = ()
    rate_factors: tuple[float, ...] = (1.0,)
    """How many times the recipe's learning rate each optimizer has that follows it."""
    averages: tuple[tuple[int, int], ...] = ()
    """Pairs of variables: a trained one, and the moving average that takes its place in a saved model."""
    updated: tuple[tuple[int, ...], ...] = ()
    """Of an own train_step: the variables that optimizers train, then those of each optimizer."""
    split: SplitInfo | None = None
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By number of a variable, and last the learning rates, its datasets in a saved model; {}: unknown."""
    num_indices: int | None = None
    """The size of the smallest embedding; None without."""
    compute_type: str = "float32"
    """The coarsest type that a layer with weights computes in."""
    model_type: str = "float32"
    """The same of the user's model: `compute_type` is wider if the step was compiled for `verify`."""


class StepEngine:
    """Computes a rank's vector and applies the summed one. Has the state of model and optimizer."""

    def __init__(
        self,
        info: StepInfo,
        session: GraphSession,
        state: Sequence[Array],
        seed: int,
        *,
        rank: int = 0,
        micro_batch_size: int | None = None,
        weight: float = 1.0,
        noise: Noise | None = None,
        augmentation: Any = None,
    ) -> None:
        """`state`: the values of all variables, as `StepInfo.num_weights` says.

        A batch larger than `micro_batch_size` is computed in micro-batches whose vectors are added: the same
        gradient in less memory. `weight` is the weight of each of the rank's samples in the mean of all
        ranks. `augmentation` changes the samples of every batch.
        """
        self.info, self.augmentation = info, augmentation
        self.layout = info.layout
        self.layouts = [part.layout for part in info.sums] or [self.layout]
        """The layout of each sum of a step, in their order."""
        self.micro_batch_size = micro_batch_size
        self.rate = np.zeros((), np.float32)
        self.position = (0, rank)
        """The step and the rank whose random numbers are drawn."""
        self.session, self._noise = session, noise
        self._functions = session.find_all(info.functions)
        self._state = session.tensors(state)
        self._seed, self._rank, self._weight = seed, rank, np.array(weight, np.float32)

    @property
    def has_noise(self) -> bool:
        """Whether private samples are clipped and get noise."""
        return self._noise is not None

    @property
    def values(self) -> list[Array]:
        """The values of all variables that training changes, in a fixed order."""
        return self._state.arrays()

    @values.setter
    def values(self, values: Sequence[Array]) -> None:
        self._state = self.session.tensors(values)

    @property
    def weights(self) -> list[Array]:
        """The model's weights, as `Model.get_weights` has them."""
        return [self._state.array(place) for place in range(self.info.num_weights)]

    def averaged_values(self) -> list[Array]:
        """Return the values of the trained model: with moving averages, where the optimizer keeps some."""
        values = self.values
        for trained, average in self.info.averages:
            values[trained] = values[average]
        return values

    @property
    def rates(self) -> list[Array]:
        """The learning rates of the optimizers that follow the recipe's."""
        return [np.asarray(self.rate * factor, np.float32) for factor in self.info.rate_factors]

    def set_step(self, step: int, learning_rate: float) -> None:
        """Set the learning rate and the random states of the run's step `step`, counted from 0."""
        self.position = (step, self._rank)
        self.rate = np.array(learning_rate, np.float32)

    def seeds(self, part: int = 0, rank: int | None = None) -> Array:
        """Return the random states of a micro-batch of the step, shape (generators, 2), int64.

        They follow from seed, rank, if not this one, step and the micro-batch's number: a run that resumes
        draws the same numbers as one that was never interrupted.
        """
        suffix = f"/{part}" if part else ""
        keys = [self._key(f"/{number}{suffix}", rank) for number in range(self.info.num_seeds)]
        # A layer draws a few times in a step; shifting keeps the counters of consecutive steps apart.
        counters = [(self.position[0] << 10) & 0xFFFFFFFF] * len(keys)
        return np.array([keys, counters], np.int64).T.copy()

    @property
    def draw(self) -> Array:
        """What the numbers of tf.random follow from in this step, shape (2,), int32."""
        return np.array([self.position[0] & 0x7FFFFFFF, self._key() & 0x7FFFFFFF], np.int32)

    def _key(self, what: str = "", rank: int | None = None) -> int:
        return zlib.crc32(f"{self._seed}/{self.position[1] if rank is None else rank}{what}".encode())

    def local(
        self, images: Array, labels: Array, out: Array | None = None, *, private_copies: Array | None = None
    ) -> Array:
        """Return this rank's vector, shape (layout.step_size,), float32, sums rather than means.

        It is written to `out` when given. With noise, `private_copies`, shape (p,), says that the first p
        samples are private, and how often each of them occurs among these.
        """
        count = len(private_copies) if private_copies is not None and self.has_noise else 0
        images, labels = self.augment(images, labels, count)
        vector = np.zeros(self.layout.step_size, np.float32) if out is None else out
        self._add_plain(images[count:], labels[count:], vector)
        if count:
            # Once per step, whatever the micro-batch size: each further noisy sum would reveal more.
            self._add_noisy(images[:count], labels[:count], private_copies, vector)
        return vector

    def augment(self, images: Array, labels: Array, num_single: int = 0) -> tuple[Array, Array]:
        """Return the batch that is trained on. The first `num_single` samples do not depend on others."""
        if self.augmentation is None:
            return images, labels
        augmented: tuple[Array, Array] = self.augmentation(images, labels, *self.position, num_single)
        return augmented

    def _add_plain(self, images: Array, labels: Array, vector: Array) -> None:
        size = max(1, self.micro_batch_size or len(images))
        if len(images) == 0:
            vector[:] = 0
        for number, start in enumerate(range(0, len(images), size)):
            batch = slice(start, start + size)
            part = self.call(LOCAL, self.seeds(number), self._weight, images[batch], labels[batch]).array(0)
            if start:
                np.add(vector, part, out=vector)
            else:
                np.copyto(vector, part)

    def _add_noisy(self, images: Array, labels: Array, copies: Any, vector: Array) -> None:
        """Add the sum of clipped gradients with noise, times the weight: DP-SGD (Abadi et al. 2016).

        `copies`, shape (n,), has how often each sample occurs in this batch: the norm limits all its copies
        together. Only the node must be trusted, not the host or the other ranks: noise is added before any
        other code can read the sum. It comes from the kernel's random bytes. The recipe's seed is not
        suitable: the host knows it and could subtract the noise. The known weakness of Gaussian samples in
        floating point remains (Mironov 2012).
        """
        assert self._noise
        clip, gradients = self._noise.l2_norm_clip, vector[self.layout.gradients]
        sums = self.call(NOISY, self.seeds(), (clip / copies).astype(np.float32), images, labels).array(0)
        for start in range(0, len(gradients), CHUNK):
            part = slice(start, start + CHUNK)
            noise = secret_normal(len(gradients[part])) * (self._noise.noise_multiplier * clip)
            gradients[part] += (self._weight * (sums[part] + noise)).astype(np.float32)
        vector[self.layout.count] += len(images) * self._weight

    def run(
        self,
        images: Array,
        labels: Array,
        exchange: Exchange,
        out: Array | None = None,
        *,
        private_copies: Array | None = None,
    ) -> Sums:
        """Take a step on this rank's batch of n samples, or of none. Return the sums of all ranks.

        `out`, for the part of each sum, has at least as many elements.
        Raises what `exchange` raises. The state is then that before the step.
        """
        if not self.info.sums:
            vector = out if out is None else out[self.layout.step]
            return self.apply(exchange(0, self.local(images, labels, vector, private_copies=private_copies)))
        self._state, total = self._walk(images, labels, exchange, out)
        return self.read_sums(total[self.layouts[-1].sums.start :])

    def local_sums(self, images: Array, labels: Array, totals: Sequence[Array] = ()) -> Array:
        """Return this rank's parts of an own train_step's sums, joined. `totals`: of several ranks."""
        parts: list[Array] = []

        def exchange(number: int, part: Array) -> Array:
            parts.append(part.copy())
            return totals[number] if len(totals) else part

        self._walk(images, labels, exchange)
        return self.join(parts)

    def join(self, parts: Sequence[Array]) -> Array:
        """Return a step's parts of all sums as one vector, as `layout` says."""
        pairs = list(zip(self.layouts, parts, strict=True))
        gradients = [part[layout.gradients] for layout, part in pairs]
        states = [part[layout.statistics] for layout, part in pairs]
        last, layout = parts[-1], self.layouts[-1]
        return np.concatenate([*gradients, *states, last[layout.sums.start : layout.step_size]])

    def _walk(
        self, images: Array, labels: Array, exchange: Exchange, out: Array | None = None
    ) -> tuple[Tensors, Array]:
        """Go through a step of several sums. Return the state after it, and the last sum."""
        count = np.array(len(images), np.float32)
        if len(images):
            images, labels = self.augment(images, labels)
        else:  # the step is taken all the same, for its sums
            images, labels = (np.zeros((1, *part.shape[1:]), part.dtype) for part in (images, labels))
        inputs: list[Any] = [self._state, self.seeds(), self.draw, self.rate, self._weight, count]
        inputs += [*fields_of(images).values(), *fields_of(labels).values()]
        total = np.zeros(0, np.float32)
        for number, layout in enumerate(self.layouts):
            results = self._functions[OWN.format(number)](*inputs)
            part = results.array(0)
            if out is not None:
                out[layout.step] = part
                part = out[layout.step]
            total = exchange(number, part)[layout.step].astype(np.float32)  # a copy: the next sum is to come
            inputs += [total, results.tail(1)]
        return self._functions[OWN.format(len(self.layouts))](*inputs), total

    def alone(self, images: Array, labels: Array, *, private_copies: Array | None = None) -> Sums:
        """Take a step without other ranks."""
        return self.run(images, labels, lambda _, part: part, private_copies=private_copies)

    def apply(self, total: Array) -> Sums:
        """Divide the step's part of a summed vector by its counts and take one optimizer step."""
        sums = self.read_sums(total[self.layout.sums])
        if total[self.layout.count] > 0:
            self._state = self.call(APPLY, self.rate, total)
        return sums

    def scheduled_rate(self, step: int) -> float | None:
        """Return the learning rate of the recipe's schedule after `step` steps. None without a schedule."""
        if SCHEDULE not in self._functions:
            return None
        return float(self._functions[SCHEDULE](np.array(step, np.int64)).array(0))

    def square_norm(self, vector: Array) -> float:
        """Return the count of the samples of a vector times the squared norm of their mean gradient."""
        gradient, count = vector[self.layout.gradients], float(vector[self.layout.count])
        return float(np.dot(gradient, gradient)) / count if count > 0 else 0.0

    def evaluate(self, images: Array, labels: Array, number: int = 0) -> Sums:
        """Return the sums of a batch, without training. Random numbers follow from its `number`."""
        return self.read_sums(self.call(EVALUATE, self.seeds(number), images, labels).array(0))

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the metrics of `sums` by name, of an own train_step those that something was added to."""
        results = self._results(sums.states, sums.count) if sums.states else {}
        if not self.info.sums:
            return results
        return {name: value for name, value in results.items() if name != LOSS and not math.isnan(value)}

    def _results(self, states: Sequence[float], count: float) -> dict[str, float]:
        info, size = self.info, len(states) - len(self.info.logs)
        added = np.array(states[:size], np.float32)
        values = self._functions[METRICS](added).array(0) if info.metrics else ()
        results = {
            metric.name: float(value)
            for metric, value in zip(info.metrics, values, strict=True)
            if not info.sums or added[metric.start : metric.stop].any()
        }
        logs = {name: value / count for name, value in zip(info.logs, states[size:], strict=True) if count}
        names = {metric.name for metric in info.metrics}
        # A metric that nothing was added to has 0, as Keras' own for the loss where train_step computes it.
        return {name: value for name, value in logs.items() if value or name not in names} | results

    def rehearse(self, images: Array, labels: Array, private_copies: Array | None) -> None:
        """Reach full speed. The results are not kept."""
        before = self._state
        if self.info.sums:
            self.local_sums(images, labels)
            return
        vector = self.local(images, labels)
        if private_copies is not None:
            self.local(images, labels, private_copies=private_copies)
        vector[[self.layout.divisor, self.layout.count]] = 1
        self.apply(vector)
        self._state = before

    def call(self, name: str, *arguments: Any) -> Tensors:
        """Return what a function returns of the state and of arguments, arrays or Tensors."""
        inputs: list[Any] = []
        for argument in arguments:
            is_single = not isinstance(argument, np.ndarray) or argument.dtype == BFLOAT16
            inputs += [argument] if is_single else fields_of(argument).values()
        return self._functions[name](self._state, *inputs)

    def read_sums(self, tail: Array) -> Sums:
        """Return loss sum, metric sums and count of the part `layout.sums` of a summed vector."""
        *values, count = map(float, tail)
        if not self.info.sums:
            loss, *states = values
            if self.layout.has_summed:
                loss += states.pop(0) * count
            return Sums(loss, tuple(states), count)
        results = (self._results(values, count) if count else {}) or {"": 0.0}
        # `loss`, else the first name with it, else the first of all.
        name = min(results, key=lambda name: (name != LOSS, LOSS not in name))
        return Sums(results[name] * count, tuple(values), count)


def load_compiled(
    files: CompiledStep, kind: type[InfoT], runtime: Runtime
) -> tuple[InfoT, GraphSession, list[Array]]:
    """Return info, session and first state of a graph. Raises WorkerError if a file is not what was sent."""
    try:
        info = load_info(files, kind)
        for path in (files.graph, files.state):
            check_stored(path)
        content = Path(files.graph).read_bytes()
        with np.load(files.state, allow_pickle=False) as archive:
            stored = (archive[name] for name in sorted(archive.files))
            state = []
            for variable in info.variables:
                dtype = BFLOAT16 if variable.dtype == "bfloat16" else np.dtype(variable.dtype)
                is_zero = variable.is_zero
                state.append(np.zeros(variable.shape, dtype) if is_zero else next(stored).view(dtype))
    except OSError as error:
        raise WorkerError(f"the model cannot be read: {error}", remedy="run `csdctl deploy` again") from None
    return info, GraphSession(content, runtime), state


def load_info(files: CompiledStep, kind: type[InfoT]) -> InfoT:
    """Return what is known of a graph. Raises WorkerError if the file is not what was sent, and OSError."""
    check_stored(files.info)
    return from_json(kind, Path(files.info).read_text())


def secret_normal(count: int) -> Array:
    """Return standard normal numbers, shape (count,), float64, that cannot be reproduced (Box, Muller 1958).

    From `os.urandom`, the kernel's cryptographic generator: the state of numpy's and TensorFlow's generators
    could be recovered from their output.
    """
    pairs = (count + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2.0 * np.log((bits[0] + 1.0) / 2**53))  # of 0 < u ≤ 1
    angle = bits[1] * (2.0 * np.pi / 2**53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
