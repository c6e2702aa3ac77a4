"""The curve over the number of nodes: what one more node brings, and what it costs; pure.

A point is what `predict` says for the host and the first n nodes, with energy where power is known. Points
are added up one node at a time, so that a thousand take milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.perfmodel.energy import Power
from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.ring import SumCost


@dataclass(frozen=True)
class PlannedRank:
    """A machine and the batch size it will train with."""

    model: RankModel
    batch_size: int

    @property
    def step_s(self) -> float:
        """Seconds of its step, alone."""
        return self.model.step_time.at(self.batch_size)

    @property
    def samples_per_s(self) -> float:
        """Samples a second, alone."""
        return self.batch_size / self.step_s


@dataclass(frozen=True)
class CurvePoint:
    """The host and so many nodes."""

    num_nodes: int
    global_batch: int
    step_s: float
    sum_s: float
    """Of the step: the sum over the ranks."""
    samples_per_s: float
    speedup: float
    """Over the host alone."""
    efficiency: float
    """Of what all of them reach alone, together."""
    power_w: float | None
    joules_per_image: float | None
    num_left_out: int = 0
    """Of the nodes: those that would cost more time than they bring, and stay idle."""
    is_host_training: bool = True
    """Else it adds up and serves the others."""

    def time_s(self, num_samples: int) -> float:
        """Seconds to read `num_samples`, all epochs together."""
        return num_samples / self.samples_per_s

    def energy_joules(self, num_samples: int) -> float | None:
        """Joules to read `num_samples`; None where power is not known."""
        return None if self.joules_per_image is None else self.joules_per_image * num_samples


def predict_curve(
    host: PlannedRank,
    nodes: Sequence[PlannedRank],
    max_nodes: int,
    sum_cost: SumCost,
    *,
    gradient_bytes: int = 0,
    overhead_factor: float = 1.0,
    power: Power | None = None,
) -> list[CurvePoint]:
    """The points for 0 to `max_nodes` nodes, at that index.

    The n-th node is nodes[n], and beyond their end they begin again: a larger fleet has the same mixture.
    `overhead_factor` as in `predict`; a host alone has nobody to be in step with. Raises ValueError when nodes are
    wanted and there is none.
    """
    if max_nodes and not nodes:
        raise ValueError("without one node there is no knowing what more of them would do")
    slowest_s, global_batch, ceiling = host.step_s, host.batch_size, host.samples_per_s
    points = []
    for num_nodes in range(max_nodes + 1):
        if num_nodes:
            node = nodes[(num_nodes - 1) % len(nodes)]
            slowest_s = max(slowest_s, node.step_s)
            global_batch += node.batch_size
            ceiling += node.samples_per_s
        sum_s = sum_cost.at(gradient_bytes, num_nodes + 1)
        step_s = slowest_s * (overhead_factor if num_nodes else 1.0) + sum_s
        rates = Rates(global_batch / step_s, alone=host.samples_per_s, ceiling=ceiling)
        points.append(build_point(num_nodes, global_batch, sum_s, rates, power))
    return points


@dataclass(frozen=True)
class Rates:
    """Samples a second of a fleet, and what they are held against."""

    samples_per_s: float
    alone: float
    """Of the host alone."""
    ceiling: float
    """Of all that train, each alone, added up."""


def build_point(
    num_nodes: int,
    global_batch: int,
    sum_s: float,
    rates: Rates,
    power: Power | None,
    num_left_out: int = 0,
) -> CurvePoint:
    """A point with what follows from its rates; nodes that are left out draw no power to train."""
    power_w = power.at(num_nodes, num_left_out) if power else None
    return CurvePoint(
        num_nodes=num_nodes,
        global_batch=global_batch,
        step_s=global_batch / rates.samples_per_s,
        sum_s=sum_s,
        samples_per_s=rates.samples_per_s,
        speedup=rates.samples_per_s / rates.alone,
        efficiency=rates.samples_per_s / rates.ceiling,
        power_w=power_w,
        joules_per_image=None if power_w is None else power_w / rates.samples_per_s,
        num_left_out=num_left_out,
    )
