"""The curve over the number of nodes with the best batch sizes for each; pure.

`perfmodel.scaling` keeps the batch sizes of a plan for other numbers of nodes. Here, they are chosen as
`tune` would choose them for that number of nodes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from csdctl.perfmodel.energy import Power
from csdctl.perfmodel.prediction import RankModel, predict
from csdctl.perfmodel.ring import SumCost
from csdctl.perfmodel.scaling import CurvePoint, PlannedRank, Rates, build_point
from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.host_choice import find_best_ranks
from csdctl.tuning.search import BestPlan, Limits, RankCandidate

MIN_OVERHEAD_FACTOR = 0.5


@dataclass(frozen=True)
class Costs:
    """The costs of training together, besides the ranks' own steps."""

    sum_cost: SumCost
    vector_bytes: int
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


def calibrate_overhead(ranks: Sequence[tuple[StepTime, int]], step_s: float, sum_s: float) -> float:
    """Return the overhead factor with which ranks of these step times and batch sizes take `step_s` together.

    Below 1 when they were faster than alone; limited to MIN_OVERHEAD_FACTOR, as `sum_s` must be wrong below
    it.
    """
    slowest_s = max(step_time.at(size) for step_time, size in ranks)
    return max(MIN_OVERHEAD_FACTOR, (step_s - sum_s) / slowest_s)


def choose_best(
    host: RankModel, nodes: Sequence[RankModel], num_nodes: int, choice: Choice, costs: Costs
) -> BestPlan:
    """Return the best batch sizes for the host and `num_nodes` nodes, which repeat `nodes`.

    Repeated names get a number. Raises TuningError when the limits allow no plan.
    """
    candidates = []
    for number in range(num_nodes):
        node, repeat = nodes[number % len(nodes)], number // len(nodes)
        name = f"{node.node}#{repeat}" if repeat else node.node
        candidates.append(RankCandidate(name, node.step_time, is_required=choice.is_required))
    return find_best_ranks(
        RankCandidate(host.node, host.step_time, is_required=True),
        candidates,
        choice.limits(num_nodes),
        costs.sum_s,
        costs.overhead_factor if num_nodes else 1.0,
    )


def size_ranks(ranks: Sequence[RankModel], batch_sizes: Mapping[str, int]) -> list[PlannedRank]:
    """Return the ranks with these batch sizes; a rank without a size gets what fits in the others' time."""
    slowest_s = max(rank.step_time.at(batch_sizes.get(rank.node, 0)) for rank in ranks)
    return [
        PlannedRank(rank, batch_sizes.get(rank.node) or max(1, rank.step_time.largest_within(slowest_s)))
        for rank in ranks
    ]


def predict_best_curve(
    host: PlannedRank,
    nodes: Sequence[PlannedRank],
    counts: Iterable[int],
    choice: Choice,
    costs: Costs,
    power: Power | None = None,
) -> list[CurvePoint]:
    """Predict a point for each of `counts`, the numbers of nodes.

    Raises TuningError when the limits allow no plan for one of these numbers.
    """

    def best_of(num_nodes: int) -> BestPlan:
        if choice.is_planned and num_nodes == len(nodes):
            return _as_planned([host, *nodes], choice.idle, costs)
        return choose_best(host.model, [node.model for node in nodes], num_nodes, choice, costs)

    alone = best_of(0).prediction.samples_per_s
    points = []
    for num_nodes in counts:
        best = best_of(num_nodes)
        rates = Rates(best.prediction.samples_per_s, alone, best.prediction.ceiling_samples_per_s)
        is_host_training = host.model.node in best.batch_sizes
        point = build_point(
            num_nodes,
            sum(best.batch_sizes.values()),
            costs.sum_s(len(best.batch_sizes) + (not is_host_training)),
            rates,
            power,
            len(best.left_out),
        )
        points.append(replace(point, is_host_training=is_host_training))
    return points


def _as_planned(ranks: Sequence[PlannedRank], idle: frozenset[str], costs: Costs) -> BestPlan:
    """Return the plan of these ranks, the host first; an idle host is still a rank: it sums."""
    host, *nodes = (rank.model.node for rank in ranks)
    training = [rank for rank in ranks if rank.model.node not in idle]
    num_ranks = len(training) + (host in idle)
    overhead_factor = costs.overhead_factor if num_ranks > 1 else 1.0
    prediction = predict(
        [rank.model for rank in training],
        [rank.batch_size for rank in training],
        costs.sum_s(num_ranks),
        overhead_factor,
    )
    sizes = {rank.model.node: rank.batch_size for rank in training}
    return BestPlan(sizes, prediction, tuple(node for node in nodes if node in idle))
