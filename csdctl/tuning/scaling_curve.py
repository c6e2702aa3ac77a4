"""The curve over the number of nodes: rate and energy of one more node, and whether nodes pay off. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from csdctl.perfmodel.prediction import CollectiveCost, RankModel, predict
from csdctl.perfmodel.spread import Range
from csdctl.tuning.search import BestPlan, Limits, find_best_ranks

MIN_GAIN = 0.05
"""Minimum gain over the host alone. Two runs of the same job may differ by less than this."""
MIN_SHARE_OF_NODE = 0.1
"""Minimum rate that one more node must add, as a share of its rate by itself."""


@dataclass(frozen=True)
class Power:
    """Watts of a server with nodes that train, all at least 0."""

    host_w: float
    """Independent of the number of nodes that train: the busy host and the rest of its chassis."""
    node_w: float
    """Added by each node that trains."""


@dataclass(frozen=True)
class ScalableFleet:
    """A fleet of any number of nodes: its ranks, the costs of training together, and its batch sizes."""

    host: RankModel
    """It must be in a plan, as nodes with private data."""
    nodes: tuple[RankModel, ...]
    """The fleet's nodes in order. A larger fleet repeats them."""
    sum_cost: CollectiveCost = field(default_factory=CollectiveCost)
    vector_bytes: int = 0
    overhead_factor: float = 1.0
    """As in `predict`. A host alone has none."""
    limits: Callable[[int], Limits] | None = None
    """The limits of a fleet with this number of nodes, whose batch sizes are then chosen as by `tune`.

    None: each rank keeps its batch size."""
    is_planned: bool = False
    """Whether the ranks keep their batch sizes for the current number of nodes."""
    idle: frozenset[str] = frozenset()
    """Ranks that do not train in that plan: nodes that it leaves out, or the host."""

    def sum_s(self, num_ranks: int) -> float:
        """Return the seconds of a sum."""
        return self.sum_cost.at(self.vector_bytes, num_ranks)

    def plan(self, num_nodes: int) -> BestPlan:
        """Return the plan with `num_nodes`. Raises TuningError, and ValueError without a node to repeat."""
        if not self.limits or (self.is_planned and num_nodes == len(self.nodes)):
            return self._keep_plan(num_nodes)
        return find_best_ranks(
            self.host,
            self._repeat(num_nodes),
            self.limits(num_nodes),
            sum_s=self.sum_s,
            overhead_factor=self.overhead_factor if num_nodes else 1.0,
        )

    def _keep_plan(self, num_nodes: int) -> BestPlan:
        """Return the plan of the ranks with their batch sizes. An idle host is still a rank: it sums."""
        ranks = [self.host, *self._repeat(num_nodes)]
        training = [rank for rank in ranks if rank.node not in self.idle]
        sizes = {rank.node: rank.batch_size for rank in training}
        num_ranks = len(sizes) + (self.host.node in self.idle)
        factor = self.overhead_factor if num_ranks > 1 else 1.0
        prediction = predict(training, [*sizes.values()], self.sum_s(num_ranks), factor)
        return BestPlan(sizes, prediction, tuple(rank.node for rank in ranks[1:] if rank.node in self.idle))

    def _repeat(self, count: int) -> list[RankModel]:
        if count and not self.nodes:
            raise ValueError("nodes cannot be predicted without one to repeat")
        nodes = []
        for number in range(count):
            repetition, place = divmod(number, len(self.nodes))
            node = self.nodes[place]
            nodes.append(replace(node, node=f"{node.node}#{repetition}") if repetition else node)
        return nodes


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
    """Rate relative to the sum of the rates of all machines by themselves."""
    power_w: float | None
    joules_per_image: float | None
    num_left_out: int = 0
    """Nodes that would cost more time than they save, and stay idle."""
    is_host_training: bool = True
    """False: it only sums, and serves data to the nodes."""
    samples_per_s_range: Range | None = None
    """9 of 10 runs are expected in it. None: unknown."""


def predict_curve(
    fleet: ScalableFleet, counts: Iterable[int], power: Power | None = None
) -> list[CurvePoint]:
    """Predict a point for each number of nodes. Raises TuningError when the limits allow no plan for one."""
    alone = fleet.plan(0).prediction.samples_per_s
    points = []
    for num_nodes in counts:
        best = fleet.plan(num_nodes)
        rate, num_left_out = best.prediction.samples_per_s, len(best.left_out)
        is_host_training = fleet.host.node in best.batch_sizes
        power_w = power.host_w + (num_nodes - num_left_out) * power.node_w if power else None
        points.append(
            CurvePoint(
                num_nodes=num_nodes,
                global_batch=best.global_batch,
                step_s=best.prediction.step_s,
                sum_s=fleet.sum_s(len(best.batch_sizes) + (not is_host_training)),
                samples_per_s=rate,
                speedup=rate / alone,
                efficiency=rate / best.prediction.ceiling_samples_per_s,
                power_w=power_w,
                joules_per_image=None if power_w is None else power_w / rate,
                num_left_out=num_left_out,
                is_host_training=is_host_training,
            )
        )
    return points


def size_ranks(ranks: Sequence[RankModel], batch_sizes: Mapping[str, int]) -> list[RankModel]:
    """Return the ranks with these batch sizes. A rank without a size gets what fits in the slowest's time."""
    slowest_s = max(rank.step_time.at(batch_sizes.get(rank.node, 0)) for rank in ranks)
    return [
        replace(
            rank, batch_size=batch_sizes.get(rank.node) or max(1, rank.step_time.largest_within(slowest_s))
        )
        for rank in ranks
    ]


class Reason(StrEnum):
    """A reason why nodes do not pay off."""

    SLOWER = "slower"
    """No faster than the host alone."""
    LITTLE_GAIN = "little_gain"
    """Faster by less than MIN_GAIN."""
    NO_ENERGY_SAVED = "no_energy_saved"
    """A sample takes as much energy as on the host alone, or more."""


@dataclass(frozen=True)
class CurveVerdict:
    """The judgement on `num_nodes` nodes, and on fewer."""

    num_nodes: int
    reasons: tuple[Reason, ...]
    """Without any, they pay off."""
    worth_from: int | None
    """The smallest number, up to `num_nodes`, that pays off. None: no number does."""
    useful_nodes: int
    """Beyond this number, every further node adds less than MIN_SHARE_OF_NODE of its own throughput."""
    least_energy_nodes: int | None
    """The number of nodes with the least energy per sample. None where power is not known."""


def judge(curve: Sequence[CurvePoint], nodes: Sequence[RankModel]) -> CurveVerdict:
    """Judge the last point of `curve`, whose first is the host alone, and whose nodes repeat `nodes`."""
    alone = curve[0]
    useful_nodes = 0
    for before, point in pairwise(curve):  # earlier nodes may cost more than they add
        added = (point.samples_per_s - before.samples_per_s) / (point.num_nodes - before.num_nodes)
        node = nodes[(point.num_nodes - 1) % len(nodes)]
        if added >= MIN_SHARE_OF_NODE * node.batch_size / node.step_time.at(node.batch_size):
            useful_nodes = point.num_nodes
    energies = [
        (point.joules_per_image, point.num_nodes) for point in curve if point.joules_per_image is not None
    ]
    return CurveVerdict(
        num_nodes=curve[-1].num_nodes,
        reasons=_reasons(curve[-1], alone),
        worth_from=next((point.num_nodes for point in curve[1:] if not _reasons(point, alone)), None),
        useful_nodes=useful_nodes,
        least_energy_nodes=min(energies)[1] if energies else None,
    )


def _reasons(point: CurvePoint, alone: CurvePoint) -> tuple[Reason, ...]:
    reasons = []
    if point.speedup < 1 + MIN_GAIN:
        reasons.append(Reason.SLOWER if point.speedup <= 1 else Reason.LITTLE_GAIN)
    energy, least = point.joules_per_image, alone.joules_per_image
    if energy is not None and least is not None and energy >= least:
        reasons.append(Reason.NO_ENERGY_SAVED)
    return tuple(reasons)
