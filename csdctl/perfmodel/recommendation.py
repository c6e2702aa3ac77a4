"""Whether nodes pay off, from the curve over their number; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from csdctl.perfmodel.scaling import CurvePoint, PlannedRank

MIN_GAIN = 0.05
"""Minimum gain over the host alone; two runs of the same job may differ by less than this."""
MIN_SHARE_OF_NODE = 0.1
"""Minimum rate that one more node must add, as a share of its rate alone."""


class Reason(StrEnum):
    """A reason why nodes do not pay off."""

    SLOWER = "slower"
    """No faster than the host alone."""
    LITTLE_GAIN = "little_gain"
    """Faster by less than MIN_GAIN."""
    NO_ENERGY_SAVED = "no_energy_saved"
    """A sample takes as much energy as on the host alone, or more."""


@dataclass(frozen=True)
class Verdict:
    """The judgement on `num_nodes` nodes, and on fewer."""

    num_nodes: int
    reasons: tuple[Reason, ...]
    worth_from: int | None
    """The smallest number, up to `num_nodes`, that pays off; None: no number does."""
    useful_nodes: int
    """Beyond this number, every further node adds less than MIN_SHARE_OF_NODE of its own speed."""
    least_energy_nodes: int | None
    """The number of nodes with the least energy per sample; None where power is not known."""

    @property
    def is_worth_it(self) -> bool:
        """Whether `num_nodes` nodes pay off: there is no reason against them."""
        return not self.reasons


def judge(curve: Sequence[CurvePoint], nodes: Sequence[PlannedRank]) -> Verdict:
    """Judge the last point of `curve`, whose nodes repeat `nodes`; raises ValueError for a host alone.

    The first point is the host alone. Numbers of nodes in between may be missing.
    """
    if len(curve) < 2:
        raise ValueError("a host without nodes has no verdict")
    alone = curve[0]
    worth = [point.num_nodes for point in curve[1:] if not _reasons(point, alone)]
    energies = {
        point.num_nodes: point.joules_per_image for point in curve if point.joules_per_image is not None
    }
    return Verdict(
        num_nodes=curve[-1].num_nodes,
        reasons=_reasons(curve[-1], alone),
        worth_from=worth[0] if worth else None,
        useful_nodes=_useful_nodes(curve, nodes),
        least_energy_nodes=min(energies, key=energies.__getitem__) if energies else None,
    )


def _reasons(point: CurvePoint, alone: CurvePoint) -> tuple[Reason, ...]:
    reasons = []
    if point.speedup <= 1:
        reasons.append(Reason.SLOWER)
    elif point.speedup < 1 + MIN_GAIN:
        reasons.append(Reason.LITTLE_GAIN)
    if (
        point.joules_per_image is not None
        and alone.joules_per_image is not None
        and point.joules_per_image >= alone.joules_per_image
    ):
        reasons.append(Reason.NO_ENERGY_SAVED)
    return tuple(reasons)


def _useful_nodes(curve: Sequence[CurvePoint], nodes: Sequence[PlannedRank]) -> int:
    """Return the last number whose node adds enough; earlier nodes may cost more than they add."""
    for before, point in reversed(list(pairwise(curve))):
        added = (point.samples_per_s - before.samples_per_s) / (point.num_nodes - before.num_nodes)
        if added >= MIN_SHARE_OF_NODE * nodes[(point.num_nodes - 1) % len(nodes)].samples_per_s:
            return point.num_nodes
    return 0
