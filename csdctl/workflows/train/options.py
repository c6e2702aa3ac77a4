"""The user's options for one run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from csdctl.errors import InputError
from csdctl.supervision.event_callbacks import Callback
from csdctl.supervision.run_setup import Patience
from csdctl.tuning.plan import FEATURES, SPLIT, STRATEGIES
from csdctl.worker.protocol.features import ENGINES, PRECISIONS, FeatureOptions
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES
from csdctl.worker.protocol.run_spec import SplitSpec

MEASURED = "auto"
"""The ranks measure which collective is faster."""
COLLECTIVES = (MEASURED, *COLLECTIVE_NAMES)
AUTO = "auto"
"""The strategy that the plan names: `tune` has compared them."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of one run; raises InputError for invalid values."""

    deadlines: Patience = field(default_factory=Patience)
    """The longest silence allowed until all ranks are ready, and after that."""
    max_steps: int | None = None
    """Stop after this many steps."""
    min_nodes: int = 1
    """The run ends when fewer nodes are left; it can be resumed."""
    is_balanced: bool = True
    """Whether batch sizes are adjusted when a node's speed changes."""
    checkpoint_interval_s: float = 600.0
    """Time between two checkpoints; there is also one after each epoch."""
    num_checkpoints: int = 3
    """Checkpoints to keep, besides the best."""
    collective: str = MEASURED
    """How gradients are summed, as `csdctl train --collective`."""
    callbacks: tuple[Callback, ...] = ()
    """Called with every event of the run, in threads of their own."""
    strategy: str = AUTO
    """The way in which machines share the computation: one of STRATEGIES, or AUTO."""
    features: FeatureOptions = field(default_factory=FeatureOptions)
    """For `features`."""
    cut: str = ""
    """For `split`: the last layer that nodes compute."""
    num_micro_batches: int = SplitSpec.num_micro_batches
    """For `split`: of each rank's batch."""

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise InputError(
                f"unknown collective {self.collective!r}", remedy=f"one of {', '.join(COLLECTIVES)}"
            )
        check_strategy(self.strategy)
        check_cut(self.strategy, self.cut)
        _check_choice("feature-precision", self.features.precision, PRECISIONS)
        _check_choice("feature-engine", self.features.engine, ENGINES)
        self._check_strategy_options()
        for callback in self.callbacks:
            if not callable(callback):
                raise InputError(
                    f"received a {type(callback).__name__} as callback, expected a function of one event",
                    remedy="early stopping and reduce on plateau are part of the job's recipe",
                )
        for name, value, least in (
            ("start-timeout", self.deadlines.start_s, 1),
            ("silence-timeout", self.deadlines.silence_s, 1),
            ("min-nodes", self.min_nodes, 0),
            ("checkpoint-seconds", self.checkpoint_interval_s, 1),
            ("keep", self.num_checkpoints, 1),
            ("micro-batches", self.num_micro_batches, 1),
        ):
            if not value >= least:
                raise InputError(
                    f"--{name} must be at least {least}, received {value:g}",
                    remedy="pass seconds, or leave it out for the default",
                )

    def _check_strategy_options(self) -> None:
        """Raise InputError for an option of another strategy than the one that was asked for."""
        default = FeatureOptions()
        for option, value, unset, strategy in (
            ("feature-precision", self.features.precision, default.precision, FEATURES),
            ("feature-engine", self.features.engine, default.engine, FEATURES),
            ("micro-batches", self.num_micro_batches, SplitSpec.num_micro_batches, SPLIT),
        ):
            if value != unset and self.strategy not in (AUTO, strategy):
                raise InputError(
                    f"--{option} {value} has no effect with --strategy {self.strategy}",
                    remedy=f"leave it out, or add --strategy {strategy}",
                )


def check_strategy(strategy: str) -> None:
    """Raise InputError for an unknown strategy."""
    _check_choice("strategy", strategy, (AUTO, *STRATEGIES))


def check_cut(strategy: str, cut: str) -> None:
    """Raise InputError for a cut with a strategy that divides no model."""
    if cut and strategy != SPLIT:
        raise InputError(
            f"--cut requires --strategy split, received --strategy {strategy}", remedy="add --strategy split"
        )


def _check_choice(option: str, chosen: str, known: Sequence[str]) -> None:
    if chosen not in known:
        raise InputError(f"unknown --{option} {chosen!r}", remedy=f"one of {', '.join(known)}")
