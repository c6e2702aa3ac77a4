"""The results of one tuning's measurements: outcomes of probes and trials; pure values."""

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
    """Whether the process was killed at this size; False without a step time: it was predicted not to fit."""

    @property
    def peak_memory_bytes(self) -> int:
        """The peak at this batch size; 0: an earlier, larger size had set it."""
        return self.peaks.get(self.batch_size, 0)


@dataclass(frozen=True)
class TrialResult:
    """The steps of a trial; sequences are in order of rank."""

    num_steps: int
    step_s: float
    """Seconds from one step of the fleet to the next."""
    samples_per_s: float
    compute_s: tuple[float, ...]
    """Compute seconds of each rank in a step."""
    wall_s: float
    """Seconds of all steps, including those that are not counted."""
    collective: str
    sum_s: float
    """Seconds of one sum of the model's vector over these ranks, measured when the group formed."""
    fixed_s: float = 0.0
    """Seconds of the whole trial besides its steps: starting or taking processes, linking them, ending."""
    peak_memory_bytes: tuple[int, ...] = ()
    """Of each rank's process; () when one did not report it."""


@dataclass(frozen=True)
class TriedPlan:
    """A plan and the result of its trial."""

    best: BestPlan
    ranks: tuple[RankPlan, ...]
    """The host first, with batch size 0 when it does not train."""
    result: TrialResult

    @property
    def compute_s(self) -> dict[str, float]:
        """Seconds each machine computed in a step."""
        return {rank.node: seconds for rank, seconds in zip(self.ranks, self.result.compute_s, strict=True)}
