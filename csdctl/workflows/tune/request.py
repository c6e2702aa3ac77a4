"""What a user asks of one tuning, checked before any machine is used."""

from dataclasses import dataclass, field
from typing import Final, Literal

from csdctl.documents import check_fields
from csdctl.errors import InputError, option
from csdctl.tuning.plan import FEATURES, SPLIT
from csdctl.tuning.search import Limits
from csdctl.tuning.stannis import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_MARGIN_SCALE,
    DEFAULT_STEP_DIVISOR,
    check_arguments,
)
from csdctl.workflows.train.request import AUTO, check_strategy
from csdctl.workflows.tune.tuning_run import PROBE_DEADLINE_S

THROUGHPUT: Final = "throughput"
TIME_TO_ACCURACY: Final = "time-to-accuracy"
FIT: Final = "fit"
STANNIS: Final = "stannis"
BY_FIT = f"{option('method')} {FIT}"
"""The option that chooses the fit method, in messages."""


@dataclass(frozen=True)
class TuneOptions:
    """The method, the limits of a plan, and how to measure. Raises InputError for invalid values."""

    method: Literal["fit", "stannis"] = FIT
    """'fit', or 'stannis' for Algorithm 1."""
    limits: Limits = field(default_factory=Limits)
    """Limits of the global batch."""
    is_fresh: bool = False
    """Ignore earlier measurements."""
    is_host_training: bool = True
    """False: the host only sums gradients and serves data to the nodes."""
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    """Algorithm 1's list."""
    step_divisor: float = DEFAULT_STEP_DIVISOR
    """Algorithm 1's C."""
    margin_scale: float = DEFAULT_MARGIN_SCALE
    """Algorithm 1's E."""
    probe_duration_s: float = 1.0
    """The shortest time of one measurement."""
    strategy: str = AUTO
    """The strategy: 'data-parallel', 'features' or 'split'. 'auto' compares all."""
    goal: Literal["throughput", "time-to-accuracy"] = THROUGHPUT
    """What the plan has the most of: 'throughput', or with 'time-to-accuracy' progress per second."""
    cut: str = ""
    """With the strategy `split`: the only cut."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_strategy(self.strategy, self.cut)
        if self.strategy in (FEATURES, SPLIT) and (self.method != FIT or not self.is_host_training):
            raise InputError(
                f"{option('strategy')} {self.strategy} needs {BY_FIT}, and a host that trains",
                remedy=f"leave out {option('method')} and {option('is_host_training=False')}, "
                "or the strategy",
            )
        if self.method != FIT and self.limits.given:
            raise InputError(
                f"{self.method} takes no limits, received {', '.join(self.limits.given)}",
                remedy=f"leave them out, or use {BY_FIT}",
            )
        if self.goal == TIME_TO_ACCURACY and (self.method != FIT or self.limits.global_batch):
            raise InputError(
                f"{option('goal')} {TIME_TO_ACCURACY} chooses the global batch size, with {BY_FIT}",
                remedy=f"leave out {option('limits.global_batch')} and {option('method')}, "
                f"or {option('goal')}",
            )
        arguments = self.batch_sizes, self.step_divisor, self.margin_scale
        defaults = DEFAULT_BATCH_SIZES, DEFAULT_STEP_DIVISOR, DEFAULT_MARGIN_SCALE
        if self.method != STANNIS and arguments != defaults:
            raise InputError(
                f"{self.method} does not take {option('batch_sizes')}, {option('step_divisor')} and "
                f"{option('margin_scale')}",
                remedy=f"leave them out, or use {option('method')} {STANNIS}",
            )
        check_arguments(*arguments)
        if not 0 <= self.probe_duration_s < PROBE_DEADLINE_S:
            raise InputError(
                f"{option('probe_duration_s')} must be at least 0 and below {PROBE_DEADLINE_S:g}, "
                f"received {self.probe_duration_s}",
                remedy="see `csdctl tune --help`",
            )
