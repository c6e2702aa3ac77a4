"""The basis of a forecast, and the basis that needs no fleet: the paper's figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from csdctl.perfmodel.energy import Power
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
from csdctl.perfmodel.scaling import PlannedRank
from csdctl.tuning.scaling_curve import Choice

EMULATED = "emulated on one machine, which shows how ranks balance, not how fast a device is: "
NO_SUM = "unknown, counted as 0 s: an upper bound (--sum-seconds)"
NO_POWER = "unknown (--host-watts, --node-watts)"


@dataclass(frozen=True)
class ForecastBasis:
    """What a forecast is computed from."""

    title: str
    source: Literal["published", "measured", "guessed", "emulated"]
    host: PlannedRank
    nodes: tuple[PlannedRank, ...]
    """The fleet's nodes in order; a larger fleet repeats them."""
    num_nodes: int
    """Of the fleet."""
    sum_cost: SumCost
    origins: Mapping[str, str]
    """The origins of `speeds`, `sum`, `power` and more, as sentences; assumptions are marked as such."""
    gradient_bytes: int = 0
    overhead_factor: float = 1.0
    power: Power | None = None
    num_samples: int | None = None
    """Of an epoch; None: unknown."""
    epochs: int = 1
    choice: Choice | None = None
    """How batch sizes are chosen for other numbers of nodes; None: they are fixed."""


def published_basis(network: Network) -> ForecastBasis:
    """Return the paper's host and Newports; its data set is 84,000 images."""
    row = TABLE_1[network]
    measured_with = TABLE_1[Network.MOBILENETV2]
    power = fit_newport_power()
    sum_origin = f"a ring, fitted to the published speed-up of {LARGEST_SPEEDUP}"
    power_origin = (
        f"{power.host_w:.0f} W and {power.node_w:.2f} W for each CSD that trains, fitted to the published "
        f"Table II; the host alone is another server, with 24 ordinary SSDs: {power.without_nodes_w:.0f} W; "
        f"assumption: all {NUM_NEWPORTS} CSDs are in the server, however many of them train"
    )
    if row is not measured_with:
        sum_origin += f" of {measured_with.title}; assumption: {row.title} takes the same time for a byte"
        power_origin += f"; measured with {measured_with.title}; almost the same with others (section V.B)"
    return ForecastBasis(
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
