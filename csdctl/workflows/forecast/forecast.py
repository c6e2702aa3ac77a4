"""The forecast: the curve over the number of nodes that follows from a basis, and its verdict.

A `ForecastBasis` holds the figures and their origins: those of the paper, or what `tune` measured.
Nothing here connects to a machine.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from csdctl.errors import InputError
from csdctl.job.model import load_job
from csdctl.notify import Say
from csdctl.perfmodel.prediction import CollectiveCost
from csdctl.perfmodel.published import Network
from csdctl.runs.directory import ProjectDirectory
from csdctl.tuning.scaling_curve import CurvePoint, Power, Verdict, judge, predict_curve
from csdctl.workflows.forecast.basis import ForecastBasis, published_basis, tuned_basis
from csdctl.workflows.workspace.partial_failure import choose_fleet

MAX_NODES = 10_000


@dataclass(frozen=True)
class ForecastRequest:
    """The numbers of nodes to forecast, and figures that replace those of the basis."""

    node_counts: Sequence[int] | None = None
    """None: 0 to all nodes of the basis."""
    epochs: int | None = None
    num_samples: int | None = None
    """Samples of an epoch."""
    power: Power | None = None
    node_sum_s: float | None = None
    """Seconds that each node adds to the sum over the ranks."""

    def __post_init__(self) -> None:
        if self.node_sum_s is not None and not math.isfinite(self.node_sum_s):
            raise InputError(f"invalid --sum-seconds {self.node_sum_s}", remedy="give a number of seconds")


def given_power(
    host_watts: float | None, node_watts: float | None, alone_watts: float | None
) -> Power | None:
    """Return the powers given on the command line; raises InputError when a value is missing or invalid."""
    if host_watts is None and node_watts is None and alone_watts is None:
        return None
    if host_watts is None or node_watts is None:
        raise InputError(
            "energy needs the power of the host and of a node", remedy="give --host-watts and --node-watts"
        )
    known = [watts for watts in (host_watts, node_watts, alone_watts) if watts is not None]
    if not all(math.isfinite(watts) and watts >= 0 for watts in known) or host_watts == 0:
        raise InputError(
            f"invalid power: {', '.join(f'{watts:g} W' for watts in known)}",
            remedy="give the power during training in watts, as a meter shows it",
        )
    return Power(host_watts, node_watts, alone_watts)


def parse_node_counts(text: str) -> list[int]:
    """Parse numbers of nodes from `24`, `1..36` or `4,8,16`; raises InputError."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part, re.ASCII)
        if not found or int(found[2] or found[1]) > MAX_NODES or int(found[2] or found[1]) < int(found[1]):
            raise InputError(
                f"invalid --nodes {text!r}",
                remedy=f"give a number up to {MAX_NODES}, a range such as 1..36, or several: 4,8,16",
            )
        counts.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return sorted(set(counts))


MAX_SEARCHED, MAX_FIXED = 60, 1000
"""Numbers of nodes in one forecast, where each takes a search for batch sizes, and with fixed ones."""
MAX_JUDGED_FULLY = 40
NUM_JUDGED = 16
"""A verdict on up to MAX_JUDGED_FULLY nodes covers all numbers. On more it covers NUM_JUDGED of them, evenly,
and 1, 2, 4, … for the smallest number that is worth it."""

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
            "the fleet has only the host: the gain from nodes is unknown",
            remedy="run `csdctl tune` with at least one node, or use --published",
        )
    most = MAX_FIXED if basis.choice is None else MAX_SEARCHED
    if len(counts) > most:
        shown = f"{most} of the {len(counts):,} requested: each is computed separately"
        basis = replace(basis, origins={**basis.origins, "numbers_of_nodes": shown})
        counts = pick_evenly(counts, most)
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
    searched = sorted({*counts, *_judged(max(counts))})
    points = predict_curve(basis.host, basis.nodes, searched, basis.costs, basis.choice, basis.power)
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
        basis = replace(
            basis, costs=replace(basis.costs, sum_cost=CollectiveCost(per_rank_s=request.node_sum_s))
        )
    if max_nodes > basis.num_nodes:
        origins["reach"] = (
            f"assumption: with more nodes than {basis.num_nodes}, speeds, sum and power are extrapolated"
        )
    return replace(basis, origins=origins)


@dataclass(frozen=True)
class JobOnFleet:
    """A job file and the nodes to forecast it for; the fleet file may be missing."""

    job: Path
    fleet: Path
    limit: Sequence[str] | None = None
    exclude: Sequence[str] | None = None


def forecast_subject(
    subject: Network | JobOnFleet,
    request: ForecastRequest,
    directory: Path,
    say: Say,
    max_global_batch: int | None = None,
) -> Forecast:
    """Forecast a network of the paper, or a job of the project in `directory`.

    `max_global_batch` replaces the limit that the plan was tuned with. Raises InputError when nothing was
    measured, and what building a new model raises.
    """
    if not isinstance(subject, JobOnFleet):
        if max_global_batch:
            raise InputError("the paper's batch sizes are fixed", remedy="leave out --max-global-batch")
        return forecast(published_basis(subject), request)
    if not subject.job.exists():
        raise InputError(
            f"{subject.job} does not exist",
            remedy=f"give a job that was tuned, or forecast without a job: --published {Network.MOBILENETV2}",
        )
    is_fleet_given = subject.fleet.exists() or subject.limit or subject.exclude
    fleet = choose_fleet(subject.fleet, subject.limit, subject.exclude) if is_fleet_given else None
    job, project = load_job(subject.job), ProjectDirectory(directory)
    return forecast(tuned_basis(job, project, fleet, say, request.num_samples, max_global_batch), request)
