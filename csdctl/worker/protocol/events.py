"""Events: what a rank reports while it runs, one line of JSON each."""

import dataclasses
import json
from dataclasses import dataclass, field

from csdctl.worker.protocol.json_codec import ProtocolError, from_dict

EVENT_PREFIX = "@csdctl "
"""An event is a line on the worker's standard output that starts with this."""


EARLY_STOPPING, STOPPED, MAX_STEPS, VERIFIED = "early stopping", "asked to stop", "max steps", "verified"
"""Why a run ends before its last epoch (`Finished.reason`)."""


SUMS, SAMPLES, STATE = "sums", "samples", "state"
"""What ranks send each other: gradients to be summed, public samples that were lent, the state of a run."""


@dataclass(frozen=True)
class Event:
    """Base of all events; `rank` and `node` say who speaks."""

    rank: int
    node: str


@dataclass(frozen=True)
class Started(Event):
    """The rank's process runs, and enters MPI next."""

    hostname: str


@dataclass(frozen=True)
class MpiChecked(Event):
    """A rank that only says hello has summed a vector with all others: seconds of the quickest sum."""

    mpi_library: str
    vector_bytes: int
    sum_s: float


@dataclass(frozen=True)
class CollectiveTimed(Event):
    """The first `num_ranks` ranks have summed vectors in the quickest way: seconds of one sum."""

    num_ranks: int
    num_bytes: int
    """Of one rank's vector."""
    collective: str
    sum_s: float


@dataclass(frozen=True)
class Ready(Event):
    """The rank has its model and data, and waits for the others."""

    num_samples: int
    setup_s: float


@dataclass(frozen=True)
class Progress(Event):
    """Sums since the last Progress of this rank; loss and accuracy of all ranks, from rank 0 only."""

    epoch: int
    step: int
    steps: int
    samples: int
    compute_s: float
    wait_s: float
    wall_s: float
    global_samples: int = 0
    loss: float | None = None
    accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Joined(Event):
    """The ranks of a group have found each other and hold the same state; from each of them."""

    generation: int
    epoch: int
    step: int
    steps_per_epoch: int
    total_steps: int
    batch_sizes: dict[str, int]
    """Of the group's ranks, by number."""
    collective: str
    sum_s: float
    num_lost: int = 0
    """Private samples of this epoch that nobody reads any more, because their node is away."""


@dataclass(frozen=True)
class LinkLost(Event):
    """This rank's way to the others is gone; it waits for a new group."""

    generation: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Paused(Event):
    """The rank has left its group as it was told to, and waits for the next one."""

    generation: int


@dataclass(frozen=True)
class Pong(Event):
    """The answer to `AreYouThere`."""

    number: int


@dataclass(frozen=True)
class WaitingFor(Event):
    """The rank has waited for these nodes for some seconds; it does not know for whom when there are none."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Rebalanced(Event):
    """Rank 0 tells the batch sizes from the next step on, and whom they relieve."""

    epoch: int
    step: int
    slowest: str
    slowdown: float
    """Its step time over that of a balanced step."""
    batch_sizes: dict[str, int]


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank of a group sent to another; `what` is SUMS, SAMPLES or STATE."""

    what: str
    sender: int
    receiver: int
    num_bytes: int


@dataclass(frozen=True)
class Traffic(Event):
    """Rank 0 tells what the ranks of a group have sent to each other over MPI since they met.

    Ranks are numbers of the run, and bytes payload of TCP.
    """

    generation: int
    sent: tuple[SentBytes, ...]


@dataclass(frozen=True)
class Verified(Event):
    """The ranks' gradient was compared with that of one process; relative differences, Euclidean norm."""

    global_batch: int
    batch_sizes: tuple[int, ...]
    by_parts: float
    """One process that computes every rank's batch in turn."""
    as_one_batch: float | None
    """One process with one batch of all samples; None where a batch's samples depend on each other."""
    weights_hash: str
    collective: str


@dataclass(frozen=True)
class Evaluating(Event):
    """Rank 0 evaluates: `num_done` of `num_samples` validation samples."""

    num_done: int
    num_samples: int


@dataclass(frozen=True)
class EpochEnd(Event):
    """One epoch is done on this rank; rank 0 adds what holds for all."""

    epoch: int
    steps: int
    samples: int
    compute_s: float
    wait_s: float
    wall_s: float
    weights_hash: str
    global_samples: int = 0
    loss: float | None = None
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    learning_rate: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validation_metrics: dict[str, float] = field(default_factory=dict)
    num_lost: int = 0
    """Private samples that nobody read, because their node was away."""
    stepped_samples: int = 0
    """Of all ranks in the `steps` of this event; `global_samples` has those before a loss too."""


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk, whole."""

    epoch: int
    step: int
    path: str
    is_best: bool = False


@dataclass(frozen=True)
class Finished(Event):
    """The completion record: this rank has done all its steps. No run is done without all of them."""

    epochs: int
    steps: int
    weights_hash: str
    peak_memory_bytes: int
    model_path: str | None = None
    reason: str = ""
    """Why before the last epoch: '' when it was the last, EARLY_STOPPING, STOPPED or MAX_STEPS."""


@dataclass(frozen=True)
class Failed(Event):
    """The rank gives up; `message` and `remedy` are for people."""

    message: str
    remedy: str = ""
    exit_code: int = 1


@dataclass(frozen=True)
class NodeLost(Event):
    """csdctl itself: this rank no longer takes part; the others go on."""

    message: str


@dataclass(frozen=True)
class NodeBack(Event):
    """csdctl itself: this rank runs again, and joins at the end of the epoch."""


@dataclass(frozen=True)
class Exited(Event):
    """The shell that started a rank says how it ended, when that was not well: 128 + signal, or its code."""

    code: int


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        Started,
        MpiChecked,
        CollectiveTimed,
        Ready,
        Joined,
        LinkLost,
        Paused,
        Pong,
        WaitingFor,
        Progress,
        Rebalanced,
        Traffic,
        Verified,
        Evaluating,
        EpochEnd,
        CheckpointSaved,
        Finished,
        Failed,
        NodeLost,
        NodeBack,
        Exited,
    )
}


def event_to_line(event: Event) -> str:
    """An event as the line the worker prints."""
    content = {"event": type(event).__name__, **dataclasses.asdict(event)}
    return EVENT_PREFIX + json.dumps(content, separators=(",", ":"), allow_nan=True)


def event_from_line(line: str) -> Event | None:
    """The event in `line`, or None when the line is not one; raises ProtocolError when it is damaged."""
    if not line.startswith(EVENT_PREFIX):
        return None
    try:
        content = json.loads(line[len(EVENT_PREFIX) :])
        kind = EVENTS[content.pop("event")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not an event: {line[:120]!r} ({error})") from None
    event: Event = from_dict(kind, content)
    return event
