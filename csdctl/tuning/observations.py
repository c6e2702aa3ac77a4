"""What the machines report during one tuning: the outcome of a probe, and of a trial; pure values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from csdctl.tuning.plan import RankPlan
from csdctl.tuning.search import BestPlan


@dataclass(frozen=True)
class ProbeOutcome:
    """One batch size, probed on one machine."""

    batch_size: int
    step_time_s: float | None
    """Mean of forward, backward and apply; None: the batch did not fit in memory."""
    num_steps: int = 0
    peaks: Mapping[int, int] = field(default_factory=dict)
    """Peak memory in bytes by batch size, for every size that raised the peak of this probe process."""
    is_oom_kill: bool = False
    """The process was killed at this size; False with no step time: it was predicted not to fit."""

    @property
    def peak_memory_bytes(self) -> int:
        """The peak at this batch size; 0: a larger size had raised it before."""
        return self.peaks.get(self.batch_size, 0)


@dataclass(frozen=True)
class TrialResult:
    """The steps of a trial; sequences are in order of rank."""

    num_steps: int
    step_s: float
    """Of the whole fleet, from one step to the next."""
    samples_per_s: float
    compute_s: tuple[float, ...]
    """Of each rank in a step."""
    wall_s: float
    """Of all steps, including the ones that are not counted."""
    collective: str
    sum_s: float
    """One sum of the model's vector over these ranks, as timed when the group formed."""


@dataclass(frozen=True)
class TriedPlan:
    """A plan and the result of its trial."""

    best: BestPlan
    ranks: tuple[RankPlan, ...]
    """The host first, with batch size 0 when it sits out."""
    result: TrialResult

    @property
    def compute_s(self) -> dict[str, float]:
        """Seconds each machine computed in a step."""
        return {rank.node: seconds for rank, seconds in zip(self.ranks, self.result.compute_s, strict=True)}
