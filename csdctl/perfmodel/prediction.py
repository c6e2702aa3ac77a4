"""The rate of a fleet with given batch sizes, and where its time goes; pure.

    T = max_k (α_k + β_k b_k) · overhead_factor + T_collective         samples/s = Σ b_k / T

The overhead factor is the cost of synchronous steps, without the sum itself: the slowest of many noisy steps
is slower than their mean. It is measured (a trial's steps against this model), not assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.perfmodel.step_time import StepTime


@dataclass(frozen=True)
class RankModel:
    """One rank and the time of its steps."""

    node: str
    step_time: StepTime


@dataclass(frozen=True)
class Prediction:
    """A step of the whole fleet. Shares are of the time of all ranks together, and add up to 1."""

    step_s: float
    samples_per_s: float
    compute_share: float
    imbalance_share: float
    """Ranks that wait for the slowest."""
    communication_share: float
    ceiling_samples_per_s: float
    """The sum of the ranks' rates with these batch sizes if none waited for another."""


def predict(
    ranks: Sequence[RankModel], batch_sizes: Sequence[int], collective_s: float, overhead_factor: float = 1.0
) -> Prediction:
    """Predict a step of `ranks`, the host first, with these batch sizes; `collective_s` for one sum.

    Raises ValueError when every batch size is 0.
    """
    times = [rank.step_time.at(size) for rank, size in zip(ranks, batch_sizes, strict=True)]
    slowest = max(times)
    if slowest <= 0:
        raise ValueError("no rank has a sample to train on")
    step_s = slowest * overhead_factor + collective_s
    training = [(size, time) for size, time in zip(batch_sizes, times, strict=True) if size]
    compute_share = sum(times) / (len(times) * step_s)
    communication_share = (step_s - slowest) / step_s
    return Prediction(
        step_s=step_s,
        samples_per_s=sum(batch_sizes) / step_s,
        compute_share=compute_share,
        imbalance_share=max(0.0, 1 - compute_share - communication_share),
        communication_share=communication_share,
        ceiling_samples_per_s=sum(size / time for size, time in training),
    )
