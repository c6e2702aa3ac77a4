"""`plan`: what a training will come to, before anything runs.

A `Basis` is what is known and where from: the paper's figures, or the plan that `tune` wrote. A `Forecast`
is the curve over the number of nodes that follows from it. Nothing here connects to a machine.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.energy import Power
from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.published import (
    LARGEST_SPEEDUP,
    NUM_NEWPORTS,
    NUM_PRIVATE,
    NUM_PUBLIC,
    SOURCE,
    TABLE_1,
    Network,
)
from csdctl.perfmodel.published_fits import fit_newport_power, fit_ring
from csdctl.perfmodel.ring import SumCost
from csdctl.perfmodel.scaling import CurvePoint, PlannedRank, predict_curve
from csdctl.perfmodel.step_time import StepTime
from csdctl.perfmodel.verdict import Verdict, judge
from csdctl.runs.directory import ProjectDirectory
from csdctl.tuning.plan import Plan, RankPlan, load_plan

MAX_NODES = 10_000
RETUNE = "run `csdctl tune` again"


@dataclass(frozen=True)
class Basis:
    """What a forecast is computed from."""

    title: str
    source: Literal["published", "measured", "emulated"]
    host: PlannedRank
    nodes: tuple[PlannedRank, ...]
    """The fleet's nodes in order; a larger fleet begins with them again."""
    num_nodes: int
    """What the fleet has."""
    sum_cost: SumCost
    origins: Mapping[str, str]
    """Where `speeds`, `sum` and `power` come from, in words; assumptions are called so."""
    gradient_bytes: int = 0
    stretch: float = 1.0
    power: Power | None = None
    num_samples: int | None = None
    """Of an epoch, where that is known."""
    epochs: int = 1


@dataclass(frozen=True)
class Question:
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

    basis: Basis
    points: list[CurvePoint]
    """For each number of nodes that was asked for."""
    verdict: Verdict | None
    """Of the largest number of nodes; None for a host alone."""

    @property
    def num_samples(self) -> int | None:
        """Of all epochs."""
        return None if self.basis.num_samples is None else self.basis.num_samples * self.basis.epochs


def published_basis(network: Network) -> Basis:
    """The paper's host and Newports; its data set is 84,000 images."""
    row = TABLE_1[network]
    measured_with = TABLE_1[Network.MOBILENETV2]
    power = fit_newport_power()
    sum_origin = f"a ring, fitted to the published speed-up of {LARGEST_SPEEDUP}"
    power_origin = (
        f"{power.host_w:.0f} W and {power.node_w:.2f} W for each CSD that trains, fitted to the published "
        f"Table II; the host alone is another server, with 24 ordinary SSDs: {power.without_nodes_w:.0f} W; "
        f"assumption: all {NUM_NEWPORTS} CSDs are in the server, however many train"
    )
    if row is not measured_with:
        sum_origin += f" of {measured_with.title}; assumption: {row.title} takes as long for a byte"
        power_origin += f"; measured with {measured_with.title}; almost the same with others (section V.B)"
    return Basis(
        title=f"{row.title} on a server with Newport CSDs",
        source="published",
        host=row.host,
        nodes=(row.node,),
        num_nodes=NUM_NEWPORTS,
        sum_cost=fit_ring(),
        gradient_bytes=row.gradient_bytes,
        origins={
            "speeds": f"published, {SOURCE}, Table I; nothing was measured here",
            "sum": sum_origin,
            "power": power_origin,
        },
        power=power,
        num_samples=NUM_PUBLIC + NUM_PRIVATE,
    )


def plan_basis(project: ProjectDirectory, job: Job) -> Basis:
    """What `csdctl tune` measured for `job`; raises InputError when that cannot be used."""
    path = project.plan(job.name)
    plan = load_plan(path)
    if plan.job_fingerprint != job.fingerprint():
        raise InputError(
            f"the plan does not fit {job.path}: job, model or recipe changed since tuning", remedy=RETUNE
        )
    if plan.ranks[0].node != HOST_NAME:
        raise InputError(f"{path}: the first rank is not `{HOST_NAME}`", remedy=RETUNE)
    host, *nodes = [_planned_rank(plan, rank) for rank in plan.ranks]
    measured = f"measured by `csdctl tune`, {plan.num_probes} probes"
    if plan.emulated:
        measured = (
            f"emulated: {measured} on one machine; it shows how ranks balance, never how fast a device is"
        )
    return Basis(
        title=plan.job,
        source="emulated" if plan.emulated else "measured",
        host=host,
        nodes=tuple(nodes),
        num_nodes=len(nodes),
        sum_cost=CollectiveCost(),
        origins={
            "speeds": measured,
            "sum": "not known, counted as nothing: an upper bound (--sum-seconds)",
            "power": "not known (--host-watts, --node-watts)",
        },
        epochs=job.recipe.epochs,
    )


def forecast(basis: Basis, question: Question) -> Forecast:
    """Answer `question`; raises InputError for what cannot be asked of this basis."""
    counts = range(basis.num_nodes + 1) if question.node_counts is None else question.node_counts
    basis = _informed(basis, question, max(counts))
    if max(counts) and not basis.nodes:
        raise InputError(
            "the plan has the host alone: what nodes would add is not known",
            remedy="run `csdctl tune` with at least one node, or ask with --published",
        )
    curve = predict_curve(
        basis.host,
        basis.nodes,
        max(counts),
        basis.sum_cost,
        gradient_bytes=basis.gradient_bytes,
        stretch=basis.stretch,
        power=basis.power,
    )
    verdict = judge(curve, basis.nodes) if len(curve) > 1 else None
    return Forecast(basis, [curve[count] for count in counts], verdict)


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


def _planned_rank(plan: Plan, rank: RankPlan) -> PlannedRank:
    if rank.step_time_s is None:
        raise InputError(f"the plan of {plan.job} has no step time for {rank.node}", remedy=RETUNE)
    # The plan may be edited: its time is that of the batch size which was measured, and at another one the
    # machine is taken to be as fast.
    measured_size = round((rank.images_per_s or 0) * rank.step_time_s) or rank.batch_size
    step_time = StepTime(0.0, rank.step_time_s / measured_size)
    return PlannedRank(RankModel(rank.node, step_time), rank.batch_size)


def _informed(basis: Basis, question: Question, max_nodes: int) -> Basis:
    """The basis with what the question says instead, and what it leaves to be assumed."""
    if question.epochs is not None:
        basis = replace(basis, epochs=question.epochs)
    if question.num_samples is not None:
        basis = replace(basis, num_samples=question.num_samples)
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
