"""The user's options for tuning."""

from dataclasses import dataclass, field

from csdctl.errors import InputError
from csdctl.tuning.plan import FEATURES, SPLIT
from csdctl.tuning.search import Limits
from csdctl.tuning.stannis import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_MARGIN_SCALE,
    DEFAULT_STEP_DIVISOR,
    check_arguments,
)
from csdctl.workflows.train.options import AUTO, check_cut, check_strategy

PROBE_DEADLINE_S = 600.0
TUNING_HELP = "see `csdctl tune --help`"
THROUGHPUT, TIME_TO_ACCURACY = "throughput", "time-to-accuracy"
FIT, STANNIS = "fit", "stannis"
METHODS = (FIT, STANNIS)


@dataclass(frozen=True)
class TuneOptions:
    """The method, the limits of a plan, and how to measure; raises InputError for invalid values."""

    method: str = FIT
    limits: Limits = field(default_factory=Limits)
    is_fresh: bool = False
    """Ignore earlier measurements."""
    is_exploring: bool = True
    """Probe other runtime settings too."""
    is_host_training: bool = True
    """False: the host only sums gradients and serves data to the nodes."""
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    step_divisor: float = DEFAULT_STEP_DIVISOR
    margin_scale: float = DEFAULT_MARGIN_SCALE
    """Algorithm 1's list, C and E."""
    probe_duration_s: float = 1.0
    strategy: str = AUTO
    """The strategies to compare: AUTO for all, or the only one."""
    goal: str = THROUGHPUT
    """What the plan has the most of: throughput, or progress per second (TIME_TO_ACCURACY)."""
    cut: str = ""
    """With the strategy `split`: the only cut."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        check_cut(self.strategy, self.cut)
        if self.strategy in (FEATURES, SPLIT) and (self.method != FIT or not self.is_host_training):
            raise InputError(
                f"--strategy {self.strategy} needs --method {FIT}, and a host that trains",
                remedy="leave out --method and --no-host, or the strategy",
            )
        if self.method not in METHODS:
            raise InputError(f"unknown method {self.method!r}", remedy=f"one of {', '.join(METHODS)}")
        if self.method != FIT and self.limits.given:
            raise InputError(
                f"{self.method} takes no limits, received {', '.join(self.limits.given)}",
                remedy=f"leave them out, or use --method {FIT}",
            )
        if self.goal == TIME_TO_ACCURACY and (self.method != FIT or self.limits.global_batch):
            raise InputError(
                f"--for {TIME_TO_ACCURACY} chooses the global batch size, with --method {FIT}",
                remedy="leave out --global-batch and --method, or --for",
            )
        of_paper = self.batch_sizes, self.step_divisor, self.margin_scale
        defaults = DEFAULT_BATCH_SIZES, DEFAULT_STEP_DIVISOR, DEFAULT_MARGIN_SCALE
        if self.method != STANNIS and of_paper != defaults:
            raise InputError(
                f"{self.method} does not take --batch-sizes, -C and -E",
                remedy=f"leave them out, or use --method {STANNIS}",
            )
        check_arguments(*of_paper)
        if not 0 <= self.probe_duration_s < PROBE_DEADLINE_S:
            raise InputError(
                f"--probe-seconds must be at least 0 and below {PROBE_DEADLINE_S:g}, "
                f"received {self.probe_duration_s}",
                remedy=TUNING_HELP,
            )
