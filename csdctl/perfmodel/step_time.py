"""The compute time of one machine by batch size: α + β·b, with a second slope beyond a knee; pure.

α is the fixed cost of a step (the graph's overhead, the optimizer), β the time of one more sample. Beyond the
knee, where a batch no longer fits in memory, samples are computed in micro-batches.
"""

import math
from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.per_sample_s > 0):
            raise ValueError(f"a step cannot take {self.fixed_s} s + {self.per_sample_s} s per sample")

    def at(self, batch_size: int) -> float:
        """Return the seconds for `batch_size` samples; 0 for none."""
        if batch_size <= 0:
            return 0.0
        before = min(batch_size, self.knee)
        return self.fixed_s + self.per_sample_s * before + self.above_knee_s * (batch_size - before)

    def largest_within(self, time_s: float) -> int:
        """Return the largest batch that takes at most `time_s`; 0 when one sample takes longer."""
        if time_s < self.at(1):
            return 0
        left = time_s - self.fixed_s
        size = left / self.per_sample_s
        if size > self.knee:
            size = self.knee + (left - self.per_sample_s * self.knee) / self.above_knee_s
        nearest = round(size)  # 16.0 may arrive as 15.999999999999998
        return nearest if self.at(nearest) <= time_s * (1 + 1e-12) else math.floor(size)

    def scaled(self, factor: float) -> "StepTime":
        """Return the step time of a machine that is `factor` times as slow."""
        return StepTime(
            self.fixed_s * factor, self.per_sample_s * factor, self.knee, self.above_knee_s * factor
        )
