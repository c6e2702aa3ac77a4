"""The forecast: the curve over the number of nodes that follows from a basis, and its verdict.

A `ForecastBasis` holds the figures and their origins: those of the paper, or what `tune` measured.
Nothing here connects to a machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from csdctl.errors import InputError
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.recommendation import Verdict, judge
from csdctl.perfmodel.scaling import CurvePoint, predict_curve
from csdctl.tuning.scaling_curve import Costs, predict_best_curve
from csdctl.workflows.forecast.basis import ForecastBasis
from csdctl.workflows.forecast.request import ForecastRequest

MAX_SEARCHED = 60
"""Numbers of nodes in one forecast, where each takes a search for batch sizes: `1..10000` takes seconds."""
MAX_JUDGED_FULLY = 40
NUM_JUDGED = 16
"""Where each number of nodes takes a search, a verdict on up to MAX_JUDGED_FULLY nodes covers all numbers. On
more it covers NUM_JUDGED of them, evenly, and 1, 2, 4, … for the smallest number that is worth it."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Forecast:
    """A curve over the number of nodes, and what it is computed from."""

    basis: ForecastBasis
    points: list[CurvePoint]
    """For each number of nodes that was requested, or MAX_SEARCHED of them."""
    verdict: Verdict | None
    """On the largest number of nodes; None for a host alone."""

    @property
    def num_samples(self) -> int | None:
        """Samples of all epochs; None: unknown."""
        return None if self.basis.num_samples is None else self.basis.num_samples * self.basis.epochs


def forecast(basis: ForecastBasis, request: ForecastRequest) -> Forecast:
    """Forecast what `request` asks for; raises InputError when this basis does not allow it."""
    counts = range(basis.num_nodes + 1) if request.node_counts is None else request.node_counts
    basis = _with_request(basis, request, max(counts))
    if max(counts) and not basis.nodes:
        raise InputError(
            "the plan has only the host: the gain from nodes is unknown",
            remedy="run `csdctl tune` with at least one node, or use --published",
        )
    if basis.choice is not None and len(counts) > MAX_SEARCHED:
        shown = f"{MAX_SEARCHED} of the {len(counts):,} requested: each requires a separate search"
        basis = replace(basis, origins={**basis.origins, "numbers_of_nodes": shown})
        counts = pick_evenly(counts, MAX_SEARCHED)
    curve = _predict_curve(basis, counts)
    verdict = judge(list(curve.values()), basis.nodes) if max(counts) else None
    return Forecast(basis, [curve[count] for count in counts], verdict)


def pick_evenly(values: Sequence[ValueT], max_values: int) -> Sequence[ValueT]:
    """Return all of `values`, or `max_values` of them at even distances, with the first and the last."""
    if len(values) <= max_values:
        return values
    return [values[round(index * (len(values) - 1) / (max_values - 1))] for index in range(max_values)]


def _predict_curve(basis: ForecastBasis, counts: Sequence[int]) -> dict[int, CurvePoint]:
    """Return points by number of nodes, in ascending order: `counts`, and what a verdict needs."""
    largest = max(counts)
    if basis.choice is None:
        points = predict_curve(
            basis.host,
            basis.nodes,
            largest,
            basis.sum_cost,
            gradient_bytes=basis.gradient_bytes,
            overhead_factor=basis.overhead_factor,
            power=basis.power,
        )
    else:
        costs = Costs(basis.sum_cost, basis.gradient_bytes, basis.overhead_factor)
        searched = sorted({*counts, *_judged(largest)})
        points = predict_best_curve(basis.host, basis.nodes, searched, basis.choice, costs, basis.power)
    return {point.num_nodes: point for point in points}


def _judged(num_nodes: int) -> set[int]:
    """Return the numbers of nodes that a verdict on `num_nodes` covers."""
    if num_nodes <= MAX_JUDGED_FULLY:
        return set(range(num_nodes + 1))
    doubled = {1 << power for power in range(num_nodes.bit_length())}
    return doubled | {round(part * num_nodes / NUM_JUDGED) for part in range(NUM_JUDGED + 1)}


def _with_request(basis: ForecastBasis, request: ForecastRequest, max_nodes: int) -> ForecastBasis:
    """Return the basis with the figures of the request, and with the assumptions that remain."""
    origins = dict(basis.origins)
    if request.epochs is not None:
        basis = replace(basis, epochs=request.epochs)
    if request.num_samples is not None:
        origins["samples"] = "as given on the command line"
        basis = replace(basis, num_samples=request.num_samples)
    if request.power is not None:
        origins["power"] = "assumption: as given on the command line"
        basis = replace(basis, power=request.power)
    if request.node_sum_s is not None:
        origins["sum"] = f"assumption: {request.node_sum_s:g} s for each node, as given on the command line"
        basis = replace(basis, sum_cost=CollectiveCost(per_rank_s=request.node_sum_s))
    if max_nodes > basis.num_nodes:
        origins["reach"] = (
            f"assumption: with more nodes than {basis.num_nodes}, speeds, sum and power are extrapolated"
        )
    return replace(basis, origins=origins)
