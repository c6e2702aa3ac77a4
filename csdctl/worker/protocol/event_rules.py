"""Which events belong to a run, whatever happened before: who may send them, and the ranks and names in them.

Pure. What arrives from a rank (supervision, launch) and what was stored (runs) is checked by the same rules.
"""

from collections.abc import Iterable, Sequence

from csdctl.worker.protocol.events import (
    UNKNOWN_NODE,
    CheckpointSaved,
    CollectiveTimed,
    EpochEnd,
    Evaluating,
    Event,
    Exited,
    Failed,
    Finished,
    Joined,
    Misbehaved,
    MpiChecked,
    NodeBack,
    NodeLost,
    Progress,
    Rebalanced,
    Started,
    Traffic,
    Verified,
    WaitingFor,
)
from csdctl.worker.protocol.json_codec import ProtocolError, shorten

FROM_RANK_0 = (Rebalanced, Traffic, Verified, Evaluating, CheckpointSaved, CollectiveTimed)
"""What holds for all ranks, or is on the host."""
FROM_CSDCTL = (NodeLost, NodeBack)
FROM_MPI = (Started, MpiChecked, CollectiveTimed, Exited)
"""What ranks and shells that mpirun started report, and no rank of a training."""
FIELDS_OF_RANK_0 = {
    Progress: ("global_samples", "loss", "accuracy", "metrics"),
    EpochEnd: (
        *("global_samples", "loss", "accuracy", "metrics", "learning_rate", "num_lost", "stepped_samples"),
        *("validation_loss", "validation_accuracy", "validation_metrics"),
    ),
    Finished: ("model_path",),
}
"""Fields that only rank 0 fills in; the others leave them as they are by default."""
_UNSET: tuple[object, ...] = (None, 0, {})


def check_event(event: Event, nodes: Sequence[str]) -> None:
    """Raise ProtocolError unless a rank of the run whose ranks are on `nodes` may have sent `event`."""
    name = type(event).__name__
    is_lost = isinstance(event, Failed) and event.node == UNKNOWN_NODE
    if event.rank >= len(nodes) or not (event.node == nodes[event.rank] or is_lost):
        raise ProtocolError(
            f"{name}: expected one of {len(nodes)} ranks and its node, "
            f"received rank {event.rank} on {shorten(event.node)}"
        )
    if event.rank != 0:
        _check_is_own(event)
    if isinstance(event, Verified) and {len(event.batch_sizes), len(event.of_ranks)} != {len(nodes)}:
        raise ProtocolError(f"{name}: expected results of {len(nodes)} ranks, received another number")
    named = _nodes_in(event)
    if len(named) > len(nodes) or not set(named) <= set(nodes):
        raise ProtocolError(f"{name}: expected nodes of the run, received {shorten(named)}")
    if unknown := {rank for rank in _ranks_in(event) if not _is_rank(rank, len(nodes))}:
        raise ProtocolError(f"{name}: expected ranks of the run, received {shorten(sorted(unknown))}")


def check_sender(event: Event, rank: int, nodes: Sequence[str]) -> None:
    """Raise ProtocolError when `event` names another sender than rank `rank`, which it came from."""
    if (event.rank, event.node) != (rank, nodes[rank]):
        raise ProtocolError(
            f"{type(event).__name__}: expected rank {rank} on {nodes[rank]}, "
            f"received rank {event.rank} on {shorten(event.node)}"
        )


def _check_is_own(event: Event) -> None:
    """Raise ProtocolError when a rank other than 0 reports what only rank 0 knows."""
    name = type(event).__name__
    if isinstance(event, FROM_RANK_0):
        raise ProtocolError(f"{name}: expected from rank 0 alone")
    for field in FIELDS_OF_RANK_0.get(type(event), ()):
        value = getattr(event, field)
        if type(value) is float or value not in _UNSET:
            raise ProtocolError(f"{name}.{field}: expected from rank 0 alone, received {shorten(value)}")


def _is_rank(text: str, num_ranks: int) -> bool:
    """Return whether `text` is the number of a rank, written as `str` writes it."""
    return text.isdecimal() and str(int(text)) == text and int(text) < num_ranks


def _nodes_in(event: Event) -> Sequence[str]:
    if isinstance(event, WaitingFor):
        return event.nodes
    return (event.slowest,) if isinstance(event, Rebalanced) else ()


def _ranks_in(event: Event) -> Iterable[str]:
    if isinstance(event, Joined | Rebalanced):
        return event.batch_sizes
    if isinstance(event, Misbehaved):
        return [str(event.culprit)]
    if isinstance(event, Traffic):
        return [str(rank) for row in event.sent for rank in (row.sender, row.receiver)]
    return []
