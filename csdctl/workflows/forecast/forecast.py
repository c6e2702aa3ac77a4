"""`forecast`: what a training will come to, before anything runs.

A `ForecastBasis` is what is known and where from: the paper's figures, or what `tune` measured. A `Forecast`
is the curve over the number of nodes that follows from it. Nothing here connects to a machine.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from csdctl.errors import InputError
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.energy import Power
from csdctl.perfmodel.scaling import CurvePoint, predict_curve
from csdctl.perfmodel.verdict import Verdict, judge
from csdctl.tuning.scaling_curve import Costs, predict_best_curve
from csdctl.workflows.forecast.basis import ForecastBasis

MAX_NODES = 10_000
MOST_SEARCHED = 60
"""Where each number of nodes takes a search, so many of those asked for: `1..10000` takes seconds."""
MOST_JUDGED = 40
FEW_JUDGED = 16
"""Where each number of nodes takes a search, a verdict looks at all of them up to the first, and beyond it at
so many between 0 and the largest, and at 1, 2, 4, … for the least number that is worth it."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class ForecastRequest:
    """What is asked, and what the person who asks knows better than the basis."""

    node_counts: Sequence[int] | None = None
    epochs: int | None = None
    num_samples: int | None = None
    """Of an epoch."""
    power: Power | None = None
    node_sum_s: float | None = None
    """Seconds that each node adds to the sum over the ranks."""


@dataclass(frozen=True)
class Forecast:
    """The answer."""

    basis: ForecastBasis
    points: list[CurvePoint]
    """For each number of nodes that was asked for, or MOST_SEARCHED of them."""
    verdict: Verdict | None
    """Of the largest number of nodes; None for a host alone."""

    @property
    def num_samples(self) -> int | None:
        """Of all epochs."""
        return None if self.basis.num_samples is None else self.basis.num_samples * self.basis.epochs


def forecast(basis: ForecastBasis, question: ForecastRequest) -> Forecast:
    """Answer `question`; raises InputError for what cannot be asked of this basis."""
    counts = range(basis.num_nodes + 1) if question.node_counts is None else question.node_counts
    basis = _informed(basis, question, max(counts))
    if max(counts) and not basis.nodes:
        raise InputError(
            "the plan has the host alone: what nodes would add is not known",
            remedy="run `csdctl tune` with at least one node, or ask with --published",
        )
    if basis.choice is not None and len(counts) > MOST_SEARCHED:
        shown = f"{MOST_SEARCHED} of the {len(counts):,} asked for: each takes a search of its own"
        basis = replace(basis, origins={**basis.origins, "numbers_of_nodes": shown})
        counts = pick_evenly(counts, MOST_SEARCHED)
    curve = _predict_curve(basis, counts)
    verdict = judge(list(curve.values()), basis.nodes) if max(counts) else None
    return Forecast(basis, [curve[count] for count in counts], verdict)


def pick_evenly(values: Sequence[ValueT], most: int) -> Sequence[ValueT]:
    """All, or `most` of them: evenly, with the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _predict_curve(basis: ForecastBasis, counts: Sequence[int]) -> dict[int, CurvePoint]:
    """Points by the number of nodes, in its order: those asked for, and what a verdict on them needs."""
    most = max(counts)
    if basis.choice is None:
        points = predict_curve(
            basis.host,
            basis.nodes,
            most,
            basis.sum_cost,
            gradient_bytes=basis.gradient_bytes,
            stretch=basis.stretch,
            power=basis.power,
        )
    else:
        costs = Costs(basis.sum_cost, basis.gradient_bytes, basis.stretch)
        looked_at = sorted({*counts, *_judged(most)})
        points = predict_best_curve(basis.host, basis.nodes, looked_at, basis.choice, costs, basis.power)
    return {point.num_nodes: point for point in points}


def _judged(most: int) -> set[int]:
    """The numbers of nodes that a verdict on `most` looks at."""
    if most <= MOST_JUDGED:
        return set(range(most + 1))
    doubled = {1 << power for power in range(most.bit_length())}
    return doubled | {round(part * most / FEW_JUDGED) for part in range(FEW_JUDGED + 1)}


def given_power(
    host_watts: float | None, node_watts: float | None, alone_watts: float | None
) -> Power | None:
    """The powers of the command line; raises InputError when one is missing or no power."""
    if host_watts is None and node_watts is None and alone_watts is None:
        return None
    if host_watts is None or node_watts is None:
        raise InputError(
            "energy needs the power of the host and of a node", remedy="give --host-watts and --node-watts"
        )
    known = [watts for watts in (host_watts, node_watts, alone_watts) if watts is not None]
    if not all(math.isfinite(watts) and watts >= 0 for watts in known) or host_watts == 0:
        raise InputError(
            f"{', '.join(f'{watts:g} W' for watts in known)} cannot be the powers of machines",
            remedy="give what a meter shows while they train, in watts",
        )
    return Power(host_watts, node_watts, alone_watts)


def parse_node_counts(written: str) -> list[int]:
    """Numbers of nodes from `24`, `1..36` or `4,8,16`; raises InputError."""
    counts: list[int] = []
    for part in written.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part, re.ASCII)
        if not found or int(found[2] or found[1]) > MAX_NODES or int(found[2] or found[1]) < int(found[1]):
            raise InputError(
                f"--nodes {written!r} cannot be used",
                remedy=f"give a number up to {MAX_NODES}, a range such as 1..36, or several: 4,8,16",
            )
        counts.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return sorted(set(counts))


def _informed(basis: ForecastBasis, question: ForecastRequest, max_nodes: int) -> ForecastBasis:
    """The basis with what the question says instead, and what it leaves to be assumed."""
    if question.epochs is not None:
        basis = replace(basis, epochs=question.epochs)
    if question.num_samples is not None:
        origins = {**basis.origins, "samples": "as given on the command line"}
        basis = replace(basis, num_samples=question.num_samples, origins=origins)
    if question.power is not None:
        origins = {**basis.origins, "power": "assumption: as given on the command line"}
        basis = replace(basis, power=question.power, origins=origins)
    if question.node_sum_s is not None:
        if not math.isfinite(question.node_sum_s):
            raise InputError(f"--sum-seconds {question.node_sum_s} is no time", remedy="give seconds")
        origins = {
            **basis.origins,
            "sum": f"assumption: {question.node_sum_s:g} s for each node, as given on the command line",
        }
        cost = CollectiveCost(per_rank_s=question.node_sum_s)
        basis = replace(basis, sum_cost=cost, origins=origins)
    if max_nodes > basis.num_nodes:
        reach = f"assumption: with more nodes than {basis.num_nodes}, speeds, sum and power go on like that"
        basis = replace(basis, origins={**basis.origins, "reach": reach})
    return basis
