"""What csdctl and its worker say to each other: plain frozen dataclasses, as JSON, with a schema version.

The controller writes a `RunSpec` and the worker reads it; the worker prints `Event`s and the controller
reads them. Both sides carry this file, so that a mismatch of versions is noticed and named.
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

SCHEMA = 1
"""Raised by one whenever a field changes its meaning; each side refuses another one's."""

EVENT_PREFIX = "@csdctl "
"""An event is a line on the worker's standard output that starts with this."""

ANSWER_PREFIX = "@csdctl-answer "
"""`build` and `prepare` answer with one line on standard output that starts with this."""

WORKING_PREFIX = "@csdctl-working "
"""`prepare` says how far it is with lines on standard output that start with this and hold a `Preparing`."""

WORKER_ERROR_PREFIX = "@csdctl-error "
"""The other commands fail with one line on standard error that starts with this."""


class ContractError(ValueError):
    """What the other side sent does not fit this version of the contract."""


@dataclass(frozen=True)
class DatasetInfo:
    """A prepared data set, as `prepare` describes it: no file name and no sample in it.

    `path` is where its images.npy and labels.npy lie, absolute or relative to the session's home.
    """

    path: str
    num_samples: int
    sample_shape: tuple[int, ...]
    dtype: str
    label_shape: tuple[int, ...]
    max_label: int
    """The largest label, or that of the last class; -1 when labels are not integers from 0."""
    fingerprint: str
    num_skipped: dict[str, int] = field(default_factory=dict)
    """What was left out, by reason: 'undecodable', 'too_large', …; docs/how-to/prepare-data.md has all."""
    class_counts: dict[str, int] = field(default_factory=dict)
    """Samples of each of the job's classes, in the order of their labels; empty when they have no names."""
    unusable_classes: tuple[str, ...] = ()
    """Classes that have files here, not one of which could be used."""


@dataclass(frozen=True)
class PictureRule:
    """What pictures become: uint8 of `shape`, (height, width, channels)."""

    shape: tuple[int, ...] | None = None
    """None, or with a 0 in it: not known; pictures cannot be prepared then, arrays can."""
    fit: str = "stretch"
    """'stretch', 'crop' (the middle) or 'pad' (white bars), for pictures of other proportions."""
    max_pixels: int = 100_000_000
    """Pictures with more are left out before they are decoded."""


@dataclass(frozen=True)
class RecordSchema:
    """Which features of a TFRecord's examples hold a sample."""

    image: str
    label: str
    shape: tuple[int, ...] | None = None
    """None: the image is an encoded picture; else raw numbers of this shape."""
    dtype: str = "uint8"


@dataclass(frozen=True)
class PrepareSpec:
    """What `prepare` is to do on one machine; the first line on its standard input."""

    source: str
    store: str
    picture: PictureRule = field(default_factory=PictureRule)
    classes: tuple[str, ...] | None = None
    """The job's classes in the order of their labels; None when it lists none."""
    names_classes: bool = False
    """When the job lists none, its classes are the class folders found here, sorted by name."""
    records: RecordSchema | None = None
    function: str = ""
    """FILE.py:NAME of the user's function that reads `source`; '' when csdctl does."""
    is_private: bool = False
    """Errors of the user's function are then told by their type alone."""


@dataclass(frozen=True)
class Preparing:
    """How far `prepare` is: samples looked at, of `num_total` (0: not known), and those left out."""

    num_done: int = 0
    num_total: int = 0
    num_skipped: int = 0


@dataclass(frozen=True)
class ModelInfo:
    """A model as `build` found it: what must fit the data, and its size."""

    name: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    num_parameters: int
    num_trainable: int
    output_activation: str
    """Of the last layer: 'softmax', 'linear', …; '' when it has none that is known."""


@dataclass(frozen=True)
class ShardPart:
    """Rows of one prepared data set that a rank reads; `images` and `labels` are .npy files.

    All rows when `stop` is None; else rows[start:stop] of the permutation of `permutation_seed`, the
    same on every machine.
    """

    images: str
    labels: str
    start: int = 0
    stop: int | None = None
    permutation_seed: int = 0


@dataclass(frozen=True)
class RankSpec:
    """One training process."""

    rank: int
    node: str
    batch_size: int
    threads: int
    private: ShardPart | None
    public: ShardPart | None
    """Its part of the public samples, as it can read it itself; None when it has none."""
    num_private: int
    num_public: int
    public_start: int = 0
    """Its part begins here in the permutation of all public samples by the recipe's seed."""
    max_batch_size: int | None = None
    """The largest batch that fits into its memory, when that is known."""
    micro_batch_size: int | None = None
    """A larger batch is computed in pieces of this size: the same gradient in less memory."""


@dataclass(frozen=True)
class EarlyStopping:
    """End the run after `patience` epochs in which `monitor` did not get better by more than `min_delta`."""

    monitor: str = "validation_loss"
    patience: int = 5
    min_delta: float = 0.0


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiply the learning rate by `factor` after `patience` epochs without a gain in `monitor`."""

    monitor: str = "validation_loss"
    patience: int = 3
    factor: float = 0.1
    min_delta: float = 0.0001
    min_factor: float = 0.0001
    """The learning rate never falls below this share of the recipe's."""


@dataclass(frozen=True)
class Recipe:
    """How to train. Learning rate: learning_rate · N / reference_batch, ramped from learning_rate."""

    epochs: int = 1
    optimizer: str = "sgd"
    optimizer_args: dict[str, float | bool] = field(default_factory=dict)
    learning_rate: float = 0.01
    reference_batch: int = 256
    warmup_epochs: float = 0.0
    loss: str = "sparse_categorical_crossentropy"
    from_logits: bool = False
    input_range: tuple[float, float] | None = (0.0, 1.0)
    """What uint8 0…255 becomes; None leaves the values as they are."""
    seed: int = 0
    max_learning_rate: float | None = None
    """However large the global batch is, the learning rate is at most this."""
    metrics: tuple[str, ...] = ()
    early_stopping: EarlyStopping | None = None
    reduce_on_plateau: ReduceOnPlateau | None = None


@dataclass(frozen=True)
class RunSpec:
    """Everything the ranks of one run need; the same file for all of them."""

    run_id: str
    architecture: str
    """Path of the model's architecture JSON, relative to the session's home."""
    weights: str
    """Path of the model's initial weights (.npz), relative to the session's home."""
    recipe: Recipe
    ranks: tuple[RankSpec, ...]
    """The first one is on the host."""
    public: ShardPart | None
    """All public samples, as the host reads them."""
    validation: ShardPart | None
    output_directory: str
    """Where rank 0 writes checkpoints and model.keras."""
    step_file: str = ""
    """Where rank 0 keeps the state after every step; '' keeps none."""
    is_balanced: bool = True
    """Whether batch sizes move when a rank turns out slower or faster than planned."""
    checkpoint_interval_s: float = 600.0
    """At the latest after this time, and after every epoch, there is a checkpoint."""
    num_checkpoints: int = 3
    progress_interval_s: float = 0.5
    max_steps: int | None = None
    """End after this many steps of the whole run: for measuring."""
    is_verified: bool = False
    """Take one step with random samples, compare it with one process, and end."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class ProbeSpec:
    """What a probe session measures with: the model and how it is trained."""

    architecture: str
    weights: str
    recipe: Recipe
    threads: int
    data: DatasetInfo
    """The public data: probes take samples of its shape and type, not its samples."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class ProbeRequest:
    """Measure one batch size: at least `min_steps` steps and `min_duration_s` seconds of them."""

    batch_size: int
    min_steps: int = 3
    min_duration_s: float = 1.0


@dataclass(frozen=True)
class ProbeResult:
    """The measured step: mean seconds for forward, backward and apply of one batch."""

    batch_size: int
    step_time_s: float
    num_steps: int
    peak_memory_bytes: int

    @property
    def images_per_s(self) -> float:
        """Samples a second at this batch size."""
        return self.batch_size / self.step_time_s


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
class Greeted(Event):
    """A rank that only says hello has summed a vector with all others: seconds of the quickest sum."""

    mpi_library: str
    vector_bytes: int
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
class Alive(Event):
    """The answer to `AreYouThere`."""

    number: int


@dataclass(frozen=True)
class WaitingFor(Event):
    """Rank 0 has waited for these nodes for some seconds."""

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


@dataclass(frozen=True)
class Checkpointed(Event):
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
    """Why before the last epoch: '' when it was the last, 'early stopping', 'asked to stop', 'max steps'."""


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
        Greeted,
        Ready,
        Joined,
        LinkLost,
        Paused,
        Alive,
        WaitingFor,
        Progress,
        Rebalanced,
        Verified,
        Evaluating,
        EpochEnd,
        Checkpointed,
        Finished,
        Failed,
        NodeLost,
        NodeBack,
        Exited,
    )
}


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
    """Finish the step, keep a checkpoint, and end."""


@dataclass(frozen=True)
class AreYouThere(Order):
    """Answer with `Alive`."""

    number: int


ORDERS: dict[str, type[Order]] = {
    kind.__name__: kind for kind in (FormGroup, PauseAtEpochEnd, Stop, AreYouThere)
}

ContractT = TypeVar("ContractT")


def to_json(value: Any) -> str:
    """Any dataclass of this module as one line of JSON."""
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"), allow_nan=True)


def from_json(kind: type[ContractT], text: str) -> ContractT:
    """Read what `to_json` wrote; raises ContractError when it does not fit `kind`."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ContractError(f"expected a {kind.__name__} as JSON, received {text[:80]!r}: {error}") from None
    if isinstance(content, dict) and content.get("schema", SCHEMA) != SCHEMA:
        raise ContractError(f"{kind.__name__}: received schema {content['schema']}, expected {SCHEMA}")
    result: ContractT = from_dict(kind, content)
    return result


def event_to_line(event: Event) -> str:
    """An event as the line the worker prints."""
    content = {"event": type(event).__name__, **dataclasses.asdict(event)}
    return EVENT_PREFIX + json.dumps(content, separators=(",", ":"), allow_nan=True)


def event_from_line(line: str) -> Event | None:
    """The event in `line`, or None when the line is not one; raises ContractError when it is damaged."""
    if not line.startswith(EVENT_PREFIX):
        return None
    try:
        content = json.loads(line[len(EVENT_PREFIX) :])
        kind = EVENTS[content.pop("event")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(f"not an event: {line[:120]!r} ({error})") from None
    event: Event = from_dict(kind, content)
    return event


def order_to_line(order: Order) -> str:
    """An order as the line that a rank reads."""
    return json.dumps({"order": type(order).__name__, **dataclasses.asdict(order)}, separators=(",", ":"))


def order_from_line(line: str) -> Order:
    """The order in `line`; raises ContractError."""
    try:
        content = json.loads(line)
        kind = ORDERS[content.pop("order")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(f"not an order: {line[:120]!r} ({error})") from None
    order: Order = from_dict(kind, content)
    return order


def from_dict(kind: Any, content: Any) -> Any:
    """Build a dataclass from parsed JSON, following its annotations; raises ContractError."""
    if not isinstance(content, dict):
        raise ContractError(f"expected a {kind.__name__}, received {content!r}")
    hints = typing.get_type_hints(kind)
    unknown = set(content) - set(hints)
    if unknown:
        raise ContractError(f"{kind.__name__}: unknown {', '.join(sorted(unknown))}")
    try:
        return kind(**{name: _value(hints[name], value) for name, value in content.items()})
    except TypeError as error:
        raise ContractError(f"{kind.__name__}: {error}") from None


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value)
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return _value(inner[0], value) if len(inner) == 1 else value
    if origin is tuple:
        return tuple(_value(arguments[0], one) for one in value)
    return value
