"""The validated request for one training run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.documents import check_fields
from csdctl.errors import InputError, option
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.supervision.event_callbacks import Callback
from csdctl.supervision.run_setup import Patience
from csdctl.tuning.plan import FEATURES, SPLIT, STRATEGIES
from csdctl.worker.protocol.features import FLOAT32, PRECISIONS
from csdctl.worker.protocol.run_spec import SplitSpec

AUTO = "auto"
"""The strategy that the plan names: `tune` has compared them."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of one run. Raises InputError for invalid values."""

    deadlines: Patience = field(default_factory=Patience)
    """Deadlines and retry limits; only `start_s` and `silence_s` are checked here."""
    max_steps: int | None = None
    """Stop after this many steps."""
    min_nodes: int | None = None
    """Start with at least this many nodes; others join when they become reachable. End when fewer are left.
    None: start with all, end when none is left."""
    is_balanced: bool | None = None
    """Whether batch sizes are adjusted when a node's speed changes. None: yes, or as the resumed run."""
    checkpoint_interval_s: float | None = None
    """Time between checkpoints, besides those after each epoch. None: the default, or as the resumed run."""
    num_checkpoints: int | None = None
    """Checkpoints to keep. None: the default, or as the resumed run."""
    callbacks: tuple[Callback, ...] = ()
    """Called with every event of the run, in separate threads."""
    strategy: str = AUTO
    """The strategy: 'data-parallel', 'features' or 'split'; 'auto' is the strategy of the plan."""
    feature_precision: str = FLOAT32
    """For `features`: the type of stored features, 'float32' or 'float16'."""
    cut: str = ""
    """For `split`: the last layer that nodes compute."""
    num_micro_batches: int = SplitSpec.num_micro_batches
    """For `split`: the number of parts of each rank's batch."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_strategy(self.strategy, self.cut)
        _check_choice("feature_precision", self.feature_precision, PRECISIONS)
        if self.strategy != AUTO:
            self.check_strategy_options(self.strategy)
        for name, value, least in (
            ("deadlines.start_s", self.deadlines.start_s, 1),
            ("deadlines.silence_s", self.deadlines.silence_s, 1),
            ("max_steps", self.max_steps, 1),
            ("min_nodes", self.min_nodes, 0),
            ("checkpoint_interval_s", self.checkpoint_interval_s, 1),
            ("num_checkpoints", self.num_checkpoints, 1),
            ("num_micro_batches", self.num_micro_batches, 1),
        ):
            if value is not None and not value >= least:  # also for NaN
                problem = f"{option(name)} must be at least {least}, received {value:g}"
                raise InputError(problem, remedy="pass a larger number, or leave it out for the default")

    def check_strategy_options(self, chosen: str) -> None:
        """Raise InputError for an option of another strategy than `chosen`."""
        for name, value, default, strategy in (
            ("feature_precision", self.feature_precision, FLOAT32, FEATURES),
            ("num_micro_batches", self.num_micro_batches, SplitSpec.num_micro_batches, SPLIT),
        ):
            if value != default and chosen != strategy:
                problem = f"{option(name)} {value} has no effect with the strategy {chosen}"
                raise InputError(problem, remedy=f"leave it out, or add {option('strategy')} {strategy}")


def check_strategy(strategy: str, cut: str) -> None:
    """Raise InputError for an unknown strategy, or a cut with a strategy that divides no model."""
    _check_choice("strategy", strategy, (AUTO, *STRATEGIES))
    if cut and strategy != SPLIT:
        name = option("strategy")
        raise InputError(
            f"{option('cut')} requires {name} split, received {name} {strategy}", remedy=f"add {name} split"
        )


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InputError(f"unknown {option(name)} {value!r}", remedy=f"one of {', '.join(choices)}")


@dataclass(frozen=True)
class TrainRequest:
    """One training. Raises InputError for two sources of the batch sizes, or of the strategy."""

    job: Job
    fleet: Fleet
    directory: Path
    options: TrainOptions
    plan_path: Path | None = None
    """None: the plan that `tune` wrote for the job."""
    batch_size: int | None = None
    """Use this batch size on every rank instead of a plan."""
    resume: str | None = None
    """The id of the run to resume, or 'latest'."""
    is_preflight_skipped: bool = False

    def __post_init__(self) -> None:
        options = self.options
        given = {
            "plan": self.plan_path,
            "batch_size": self.batch_size,
            "strategy": options.strategy != AUTO,
            "feature_precision": options.feature_precision != FLOAT32,
            "num_micro_batches": options.num_micro_batches != SplitSpec.num_micro_batches,
        }
        names = [name for name, is_given in given.items() if is_given]
        if self.resume and names:
            raise _contradiction("resume", names[0], "a run continues as it began")
        if self.plan_path and self.batch_size:
            raise _contradiction("plan", "batch_size", "a plan has the batch size of each rank")


def _contradiction(first: str, second: str, why: str) -> InputError:
    problem = f"{option(first)} and {option(second)} contradict each other: {why}"
    return InputError(problem, remedy="use only one of them")
