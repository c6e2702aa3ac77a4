"""Orders that csdctl sends to a running rank, one line of JSON each on its standard input."""

import json
from dataclasses import dataclass
from typing import Annotated

from csdctl.worker.protocol.json_codec import (
    Generation,
    OneOf,
    RankNumber,
    from_tagged,
    parse_json,
    to_tagged,
)

STAR, ALLREDUCE = "star", "allreduce"
COLLECTIVE_NAMES = (STAR, ALLREDUCE)
"""The collectives that a group can use; group/collective.py implements them."""

MAX_TIMED_SUM_S = 5.0
"""Sums that would take longer are not timed before training: their time follows from smaller ones."""

FASTEST, ALONE = "", "none"
"""The ranks measure which is fastest; a group of one rank has nothing to sum."""

BETWEEN_SERVERS = "between servers"
"""The level of the links of all servers; any other level is that of a server with its nodes."""
CollectiveName = Annotated[str, OneOf((*COLLECTIVE_NAMES, FASTEST, ALONE))]


@dataclass(frozen=True)
class Order:
    """Base of all orders."""


@dataclass(frozen=True)
class FormGroup(Order):
    """Join a group of these ranks; any earlier group is over."""

    generation: Generation
    ranks: tuple[RankNumber, ...]
    """The run's ranks, in order of MPI rank."""
    collective: CollectiveName = FASTEST


@dataclass(frozen=True)
class PauseAtEpochEnd(Order):
    """Leave the group at the end of the epoch: a group with more ranks follows."""


@dataclass(frozen=True)
class Stop(Order):
    """Finish the step, write a checkpoint if the run keeps any, and exit."""


@dataclass(frozen=True)
class Release(Order):
    """The run has ended for this rank: later lines on its standard input are not orders."""


@dataclass(frozen=True)
class Ping(Order):
    """Reply with `Pong`."""

    number: Generation


ORDERS: dict[str, type[Order]] = {kind.__name__: kind for kind in Order.__subclasses__()}


def order_to_line(order: Order) -> str:
    """Return an order as the line that a rank reads."""
    return json.dumps(to_tagged("order", order), separators=(",", ":"))


def order_from_line(line: str) -> Order:
    """Return the order in `line`; raises ProtocolError."""
    return from_tagged("order", ORDERS, parse_json(line))
