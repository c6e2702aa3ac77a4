"""What rank 0 decides at the end of an epoch, for all ranks."""

from dataclasses import dataclass
from typing import Any

from csdctl.worker.protocol.json_codec import from_dict
from csdctl.worker.tasks.position import CallbackState, check_callbacks


@dataclass(frozen=True)
class Decision:
    """The callbacks' new state, whether this epoch's model is the best so far, and whether to pause."""

    callbacks: CallbackState
    is_best: bool
    is_pausing: bool


def as_decision(value: Any) -> Decision | None:
    """Check what a rank has sent: rank 0 a decision, the others none; raises ValueError or TypeError."""
    if value is None:
        return None
    decision: Decision = from_dict(Decision, value)
    check_callbacks(decision.callbacks)
    if not isinstance(decision.is_best, bool) or not isinstance(decision.is_pausing, bool):
        raise TypeError("expected true or false")
    return decision
