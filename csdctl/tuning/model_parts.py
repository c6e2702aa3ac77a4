"""Parts of a model that is cut, as shares of the time of its whole step: by FLOPs, or measured; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.tuning.measurements import NUMBER_BYTES
from csdctl.worker.protocol.model_info import CutInfo
from csdctl.worker.protocol.probe import PartTimes

MEASURED_BATCH = 32
"""The batch size at which parts are timed."""
MIN_DISTANCE = 0.03
"""Between two cuts to time, in shares of the model's FLOPs: FLOPs tell neighbours apart no better."""
BACKWARD_SHARE = 2 / 3
"""Of the FLOPs of forward and backward pass."""


@dataclass(frozen=True)
class Shares:
    """Parts of a model's step with the model cut behind `layer`, as shares of the time of the whole step."""

    layer: str
    forward: float
    """Of the prefix."""
    backward: float
    """Of the prefix."""
    head: float
    cut_bytes: int = 0
    """Of one sample's activations."""
    vector_bytes: int = 0
    """Of the prefix's part of the vector that is summed."""

    @property
    def prefix(self) -> float:
        """Forward and backward pass of the prefix."""
        return self.forward + self.backward


def spread_cuts(cuts: Sequence[CutInfo], num_operations: int) -> list[CutInfo]:
    """Return `cuts` without those that are close to one before; `num_operations`: of the whole model."""
    kept: list[CutInfo] = []
    for cut in cuts:
        if all(
            abs(cut.num_operations - other.num_operations) >= MIN_DISTANCE * num_operations for other in kept
        ):
            kept.append(cut)
    return kept


def share_by_flops(cut: CutInfo, num_operations: int) -> Shares | None:
    """Return the parts of a step by their FLOPs; None where these, or the cut's bytes, are not known."""
    if not num_operations or not cut.num_bytes or not cut.num_operations:
        return None
    before = cut.num_operations / num_operations
    return Shares(
        cut.layer,
        before * (1 - BACKWARD_SHARE),
        before * BACKWARD_SHARE,
        1 - before,
        cut.num_bytes,
        NUMBER_BYTES * cut.num_trainable,
    )


def measured_shares(times: PartTimes, cuts: Sequence[CutInfo]) -> dict[str, Shares]:
    """Return the parts of a step by the layer of the cut."""
    known = {cut.layer: cut for cut in cuts}
    return {
        part.layer: Shares(
            part.layer,
            part.forward_s / times.step_s,
            part.backward_s / times.step_s,
            part.head_s / times.step_s,
            known[part.layer].num_bytes if part.layer in known else 0,
            NUMBER_BYTES * known[part.layer].num_trainable if part.layer in known else 0,
        )
        for part in times.cuts
    }
