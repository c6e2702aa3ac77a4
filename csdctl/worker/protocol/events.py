"""Events: what a rank reports while it runs, one line of JSON each, and which of them belong to a run.

Events from a rank (supervision, launch) and stored ones (runs) are checked by the same rules. Pure.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from csdctl.worker.protocol import json_codec
from csdctl.worker.protocol.json_codec import Count, Epoch, Measured, RankNumber, Seconds, ShortText
from csdctl.worker.protocol.sandbox import SandboxCheck

EARLY_STOPPING, STOPPED, MAX_STEPS, VERIFIED = "early stopping", "asked to stop", "max steps", "verified"
"""Reasons to end a run before its last epoch (`Finished.reason`)."""
SUMS, SAMPLES, STATE, ACTIVATIONS = "sums", "samples", "state", "activations"
"""Traffic between ranks: vectors to be summed, reassigned public samples, the state of a run, and what passes
the cut of a model: activations, labels, and gradients of activations."""
TRAFFIC_NAMES = (SUMS, SAMPLES, STATE, ACTIVATIONS)
TRIED, COMPARED, KEPT, TAKEN_BACK = OUTCOMES = "tried", "compared", "kept", "taken back"
"""What becomes of a change of batch sizes (`Rebalanced.outcome`)."""
EVENT_PREFIX = "@csdctl "
"""An event is a line on the worker's standard output that starts with this."""
MAX_MESSAGE_CHARS = 4000
"""The rest of a longer message of `Failed` or `Warned` is dropped; the log of the rank has it."""
UNKNOWN_NODE = "?"
"""`Failed.node` of a rank that could not read its spec, and does not know where it is."""
_UNSET: tuple[object, ...] = (None, 0, {})


@dataclass(frozen=True)
class Event:
    """Base of all events. `rank` and `node` identify the sender."""

    rank: RankNumber
    node: ShortText


@dataclass(frozen=True)
class SumTimed(Event):
    """The seconds of a sum of vectors of `num_bytes` over these ranks. From rank 0."""

    ranks: tuple[RankNumber, ...]
    num_bytes: Count
    sum_s: Seconds


@dataclass(frozen=True)
class SaveTimed(Event):
    """The seconds in which rank 0 has written a checkpoint to disk."""

    save_s: Seconds


@dataclass(frozen=True)
class Probed(Event):
    """What a rank has measured, as `Probe` orders, or its memory after the steps that `TakeSteps` orders."""

    batch_size: Count
    step_time_s: Annotated[float, json_codec.Between(1e-9, 1e6)] | None
    """Mean seconds of forward, backward and apply for one batch; None: no memory, or steps of all ranks."""
    num_steps: Count
    peak_memory_bytes: Count
    """Of the process so far."""


@dataclass(frozen=True)
class Ready(Event):
    """The rank has loaded model and data, and waits until it can take part."""

    num_samples: Count
    sandbox: SandboxCheck = field(default_factory=SandboxCheck)
    """Whether its machine can run a sandbox for its link, and its network interfaces."""


@dataclass(frozen=True)
class Progress(Event):
    """Totals since the last Progress of this rank. Rank 0 adds loss and metrics of all ranks."""

    epoch: Epoch
    step: Count
    steps: json_codec.NumSteps
    samples: Count
    compute_s: Seconds
    wait_s: Seconds
    wall_s: Seconds
    global_samples: Count = 0
    loss: Measured | None = None
    accuracy: Measured | None = None
    metrics: dict[ShortText, Measured] = field(default_factory=dict)
    input_s: Seconds | None = None
    """The part of compute_s for reading samples."""
    others_s: Seconds | None = None
    """The part of wait_s until the slowest rank had computed; the rest is communication."""
    cpu_s: Seconds | None = None
    memory_bytes: Count | None = None
    slow_link: tuple[RankNumber, Seconds, Count] | None = None
    """The rank for whose link rank 0 waited longest, how long, and the bytes that passed it meanwhile."""


@dataclass(frozen=True)
class Joined(Event):
    """The ranks that take part from here on. They hold the same state. From rank 0."""

    epoch: Epoch
    step: Count
    steps_per_epoch: Count
    total_steps: Count
    batch_sizes: dict[ShortText, Count]
    is_start: bool = False
    """Whether the process of rank 0 begins with this, at the start of a run or after its own loss."""
    lost: tuple[tuple[RankNumber, ShortText], ...] = ()
    num_lost: Count = 0
    """Private samples of this epoch that are not trained on, because their node is lost."""
    epoch_samples: Count = 0
    """Samples of all ranks in the steps of this epoch so far."""


@dataclass(frozen=True)
class Misbehaved(Event):
    """From rank 0: rank `culprit` has violated the protocol."""

    culprit: RankNumber
    message: str


@dataclass(frozen=True)
class Pong(Event):
    """The answer to `Ping`."""

    number: json_codec.PingNumber


@dataclass(frozen=True)
class WaitingFor(Event):
    """The rank has been waiting for these nodes for seconds. Empty when it does not know which."""

    nodes: tuple[ShortText, ...]


@dataclass(frozen=True)
class Rebalanced(Event):
    """Batch sizes from the next step on: a trial, or its outcome. From rank 0."""

    epoch: Epoch
    step: Count
    slowest: ShortText
    """The node that the others waited for before the trial."""
    slowdown: Measured
    """Its compute time over the compute time of a balanced step."""
    batch_sizes: dict[ShortText, Count]
    outcome: Annotated[str, json_codec.OneOf(OUTCOMES)] = KEPT
    gain: Measured | None = None
    """By which share steps were shorter in the trial. None at its start."""


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sent to another. `what` is one of TRAFFIC_NAMES."""

    what: Annotated[str, json_codec.OneOf(TRAFFIC_NAMES)]
    sender: RankNumber
    receiver: RankNumber
    num_bytes: Count


@dataclass(frozen=True)
class Traffic(Event):
    """TCP payload that a rank with a hub and those behind it sent to each other since its process began."""

    sent: tuple[SentBytes, ...]


@dataclass(frozen=True)
class Verified(Event):
    """One step of all ranks against the step that Keras takes of the same global batch."""

    batch_sizes: tuple[Count, ...]
    dtype: ShortText
    """The coarsest type that a layer computes in."""
    sum_difference: Measured
    """The largest difference between the sum and the ranks' vectors added in float64, relative to the sum of
    its terms' magnitudes."""
    sum_rounding: Measured
    """The largest `sum_difference` that rounding to float32 explains, in whatever order they are added."""
    compared_in: ShortText
    """The type that all layers computed in for what follows: finer than `dtype` where it hides a sample."""
    differences: tuple[Measured, ...]
    """Each rank's gradient against Keras' of the same samples, relative to it, in the Euclidean norm."""
    spread: Measured
    """The change of Keras' gradient when the weights move by the rounding of their type."""
    one_sample: Measured
    """The change of Keras' gradient when one sample is another one."""
    weights_hash: ShortText


@dataclass(frozen=True)
class Evaluating(Event):
    """Rank 0 has evaluated `num_done` of `num_samples` validation samples."""

    num_done: Count
    num_samples: Count


@dataclass(frozen=True)
class EpochEnd(Event):
    """The rank has finished an epoch. Rank 0 adds the results of all ranks."""

    epoch: Epoch
    steps: Count
    samples: Count
    compute_s: Seconds
    wait_s: Seconds
    wall_s: Seconds
    weights_hash: ShortText
    global_samples: Count = 0
    loss: Measured | None = None
    accuracy: Measured | None = None
    validation_loss: Measured | None = None
    validation_accuracy: Measured | None = None
    learning_rate: Measured | None = None
    metrics: dict[ShortText, Measured] = field(default_factory=dict)
    validation_metrics: dict[ShortText, Measured] = field(default_factory=dict)
    num_lost: Count = 0
    """Private samples that were not trained on, because their node was lost."""
    stepped_samples: Count = 0
    """Samples of all ranks in the `steps` of this event; `global_samples` includes steps before a loss."""
    input_s: Seconds | None = None
    others_s: Seconds | None = None
    cpu_s: Seconds | None = None
    noise_scale: Measured | None = None
    """Gradient noise scale of these steps in samples; None where it cannot be told."""


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A complete checkpoint is on disk."""

    epoch: Epoch
    step: Count
    path: str
    is_best: bool = False


@dataclass(frozen=True)
class Finished(Event):
    """The completion record of a rank. Rank 0 sends it when the run is complete."""

    epochs: Epoch
    steps: Count
    weights_hash: ShortText
    peak_memory_bytes: Count
    model_path: str | None = None
    reason: ShortText = ""
    """Why the rank finished before the last epoch: EARLY_STOPPING, STOPPED, …; '' after the last."""


def describe_model(run_id: str, weights_hash: str) -> str:
    """Return the comment of the archive of a saved model. `weights_hash`: as in `Finished`."""
    return f"run {run_id}, weights {weights_hash}"


@dataclass(frozen=True)
class Failed(Event):
    """The rank exits with an error. `message` and `remedy` are for people."""

    message: str
    remedy: str = ""
    exit_code: json_codec.ExitCode = 1


@dataclass(frozen=True)
class Warned(Event):
    """What went wrong without an end of the run, such as a damaged checkpoint, and what to do."""

    message: str
    remedy: str = ""


@dataclass(frozen=True)
class NodeLost(Event):
    """From csdctl: this rank no longer takes part. The other ranks continue."""

    message: str
    remedy: str = ""


@dataclass(frozen=True)
class NodeBack(Event):
    """From csdctl: this rank takes part again."""


EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def event_document(event: Event) -> dict[str, Any]:
    """Return an event as `event` (its type) and its fields by name."""
    return json_codec.to_tagged("event", event)


def event_to_line(event: Event) -> str:
    """Return an event as the line that the worker prints."""
    return EVENT_PREFIX + json.dumps(event_document(event), separators=(",", ":"), allow_nan=True)


def event_from_line(line: str) -> Event | None:
    """Return the event in `line`, None for any other line. Raises ProtocolError when it is not valid."""
    if not line.startswith(EVENT_PREFIX):
        return None
    return event_from_document(
        json_codec.without_surrogates(json_codec.parse_json(line.removeprefix(EVENT_PREFIX)))
    )


def event_from_document(content: Any) -> Event:
    """Return the event that `event_document` returned as `content`. Raises ProtocolError for any other."""
    event = json_codec.from_tagged("event", EVENTS, content)
    if isinstance(event, Failed | Warned):
        event = dataclasses.replace(event, message=_cut(event.message), remedy=_cut(event.remedy))
    return event


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


FROM_RANK_0 = (Rebalanced, Verified, Evaluating, CheckpointSaved, Joined, SumTimed, SaveTimed)
"""Events that concern all ranks, or something on the host."""
FROM_CSDCTL = (NodeLost, NodeBack)
FIELDS_OF_RANK_0 = {
    Progress: ("global_samples", "loss", "accuracy", "metrics", "slow_link"),
    EpochEnd: (
        *("global_samples", "loss", "accuracy", "metrics", "learning_rate", "num_lost", "stepped_samples"),
        *("validation_loss", "validation_accuracy", "validation_metrics", "noise_scale"),
    ),
    Finished: ("model_path",),
}
"""Fields that only rank 0 fills in; the others leave them as they are by default."""


def check_event(event: Event, nodes: Sequence[str], sender: int | None = None) -> None:
    """Raise ProtocolError unless a rank of the run on `nodes`, `sender` if known, may have sent `event`."""
    name = type(event).__name__
    rank = event.rank if sender is None else sender
    is_lost = sender is None and isinstance(event, Failed) and event.node == UNKNOWN_NODE
    if event.rank != rank or rank >= len(nodes) or not (event.node == nodes[rank] or is_lost):
        any_rank = f"one of {len(nodes)} ranks and its node"
        expected = any_rank if sender is None else f"rank {rank} on {nodes[rank]}"
        received = f"rank {event.rank} on {json_codec.shorten(event.node)}"
        raise json_codec.ProtocolError(f"{name}: expected {expected}, received {received}")
    if event.rank != 0:
        _check_is_own(event)
    if isinstance(event, Verified) and {len(event.batch_sizes), len(event.differences)} != {len(nodes)}:
        raise json_codec.ProtocolError(
            f"{name}: expected results of {len(nodes)} ranks, received a different number"
        )
    named: Sequence[str] = event.nodes if isinstance(event, WaitingFor) else ()
    if isinstance(event, Rebalanced):
        named = (event.slowest,)
    if len(named) > len(nodes) or not set(named) <= set(nodes):
        raise json_codec.ProtocolError(
            f"{name}: expected nodes of the run, received {json_codec.shorten(named)}"
        )
    ranks = set(_ranks_in(event))
    if ranks and (unknown := ranks - set(map(str, range(len(nodes))))):
        raise json_codec.ProtocolError(
            f"{name}: expected ranks of the run, received {json_codec.shorten(sorted(unknown))}"
        )


def _check_is_own(event: Event) -> None:
    name = type(event).__name__
    if isinstance(event, FROM_RANK_0):
        raise json_codec.ProtocolError(f"{name}: expected only from rank 0")
    for field_name in FIELDS_OF_RANK_0.get(type(event), ()):
        value = getattr(event, field_name)
        if type(value) is float or value not in _UNSET:
            raise json_codec.ProtocolError(
                f"{name}.{field_name}: expected only from rank 0, received {json_codec.shorten(value)}"
            )
    for row in event.sent if isinstance(event, Traffic) else ():
        if event.rank not in (row.sender, row.receiver) or 0 in (row.sender, row.receiver):
            raise json_codec.ProtocolError(
                f"{name}: expected bytes between rank {event.rank} and ranks behind it, "
                f"received those from {row.sender} to {row.receiver}"
            )


def _ranks_in(event: Event) -> Iterable[str]:
    if isinstance(event, Joined | Rebalanced):
        return event.batch_sizes
    if isinstance(event, Misbehaved):
        return [str(event.culprit)]
    if isinstance(event, Progress):
        return [str(event.slow_link[0])] if event.slow_link else []
    if isinstance(event, Traffic):
        return [str(rank) for row in event.sent for rank in (row.sender, row.receiver)]
    return []
