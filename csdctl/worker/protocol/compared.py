"""A gradient compared with that of one process, and what the comparison is worth."""

import math
from dataclasses import dataclass

from csdctl.worker.protocol.bounds import Measured

MIN_SHARPNESS = 100.0
"""One sample's effect over the spread, from which on `verify` judges: ten times the spread is tolerated then,
and one sample is ten times as much."""


@dataclass(frozen=True)
class Compared:
    """A gradient against the one that rank 0 computes from the same samples.

    All numbers are relative to the latter, in the Euclidean norm. A rank's moving statistics and number of
    samples are part of its gradient here.
    """

    difference: Measured
    spread: Measured
    """How far rank 0's own result moves when its weights move by the rounding of their type."""
    one_sample: Measured
    """How far it moves when one sample is another one."""

    @property
    def is_sharp(self) -> bool:
        """Whether rounding is so far below the effect of one sample that both can be told apart."""
        return self.one_sample >= MIN_SHARPNESS * self.spread

    @property
    def tolerance(self) -> float:
        """As many times above the spread as it is below the effect of one sample."""
        return math.sqrt(self.spread * self.one_sample)
