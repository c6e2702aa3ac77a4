"""The user's options for one run."""

from dataclasses import dataclass

from csdctl.errors import InputError
from csdctl.launch.mpi_job import Deadlines
from csdctl.supervision.event_callbacks import Callback
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES

MEASURED = "auto"
"""The ranks measure which collective is faster."""
COLLECTIVES = (MEASURED, *COLLECTIVE_NAMES)


@dataclass(frozen=True)
class TrainOptions:
    """Options of one run; raises InputError for invalid values."""

    deadlines: Deadlines = Deadlines()
    max_steps: int | None = None
    """Stop after this many steps."""
    min_nodes: int = 1
    """The run ends when fewer nodes are left; it can be resumed."""
    is_balanced: bool = True
    """Whether batch sizes are adjusted when a node's speed changes."""
    checkpoint_interval_s: float = 600.0
    """Between two checkpoints; there is also one after each epoch."""
    num_checkpoints: int = 3
    """Checkpoints to keep, besides the best."""
    collective: str = MEASURED
    """How gradients are summed, as `csdctl train --collective`."""
    callbacks: tuple[Callback, ...] = ()
    """Called with every event of the run, in threads of their own."""

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise InputError(
                f"unknown collective {self.collective!r}", remedy=f"one of {', '.join(COLLECTIVES)}"
            )
        for callback in self.callbacks:
            if not callable(callback):
                raise InputError(
                    f"received a {type(callback).__name__} as callback, expected a function of one event",
                    remedy="early stopping and reduce on plateau are part of the job's recipe",
                )
        for name, value, least in (
            ("min-nodes", self.min_nodes, 0),
            ("checkpoint-seconds", self.checkpoint_interval_s, 1),
            ("keep", self.num_checkpoints, 1),
        ):
            if not value >= least:
                raise InputError(f"--{name} must be at least {least}, received {value:g}")
