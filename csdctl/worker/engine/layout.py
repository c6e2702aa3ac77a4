"""The vector that the ranks sum in a step, and what follows from sums: loss, metrics, gradient noise.

Each rank turns its n samples of a step into one flat float32 vector. The sum of these vectors over the ranks,
divided by its counts, is the mean over all samples, whatever n is on each rank. A rank whose samples have a
weight multiplies its vector, including n, by that weight. The layout of the vector:

    [ Σ gradient | changes of layers' state · n | Σ loss, metrics' states, (loss count), n |
      stop | duration | seconds | norm ]

Where layers add a loss for each sample, which fit sums over the batch, its gradient and its sum stand after
the others, and are not divided.

A loss that is no mean over samples has a count of its own: unmasked elements, a sum of weights, or the public
samples among private ones with noise. After n, the number of samples, the training loop adds whether a stop
was requested, the duration of the step before, for each rank the seconds that it computed, and the rank's
`square_norm`.
docs/explanation/exact-gradients.md has the mathematics.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class VectorLayout:
    """Where the parts of a summed vector are."""

    num_gradients: int
    """Elements of all trainable variables together."""
    num_statistics: int
    num_states: int
    """Elements of the metrics' states."""
    has_loss_count: bool = False
    """Whether the loss is divided by a count of its own, which stands before n."""
    divides_gradients: bool = False
    """Whether gradients are divided by that count too, otherwise by n."""
    has_summed: bool = False
    """Whether a part of the loss is a sum over samples, not a mean, with a gradient of its own."""

    @property
    def gradients(self) -> slice:
        """The summed gradients of all trainable variables, flat, in the model's order."""
        return slice(0, self.num_gradients * (1 + self.has_summed))

    @property
    def statistics(self) -> slice:
        """The changes of the state that layers keep, times n."""
        return slice(self.gradients.stop, self.gradients.stop + self.num_statistics)

    @property
    def step_size(self) -> int:
        """Elements of the step's part. After it is the stop request: above 0 when a stop was requested."""
        size: int = self.statistics.stop + 2 + self.has_summed + self.num_states + self.has_loss_count
        return size

    @property
    def step(self) -> slice:
        """The step's part."""
        return slice(0, self.step_size)

    @property
    def sums(self) -> slice:
        """Loss, metrics' states, and the count that the loss is divided by."""
        return slice(self.statistics.stop, self.step_size - self.has_loss_count)

    @property
    def count(self) -> int:
        """The index of n."""
        return self.step_size - 1

    @property
    def divisor(self) -> int:
        """The index of the count that gradients are divided by."""
        return self.count - self.divides_gradients


@dataclass(frozen=True)
class GradientNoise:
    """Unbiased estimates from one step, or their sums over several (McCandlish et al. 2018, appendix A.1)."""

    variance: float = 0.0
    """The trace of the covariance of one sample's gradient."""
    square: float = 0.0
    """The squared norm of the true gradient; noise can make an estimate negative."""

    @classmethod
    def estimate(cls, parts: float, batch: float, num_parts: int, count: float) -> "GradientNoise":
        """Estimate both from the `square_norm` of the gradients of parts of a batch, added, and of the batch.

        Mean gradients of n_i samples each, n = Σ n_i, have E|g_i|² = |G|² + V/n_i, and their weighted mean g
        has E|g|² = |G|² + V/n. So V = (Σ n_i |g_i|² - n |g|²) / (parts - 1), for unequal n_i, too.
        """
        if num_parts < 2 or not math.isfinite(parts + batch):
            return cls()
        variance = (parts - batch) / (num_parts - 1)
        return cls(variance, (batch - variance) / count)

    def __add__(self, noise: "GradientNoise") -> "GradientNoise":
        return GradientNoise(self.variance + noise.variance, self.square + noise.square)

    @property
    def scale(self) -> float | None:
        """The gradient noise scale in samples, variance / square. None where it is not known."""
        return self.variance / self.square if self.variance > 0 and self.square > 0 else None


@dataclass(frozen=True)
class Sums:
    """Loss and metrics summed over samples, of one rank or of all."""

    loss: float
    states: tuple[float, ...]
    """Summed states of the metrics (objective.py)."""
    count: float
    """Divisor of the loss: samples, each counted with its weight, or unmasked elements."""

    @property
    def mean_loss(self) -> float:
        """The loss as fit reports it. Nan without samples."""
        return self.loss / self.count if self.count else math.nan


def add_sums(sums: Sequence[Sums]) -> Sums:
    """Return the sum of several. A sum over nothing has no states yet."""
    columns = zip(*(part.states for part in sums if part.states), strict=True)
    return Sums(
        sum(part.loss for part in sums),
        tuple(sum(column) for column in columns),
        sum(part.count for part in sums),
    )
