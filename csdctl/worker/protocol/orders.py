"""Orders: what a running rank is told, one line of JSON each."""

import dataclasses
import json
from dataclasses import dataclass

from csdctl.worker.protocol.json_codec import ProtocolError, from_dict


@dataclass(frozen=True)
class Order:
    """Base of what csdctl tells a running rank, a line on its standard input each."""


@dataclass(frozen=True)
class FormGroup(Order):
    """Train with these ranks from now on; an earlier group is over."""

    generation: int
    ranks: tuple[int, ...]
    """In order of MPI rank; numbers of the run's ranks."""
    collective: str = ""
    """The one to use; '' measures."""


@dataclass(frozen=True)
class PauseAtEpochEnd(Order):
    """Leave the group at the end of the epoch: another one, with more ranks, comes next."""


@dataclass(frozen=True)
class Stop(Order):
    """Finish the step, keep a checkpoint where any is kept, and end."""


@dataclass(frozen=True)
class Release(Order):
    """The run is over for this rank: what comes after is not said to a rank."""


@dataclass(frozen=True)
class Ping(Order):
    """Answer with `Alive`."""

    number: int


ORDERS: dict[str, type[Order]] = {
    kind.__name__: kind for kind in (FormGroup, PauseAtEpochEnd, Stop, Release, Ping)
}


def order_to_line(order: Order) -> str:
    """An order as the line that a rank reads."""
    return json.dumps({"order": type(order).__name__, **dataclasses.asdict(order)}, separators=(",", ":"))


def order_from_line(line: str) -> Order:
    """The order in `line`; raises ProtocolError."""
    try:
        content = json.loads(line)
        kind = ORDERS[content.pop("order")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not an order: {line[:120]!r} ({error})") from None
    order: Order = from_dict(kind, content)
    return order
