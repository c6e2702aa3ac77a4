"""The setup of a run, which the caller of `Supervisor` provides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.supervision.links import Links
from csdctl.supervision.patience import Patience
from csdctl.supervision.rank_processes import StartRank

DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True)
class RunSetup:
    """How to start the ranks and their links; the first two callables may raise CsdctlError."""

    run_id: str
    nodes: Sequence[str]
    """The machine of every rank, in order; rank 0 is on the host."""
    start_rank: StartRank
    restart_rank: StartRank
    """Start a rank on a machine that was lost: over a new connection, after killing its old processes."""
    start_links: Callable[[Sequence[int], int], Links]
    """Start mpirun for these ranks and this generation."""
    log_directory: Path
    min_nodes: int
    is_resumable: bool
    """Whether the run keeps its state for `train --resume`."""
    patience: Patience = DEFAULT_PATIENCE
    collective: str = ""
    """One of `protocol.orders.COLLECTIVE_NAMES`; '' lets the ranks measure which is fastest."""
    absent: tuple[int, ...] = ()
    """Ranks that take no part from the beginning."""
    should_stop: Callable[[], bool] = lambda: False
    """Whether to end the run in order, as the first Ctrl-C does."""
