"""The compute time of one machine by batch size, the time of a sum, and the rate of a fleet. Pure.

    T = max_k (α_k + β_k b_k) · overhead_factor + T_sum         samples/s = Σ b_k / T

α is the fixed cost of a step (the graph's overhead, the optimizer), β the time of one more sample. Beyond the
knee, where a batch no longer fits in memory, samples are computed in micro-batches.

The overhead factor is the cost of synchronous steps, without the sum itself: the slowest of many noisy steps
is slower than their mean. It is measured: the steps of a trial are compared with this model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MIN_OVERHEAD_FACTOR = 0.5
"""A smaller factor is not believed: the time of the sum must be wrong."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of forward, backward and apply as a function of the batch size."""

    fixed_s: float
    """α, at least 0."""
    per_sample_s: float
    """β, above 0."""
    knee: float = math.inf
    """Samples beyond this number take `above_knee_s` each."""
    above_knee_s: float = 0.0
    largest: int | None = None
    """The largest batch that is possible; None: any."""

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.per_sample_s > 0):
            raise ValueError(f"a step cannot take {self.fixed_s} s + {self.per_sample_s} s per sample")

    def at(self, batch_size: int) -> float:
        """Return the seconds for `batch_size` samples. 0 for none."""
        if batch_size <= 0:
            return 0.0
        before = min(batch_size, self.knee)
        return self.fixed_s + self.per_sample_s * before + self.above_knee_s * (batch_size - before)

    def largest_within(self, time_s: float) -> int:
        """Return the largest batch that takes at most `time_s`. 0 when one sample takes longer."""
        if time_s < self.at(1):
            return 0
        samples_s = time_s - self.fixed_s
        size = samples_s / self.per_sample_s
        if size > self.knee:
            size = self.knee + (samples_s - self.per_sample_s * self.knee) / self.above_knee_s
        nearest = round(size)  # 16.0 may arrive as 15.999999999999998
        batch_size = nearest if self.at(nearest) <= time_s * (1 + 1e-12) else math.floor(size)
        return batch_size if self.largest is None else min(batch_size, self.largest)

    def scaled(self, factor: float) -> "StepTime":
        """Return the step time of a machine that is `factor` times as slow."""
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            per_sample_s=self.per_sample_s * factor,
            above_knee_s=self.above_knee_s * factor,
        )


@dataclass(frozen=True)
class CollectiveCost:
    """The coefficients of a sum on a fleet, all at least 0.

        seconds = fixed + per_rank · (ranks - 1) + (per_byte + per_rank_byte · (ranks - 1)) · bytes

    Every rank's vector goes to the host, and the sum back. If the host's network is the limit, the time grows
    with ranks × bytes. If each link is the limit, it grows only with the bytes.
    """

    fixed_s: float = 0.0
    per_rank_s: float = 0.0
    per_byte_s: float = 0.0
    per_rank_byte_s: float = 0.0

    def at(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds to sum vectors of `num_bytes` over `num_ranks`. 0 for one rank."""
        if num_ranks < 2:
            return 0.0
        num_links = num_ranks - 1
        per_byte_s = self.per_byte_s + self.per_rank_byte_s * num_links
        return self.fixed_s + self.per_rank_s * num_links + per_byte_s * num_bytes


@dataclass(frozen=True)
class RankModel:
    """A rank that may train, and the time of its steps."""

    node: str
    step_time: StepTime
    is_required: bool = False
    """Whether it must be in a plan: the host, or a node with private data."""
    batch_size: int = 0
    """Batch size in a plan; 0: none is chosen yet."""
    private_share: float = 0.0
    """Its private samples as a share of all samples. Its share of every step must be at least as large."""


@dataclass(frozen=True)
class StepPrediction:
    """A step of the whole fleet."""

    step_s: float
    samples_per_s: float
    ceiling_samples_per_s: float
    """The sum of the ranks' rates with these batch sizes if no rank waited."""


def predict(
    ranks: Sequence[RankModel], batch_sizes: Sequence[int], collective_s: float, overhead_factor: float = 1.0
) -> StepPrediction:
    """Predict a step of `ranks`, the host first, with these batch sizes. `collective_s`: seconds of a sum.

    Raises ValueError when every batch size is 0.
    """
    times = [rank.step_time.at(size) for rank, size in zip(ranks, batch_sizes, strict=True)]
    slowest = max(times)
    if slowest <= 0:
        raise ValueError("no rank has a sample to train on")
    step_s = slowest * overhead_factor + collective_s
    training = [(size, time) for size, time in zip(batch_sizes, times, strict=True) if size]
    ceiling = sum(size / time for size, time in training)
    return StepPrediction(step_s, sum(batch_sizes) / step_s, ceiling)


def calibrate_overhead(ranks: Sequence[tuple[StepTime, int]], step_s: float, sum_s: float) -> float:
    """Return the overhead factor with which ranks of these step times and batch sizes take `step_s` together.

    It is below 1 when they were faster than alone, and at least MIN_OVERHEAD_FACTOR.
    """
    slowest_s = max(step_time.at(size) for step_time, size in ranks)
    return max(MIN_OVERHEAD_FACTOR, (step_s - sum_s) / slowest_s)
