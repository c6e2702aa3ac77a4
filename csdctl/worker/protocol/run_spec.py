"""The specification of a run, the same for all its ranks."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from csdctl.worker.protocol.json_codec import SCHEMA, AnyNumber, BatchSize, Count, OneOf, RankNumber, Seconds
from csdctl.worker.protocol.recipe import Noise, Recipe

TRAIN, TRAIN_SPLIT = "train", "train-split"
TRIAL, TRIAL_SPLIT = "trial", "trial-split"
VERIFY, VERIFY_SPLIT = "verify", "verify-split"
CHECK = "check"
"""The tasks of csdctl itself; `TASKS` (tasks/session.py) has their implementations."""

STEPPING = (TRAIN, TRAIN_SPLIT, TRIAL, TRIAL_SPLIT)
"""Tasks that report their steps; the ranks of others compute for minutes without a report."""

SUM_BYTES, SUM_RANKS = "sum_bytes", "sum_ranks"
"""Arguments of a check: the sizes of vectors, and over how many ranks their sums are timed besides all."""
ELEMENT_SPEC, RANGES = "element_spec", "ranges"
"""Arguments of a trial: the `DatasetInfo` whose shapes and types its random samples have. By input, the
smallest and largest value of each column, or of all."""

AUTO, CPU, GPU = DEVICES = "auto", "cpu", "gpu"
Device = Annotated[str, OneOf(DEVICES)]
"""What a rank computes on; `auto` is a GPU where TensorFlow sees one."""
NUM_CHECKPOINTS, CHECKPOINT_INTERVAL_S = 3, 600.0
"""Defaults of a run."""
GROWTH_LIMIT = 2
"""A rank whose memory was not measured gets at most this many times its planned batch size."""
LAST_MODEL, BEST_MODEL = "model.keras", "best.keras"
"""Models that a run saves in its directory."""
COPIES = ".csdctl/copies"
"""On every other server, below its home: a project directory with the runs that it can take over."""


def step_file_in_memory(project: Path, run_id: str) -> Path:
    """Return the path, in this user's directory in the machine's memory, of the state after every step."""
    # standalone/leftovers.py, which removes stale step files, builds the same name.
    place = hashlib.sha256(os.fsencode(os.path.realpath(project))).hexdigest()[:12]
    return Path(f"/dev/shm/csdctl-{os.geteuid()}/{place}-{run_id}")


@dataclass(frozen=True)
class TaskSpec:
    """A task by its name in the worker's `TASKS`, and its arguments, as JSON has them."""

    name: str = TRAIN
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetSlice:
    """Rows start…stop of the permutation of a prepared data set, the same everywhere. None: all rows."""

    images: str
    labels: str
    start: Count = 0
    stop: Count | None = None
    permutation_seed: int = 0
    images_sha256: str = ""
    """The SHA-256 of the whole file, as it was prepared; a file with another hash is not read."""
    labels_sha256: str = ""
    num_views: BatchSize = 1
    """Number of times that the file has all samples, one after the other; an epoch reads one of them."""


@dataclass(frozen=True)
class UserCode:
    """The job's own code, as a zip in the store."""

    archive: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Runtime:
    """TensorFlow's runtime settings in a rank."""

    threads: Count = 1
    inter_threads: Count = 1
    onednn: bool = True
    device: Device = CPU


@dataclass(frozen=True)
class RankSpec:
    """One training process."""

    rank: RankNumber
    node: str
    batch_size: Count
    runtime: Runtime
    private: DatasetSlice | None
    public: DatasetSlice | None
    """Its part of the public samples, as files on its own machine; None when it has none."""
    num_private: Count
    num_public: Count
    public_start: Count = 0
    """Where its part starts in the permutation of all public samples by the recipe's seed."""
    max_batch_size: Count | None = None
    """The largest batch that fits into its memory, if known."""
    num_repeated: Count = 0
    """Number of samples among `num_private` that are read again in the same epoch."""
    weight: float = 1.0
    micro_batch_size: BatchSize | None = None
    """A larger batch is computed in micro-batches of this size: the same gradient in less memory."""
    server: RankNumber = 0
    """The rank of its server, through which it reaches the ranks of other servers."""


@dataclass(frozen=True)
class CompiledStep:
    """A step, or a forward pass, that needs neither Keras nor Python's TensorFlow, as files in the store."""

    graph: str
    info: str
    """The `StepInfo` of the graph, or the `GraphInfo` of a forward pass."""
    state: str
    """The variables' values at the beginning (.npz)."""
    template: str = ""
    """A file of Keras with the model, only on the host; '' for none."""


@dataclass(frozen=True)
class Prefix:
    """The frozen part of a model, from its inputs to the cut, or a whole model, as files in the store."""

    architecture: str
    """With `weights` and `code` only on machines that need them, because nothing is `compiled`."""
    weights: str
    input_range: tuple[float, float] | None
    precision: str = "float32"
    code: UserCode | None = None
    compiled: CompiledStep | None = None
    """Its forward pass; None if it cannot be compiled."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that its outputs depend on."""
        if self.compiled:
            return (self.compiled.graph, self.compiled.info, self.compiled.state)
        return (self.architecture, self.weights, *([self.code.archive] if self.code else []))


@dataclass(frozen=True)
class HeadSpec:
    """The rest of the model of a run that trains only a head. The run's samples are features."""

    prefix: Prefix
    architecture: str
    weights: str
    head_weights: tuple[Count, ...]
    """The place of each of the head's weights among those of the whole model."""
    compiled: CompiledStep | None = None
    """The step of the whole model, which has the template to save it by; None if it cannot be compiled."""


@dataclass(frozen=True)
class SplitSpec:
    """Where a model is cut in two: nodes compute the layers before it, the host those after it."""

    cut: str
    num_micro_batches: BatchSize = 4
    """Micro-batches of each rank's batch: while some are with the host, the rank computes others."""
    compiled: CompiledStep | None = None
    """The step of the ranks on nodes, if it is compiled."""


@dataclass(frozen=True)
class RunSpec:
    """Everything the ranks of one run need. The same file for all of them."""

    run_id: str
    architecture: str
    """Path of the model's architecture JSON, relative to the session's home."""
    weights: str
    """Path of the model's initial weights (.npz), relative to the session's home."""
    recipe: Recipe
    ranks: tuple[RankSpec, ...]
    public: DatasetSlice | None
    validation: DatasetSlice | None
    output_directory: str
    """Where rank 0 writes checkpoints and model.keras."""
    step_file: str = ""
    """Where rank 0 writes the state after every step; '' for nowhere."""
    manifest: str = ""
    """Path of the run's manifest on other servers, which keep copies of the state; '' for no copies."""
    is_balanced: bool = True
    """Whether batch sizes change when a rank is slower or faster than planned."""
    checkpoint_interval_s: Annotated[float, AnyNumber] = CHECKPOINT_INTERVAL_S
    """The longest time between checkpoints; there is also one after every epoch."""
    num_checkpoints: Count = NUM_CHECKPOINTS
    """Checkpoints to keep; 0 writes none."""
    progress_interval_s: Seconds = 0.5
    max_steps: Count | None = None
    """End after this many steps of the whole run, for measuring."""
    task: TaskSpec = field(default_factory=TaskSpec)
    code: UserCode | None = None
    """The code that the model needs to be rebuilt, beside Keras."""
    compiled: CompiledStep | None = None
    """The model's step; None if it cannot be compiled."""
    head: HeadSpec | None = None
    """If the model is the head of a larger one; samples and validation data are features, `public` is not."""
    split: SplitSpec | None = None
    """If the model is cut in two (task `split`)."""
    noise: Noise | None = None
    link_key: str = ""
    """Random, part of the address at which a rank awaits its link: other users cannot take it first."""
    schema: int = SCHEMA
