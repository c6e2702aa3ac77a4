"""Orders that csdctl sends to a running rank, one line of JSON each on its standard input."""

import json
from dataclasses import dataclass

from csdctl.worker.protocol import json_codec
from csdctl.worker.protocol.json_codec import BatchSize, Count, NumSteps, RankNumber, Seconds, ShortText


@dataclass(frozen=True)
class Order:
    """Base of all orders."""


@dataclass(frozen=True)
class OpenHub(Order):
    """Await the links of the ranks behind this one, with this key. To rank 0 and the ranks of servers."""

    key: ShortText


@dataclass(frozen=True)
class Begin(Order):
    """Begin, on rank 0, as soon as these ranks have joined."""

    ranks: tuple[RankNumber, ...]


@dataclass(frozen=True)
class Stop(Order):
    """Finish the step, write a checkpoint if the run keeps any, and exit."""


@dataclass(frozen=True)
class ProbeRequest:
    """Measure one batch size, for at least `min_steps` steps and `min_duration_s` seconds."""

    batch_size: BatchSize
    min_steps: NumSteps = 3
    min_duration_s: Seconds = 1.0
    warm_up_steps: Count = 2
    """Steps before the measurement: the first step of a size allocates memory and selects kernels."""


@dataclass(frozen=True)
class Probe(Order):
    """Measure, in a tuning run, the step of each of these ranks alone, all at once. The others wait."""

    requests: dict[ShortText, ProbeRequest]
    """By rank."""


@dataclass(frozen=True)
class TrialShard:
    """What a rank has in the steps of a trial."""

    batch_size: Count
    max_batch_size: Count
    micro_batch_size: BatchSize | None
    num_private: Count
    """Samples in all steps."""
    num_public: Count


@dataclass(frozen=True)
class TakeSteps(Order):
    """Train, in a tuning run, as long as the samples of these ranks last."""

    ranks: tuple[TrialShard, ...]
    """In order of rank."""
    is_balanced: bool = False
    """Whether batch sizes change, as in training."""


@dataclass(frozen=True)
class Ping(Order):
    """Reply with `Pong`."""

    number: json_codec.PingNumber


ORDERS: dict[str, type[Order]] = {kind.__name__: kind for kind in Order.__subclasses__()}


def order_to_line(order: Order) -> str:
    """Return an order as the line that a rank reads."""
    return json.dumps(json_codec.to_tagged("order", order), separators=(",", ":"))


def order_from_line(line: str) -> Order:
    """Return the order in `line`. Raises ProtocolError."""
    return json_codec.from_tagged("order", ORDERS, json_codec.parse_json(line))
