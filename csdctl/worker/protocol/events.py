"""Events: what a rank reports while it runs, one line of JSON each."""

import dataclasses
import json
from dataclasses import dataclass, field

from csdctl.worker.protocol.json_codec import ProtocolError, from_dict

EVENT_PREFIX = "@csdctl "
"""An event is a line on the worker's standard output that starts with this."""


EARLY_STOPPING, STOPPED, MAX_STEPS, VERIFIED = "early stopping", "asked to stop", "max steps", "verified"
"""Reasons to end a run before its last epoch (`Finished.reason`)."""


SUMS, SAMPLES, STATE = "sums", "samples", "state"
"""Traffic between ranks: vectors to be summed, reassigned public samples, the state of a run."""


@dataclass(frozen=True)
class Event:
    """Base of all events; `rank` and `node` are those of the sender."""

    rank: int
    node: str


@dataclass(frozen=True)
class Started(Event):
    """The process of an MPI check has started, and enters MPI next."""

    hostname: str


@dataclass(frozen=True)
class MpiChecked(Event):
    """The rank of an MPI check has summed a vector with all others: seconds of the fastest sum."""

    mpi_library: str
    vector_bytes: int
    sum_s: float


@dataclass(frozen=True)
class CollectiveTimed(Event):
    """The first `num_ranks` ranks have timed the collectives: the fastest, and the seconds of one sum."""

    num_ranks: int
    num_bytes: int
    """Of one rank's vector."""
    collective: str
    sum_s: float


@dataclass(frozen=True)
class Ready(Event):
    """The rank has loaded model and data, and waits for a group."""

    num_samples: int
    setup_s: float


@dataclass(frozen=True)
class Progress(Event):
    """Totals since the last Progress of this rank; rank 0 adds loss and metrics of all ranks."""

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
    """The rank has joined a group, whose ranks now hold the same state."""

    generation: int
    epoch: int
    step: int
    steps_per_epoch: int
    total_steps: int
    batch_sizes: dict[str, int]
    """Of the group's ranks, by rank number."""
    collective: str
    sum_s: float
    num_lost: int = 0
    """Private samples of this epoch that are not trained on, because their node is lost."""


@dataclass(frozen=True)
class LinkLost(Event):
    """The rank has lost its link, and waits for a new group."""

    generation: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Misbehaved(Event):
    """From rank 0, or from the MPI check: rank `culprit` has sent the others what no rank may send."""

    culprit: int
    message: str


@dataclass(frozen=True)
class Paused(Event):
    """The rank has left its group as ordered, and waits for the next one."""

    generation: int


@dataclass(frozen=True)
class Pong(Event):
    """The answer to `Ping`."""

    number: int


@dataclass(frozen=True)
class WaitingFor(Event):
    """The rank has been waiting for these nodes for seconds; empty when it does not know which."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Rebalanced(Event):
    """Batch sizes from the next step on, and the slowest node; from rank 0."""

    epoch: int
    step: int
    slowest: str
    slowdown: float
    """Its compute time over that of a balanced step."""
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
    """What the ranks of a group have sent to each other over MPI since it formed; from rank 0.

    Ranks are numbers of the run; bytes are TCP payload.
    """

    generation: int
    sent: tuple[SentBytes, ...]


@dataclass(frozen=True)
class Verified(Event):
    """The ranks' gradient against that of one process: relative differences in the Euclidean norm."""

    global_batch: int
    batch_sizes: tuple[int, ...]
    by_parts: float
    """To one process that computes every rank's batch in turn."""
    as_one_batch: float | None
    """To one process with one batch of all samples; None where samples of a batch affect each other."""
    weights_hash: str
    collective: str


@dataclass(frozen=True)
class Evaluating(Event):
    """Rank 0 has evaluated `num_done` of `num_samples` validation samples."""

    num_done: int
    num_samples: int


@dataclass(frozen=True)
class EpochEnd(Event):
    """The rank has finished an epoch; rank 0 adds the results of all ranks."""

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
    """Private samples that were not trained on, because their node was lost."""
    stepped_samples: int = 0
    """Of all ranks in the `steps` of this event; `global_samples` includes steps before a loss."""


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A complete checkpoint is on disk."""

    epoch: int
    step: int
    path: str
    is_best: bool = False


@dataclass(frozen=True)
class Finished(Event):
    """The completion record of a rank. A run is done only when every rank has sent one."""

    epochs: int
    steps: int
    weights_hash: str
    peak_memory_bytes: int
    model_path: str | None = None
    reason: str = ""
    """Why the rank finished before the last epoch: EARLY_STOPPING, STOPPED, …; '' after the last."""


@dataclass(frozen=True)
class Failed(Event):
    """The rank exits with an error; `message` and `remedy` are for people."""

    message: str
    remedy: str = ""
    exit_code: int = 1


@dataclass(frozen=True)
class NodeLost(Event):
    """From csdctl: this rank no longer takes part; the other ranks continue."""

    message: str


@dataclass(frozen=True)
class NodeBack(Event):
    """From csdctl: this rank has restarted, and joins at the end of the epoch."""


@dataclass(frozen=True)
class Exited(Event):
    """From the shell that started a rank: its exit code, 128 + signal when it was killed."""

    code: int


EVENTS: dict[str, type[Event]] = {
    event_type.__name__: event_type
    for event_type in (
        Started,
        MpiChecked,
        CollectiveTimed,
        Ready,
        Joined,
        LinkLost,
        Misbehaved,
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
    """Return an event as the line that the worker prints."""
    content = {"event": type(event).__name__, **dataclasses.asdict(event)}
    return EVENT_PREFIX + json.dumps(content, separators=(",", ":"), allow_nan=True)


def event_from_line(line: str) -> Event | None:
    """Return the event in `line`, None for any other line; raises ProtocolError when it is damaged."""
    if not line.startswith(EVENT_PREFIX):
        return None
    try:
        content = json.loads(line[len(EVENT_PREFIX) :])
        event_type = EVENTS[content.pop("event")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not an event: {line[:120]!r} ({error})") from None
    event: Event = from_dict(event_type, content)
    return event
