"""The curve over the number of nodes: rate and energy of one more node, and whether nodes pay off. Pure.

Batch sizes are fixed, or chosen as `tune` would choose them for each number of nodes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from csdctl.perfmodel.prediction import CollectiveCost, RankModel, predict
from csdctl.perfmodel.spread import Range
from csdctl.tuning.search import BestPlan, Limits, find_best_ranks

MIN_GAIN = 0.05
"""Minimum gain over the host alone; two runs of the same job may differ by less than this."""
MIN_SHARE_OF_NODE = 0.1
"""Minimum rate that one more node must add, as a share of its rate alone."""


@dataclass(frozen=True)
class Power:
    """Watts of a server with nodes that train, all at least 0."""

    host_w: float
    """Independent of the number of nodes that train: the busy host and the rest of its chassis."""
    node_w: float
    """Added by each node that trains."""

    def at(self, num_nodes: int, num_idle: int = 0) -> float:
        """Return the watts of a server with `num_nodes` nodes, of which `num_idle` do not train."""
        return self.host_w + (num_nodes - num_idle) * self.node_w


@dataclass(frozen=True)
class Costs:
    """The costs of training together, besides the ranks' own steps."""

    sum_cost: CollectiveCost
    vector_bytes: int = 0
    overhead_factor: float = 1.0
    """As in `predict`; a host alone has none."""

    def sum_s(self, num_ranks: int) -> float:
        """Return the seconds of one sum."""
        return self.sum_cost.at(self.vector_bytes, num_ranks)


@dataclass(frozen=True)
class Choice:
    """How batch sizes are chosen, by number of nodes."""

    limits: Callable[[int], Limits]
    """The limits for a fleet with this number of nodes."""
    is_required: bool = False
    """Whether every node must be in the plan, because each has private data."""
    is_planned: bool = False
    """Whether the ranks keep their batch sizes for the current number of nodes."""
    idle: frozenset[str] = frozenset()
    """Ranks that do not train in that plan: nodes that it leaves out, or the host."""


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
    samples_per_s_range: Range | None = None
    """9 of 10 runs are expected in it; None: unknown."""


def predict_curve(
    host: RankModel,
    nodes: Sequence[RankModel],
    counts: Iterable[int],
    costs: Costs,
    choice: Choice | None = None,
    power: Power | None = None,
) -> list[CurvePoint]:
    """Predict a point for each of `counts`, the numbers of nodes. A larger fleet than `nodes` repeats them.

    Without a `choice`, each rank keeps its batch size. Raises TuningError when the limits allow no plan for
    one of these numbers.
    """

    def best_of(num_nodes: int) -> BestPlan:
        if choice and not (choice.is_planned and num_nodes == len(nodes)):
            return choose_best(host, nodes, num_nodes, choice, costs)
        return _as_planned([host, *_repeat(nodes, num_nodes)], choice.idle if choice else (), costs)

    alone = best_of(0).prediction.samples_per_s
    points = []
    for num_nodes in counts:
        best = best_of(num_nodes)
        rate, num_left_out = best.prediction.samples_per_s, len(best.left_out)
        is_host_training = host.node in best.batch_sizes
        power_w = power.at(num_nodes, num_left_out) if power else None
        points.append(
            CurvePoint(
                num_nodes=num_nodes,
                global_batch=sum(best.batch_sizes.values()),
                step_s=best.prediction.step_s,
                sum_s=costs.sum_s(len(best.batch_sizes) + (not is_host_training)),
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


def choose_best(
    host: RankModel, nodes: Sequence[RankModel], num_nodes: int, choice: Choice, costs: Costs
) -> BestPlan:
    """Return the best batch sizes for the host and `num_nodes` nodes, which repeat `nodes`.

    Repeated names get a number. Raises TuningError when the limits allow no plan.
    """
    return find_best_ranks(
        replace(host, is_required=True),
        [
            replace(node, is_required=choice.is_required or node.is_required)
            for node in _repeat(nodes, num_nodes)
        ],
        choice.limits(num_nodes),
        costs.sum_s,
        costs.overhead_factor if num_nodes else 1.0,
    )


def size_ranks(ranks: Sequence[RankModel], batch_sizes: Mapping[str, int]) -> list[RankModel]:
    """Return the ranks with these batch sizes. A rank without a size gets what fits in the others' time."""
    slowest_s = max(rank.step_time.at(batch_sizes.get(rank.node, 0)) for rank in ranks)
    return [
        replace(
            rank, batch_size=batch_sizes.get(rank.node) or max(1, rank.step_time.largest_within(slowest_s))
        )
        for rank in ranks
    ]


def _repeat(nodes: Sequence[RankModel], count: int) -> list[RankModel]:
    """Return `count` nodes, which repeat `nodes` under other names. Raises ValueError without any."""
    if count and not nodes:
        raise ValueError("nodes cannot be predicted without one to repeat")
    of = len(nodes)
    return [
        nodes[number]
        if number < of
        else replace(nodes[number % of], node=f"{nodes[number % of].node}#{number // of}")
        for number in range(count)
    ]


def _as_planned(ranks: Sequence[RankModel], idle: Iterable[str], costs: Costs) -> BestPlan:
    """Return the plan of these ranks, the host first. An idle host is still a rank: it sums."""
    host, *nodes = (rank.node for rank in ranks)
    sizes = {rank.node: rank.batch_size for rank in ranks if rank.node not in idle}
    num_ranks = len(sizes) + (host in idle)
    prediction = predict(
        [rank for rank in ranks if rank.node in sizes],
        [*sizes.values()],
        costs.sum_s(num_ranks),
        costs.overhead_factor if num_ranks > 1 else 1.0,
    )
    return BestPlan(sizes, prediction, tuple(node for node in nodes if node in idle))


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
    """Beyond this number, every further node adds less than MIN_SHARE_OF_NODE of its own throughput."""
    least_energy_nodes: int | None
    """The number of nodes with the least energy per sample; None where power is not known."""

    @property
    def is_worth_it(self) -> bool:
        """Whether `num_nodes` nodes pay off: there is no reason against them."""
        return not self.reasons


def judge(curve: Sequence[CurvePoint], nodes: Sequence[RankModel]) -> Verdict:
    """Judge the last point of `curve`, whose nodes repeat `nodes`. Its first point is the host alone.

    Numbers of nodes in between may be missing.
    """
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
    if point.speedup < 1 + MIN_GAIN:
        reasons.append(Reason.SLOWER if point.speedup <= 1 else Reason.LITTLE_GAIN)
    energy, least = point.joules_per_image, alone.joules_per_image
    if energy is not None and least is not None and energy >= least:
        reasons.append(Reason.NO_ENERGY_SAVED)
    return tuple(reasons)


def _useful_nodes(curve: Sequence[CurvePoint], nodes: Sequence[RankModel]) -> int:
    """Return the last number whose node adds enough. Earlier nodes may cost more than they add."""
    for before, point in reversed(list(pairwise(curve))):
        added = (point.samples_per_s - before.samples_per_s) / (point.num_nodes - before.num_nodes)
        if added >= MIN_SHARE_OF_NODE * nodes[(point.num_nodes - 1) % len(nodes)].samples_per_s:
            return point.num_nodes
    return 0
