"""The user's request for a forecast, parsed from the command line."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from csdctl.errors import InputError
from csdctl.perfmodel.energy import Power

MAX_NODES = 10_000


@dataclass(frozen=True)
class ForecastRequest:
    """The numbers of nodes to forecast, and figures that replace those of the basis."""

    node_counts: Sequence[int] | None = None
    """None: 0 to all nodes of the basis."""
    epochs: int | None = None
    num_samples: int | None = None
    """Of an epoch."""
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
