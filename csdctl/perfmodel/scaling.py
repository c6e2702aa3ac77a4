"""The curve over the number of nodes: the rate and the energy that one more node brings; pure.

A point is the prediction for the host and the first n nodes, with energy where power is known. Each point
extends the one before by one node, so that a thousand take milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.perfmodel.energy import Power
from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.ring import SumCost


@dataclass(frozen=True)
class PlannedRank:
    """A machine and its batch size."""

    model: RankModel
    batch_size: int

    @property
    def step_s(self) -> float:
        """Seconds of its step, alone."""
        return self.model.step_time.at(self.batch_size)

    @property
    def samples_per_s(self) -> float:
        """Samples per second, alone."""
        return self.batch_size / self.step_s


@dataclass(frozen=True)
class CurvePoint:
    """The host with `num_nodes` nodes."""

    num_nodes: int
    global_batch: int
    step_s: float
    sum_s: float
    """The part of the step that the sum over the ranks takes."""
    samples_per_s: float
    speedup: float
    """Rate relative to the host alone."""
    efficiency: float
    """Rate relative to the sum of the rates of all machines alone."""
    power_w: float | None
    joules_per_image: float | None
    num_left_out: int = 0
    """Nodes that would cost more time than they save, and stay idle."""
    is_host_training: bool = True
    """False: it only sums, and serves data to the nodes."""

    def time_s(self, num_samples: int) -> float:
        """Return the seconds to train on `num_samples`, of all epochs."""
        return num_samples / self.samples_per_s

    def energy_joules(self, num_samples: int) -> float | None:
        """Return the joules to train on `num_samples`; None where power is not known."""
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
    """Predict the points for 0 to `max_nodes` nodes, at that index.

    A fleet larger than `nodes` repeats them: it has the same mixture. `overhead_factor` as in `predict`; a
    host alone has none. Raises ValueError when `max_nodes` is above 0 and `nodes` is empty.
    """
    if max_nodes and not nodes:
        raise ValueError("nodes cannot be predicted without one to repeat")
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
    """Samples per second of a fleet, and the rates it is compared with."""

    samples_per_s: float
    alone: float
    """The rate of the host alone."""
    ceiling: float
    """The sum of the rates, alone, of all machines that train."""


def build_point(
    num_nodes: int,
    global_batch: int,
    sum_s: float,
    rates: Rates,
    power: Power | None,
    num_left_out: int = 0,
) -> CurvePoint:
    """Build a point from its rates; nodes that are left out draw no power to train."""
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
