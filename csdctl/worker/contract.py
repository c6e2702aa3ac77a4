"""What csdctl tells its worker and what it answers: frozen dataclasses, as JSON, with a schema version.

The controller writes a `RunSpec` and the worker reads it. Both sides carry this file, so that a mismatch of
versions is noticed and named. What they say to each other while ranks run is in messages.py.
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

SCHEMA = 1
"""Raised by one whenever a field changes its meaning; each side refuses another one's."""

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

    @property
    def form(self) -> "DatasetInfo":
        """Without its classes and what was left out: what computing with such samples needs."""
        return dataclasses.replace(self, num_skipped={}, class_counts={}, unusable_classes=())


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
class Seen:
    """What a machine sees of a prepared data set: equal answers mean the same data."""

    num_samples: int
    digest: str


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
    """Of the only input; () when there are several."""
    output_shape: tuple[int, ...]
    num_parameters: int
    num_trainable: int
    output_activation: str
    """Of the last layer: 'softmax', 'linear', …; '' when it has none that is known."""
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of each input by its name, when there are several."""
    num_operations: int = 0
    """Floating-point operations of the forward pass for one sample, of matrix products and convolutions;
    a multiply-accumulate is two. 0: not known."""
    stateful_layers: tuple[str, ...] = ()
    """Layers that keep something of the samples they train on: batch norm and such."""


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
class Runtime:
    """How TensorFlow runs in a rank."""

    threads: int = 1
    """Of one operation (intra-op)."""
    inter_threads: int = 1
    """Operations at the same time (inter-op)."""
    onednn: bool = True
    """Whether oneDNN's kernels are used."""


@dataclass(frozen=True)
class RankSpec:
    """One training process."""

    rank: int
    node: str
    batch_size: int
    runtime: Runtime
    private: ShardPart | None
    public: ShardPart | None
    """Its part of the public samples, as it can read it itself; None when it has none."""
    num_private: int
    num_public: int
    public_start: int = 0
    """Its part begins here in the permutation of all public samples by the recipe's seed."""
    max_batch_size: int | None = None
    """The largest batch that fits into its memory, when that is known."""
    num_repeated: int = 0
    """So many of `num_private` are samples read again in the same epoch."""
    weight: float = 1.0
    """Of each of its samples."""
    micro_batch_size: int | None = None
    """A larger batch is computed in pieces of this size: the same gradient in less memory."""


@dataclass(frozen=True)
class Noise:
    """Differential privacy of private samples, by the terms of DP-SGD."""

    l2_norm_clip: float
    """The largest L2 norm of one sample's gradient."""
    noise_multiplier: float
    """The noise's standard deviation over `l2_norm_clip`."""
    delta: float
    """For which ε is told; it changes nothing in training."""


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
    decay: str = "none"
    """How the learning rate falls from the end of the warm-up to the end of the last epoch: 'none', 'linear'
    or 'cosine', to zero."""
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
    """So many are kept; with 0 none is written."""
    progress_interval_s: float = 0.5
    max_steps: int | None = None
    """End after this many steps of the whole run: for measuring."""
    is_verified: bool = False
    """Take one step with random samples, compare it with one process, and end."""
    made: DatasetInfo | None = None
    """For a trial: random samples of this form instead of any data, and no model comes of it."""
    noise: Noise | None = None
    """Of every rank's private samples."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class ProbeSpec:
    """What a probe session measures with: the model and how it is trained."""

    architecture: str
    weights: str
    recipe: Recipe
    runtime: Runtime
    data: DatasetInfo
    """The public data: probes take samples of its shape and type, not its samples."""
    noise: Noise | None = None
    """Of the job's private samples."""
    is_private: bool = False
    """With noise, measure samples as private ones are trained on."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class ProbeRequest:
    """Measure one batch size: at least `min_steps` steps and `min_duration_s` seconds of them."""

    batch_size: int
    min_steps: int = 3
    min_duration_s: float = 1.0
    warm_up_steps: int = 2
    """Taken before the clock runs: the first step of a size finds memory and kernels."""
    micro_batch_size: int | None = None
    """A larger batch is computed in pieces of this size."""


@dataclass(frozen=True)
class TrialRequest:
    """Take part in a trial as rank `rank` of the run in file `spec`; then come back to probes.

    The process speaks in events and hears orders, as a rank does, until it has finished and hears `Release`.
    """

    spec: str
    rank: int


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


READY = "ready"
"""The line of a probe session that waits for requests."""

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


def request_from_json(text: str) -> ProbeRequest | TrialRequest:
    """What a probe session is asked for; raises ContractError."""
    if '"spec":' in text:
        return from_json(TrialRequest, text)
    return from_json(ProbeRequest, text)


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
