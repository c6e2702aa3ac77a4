"""What the ranks of one run are told."""

from dataclasses import dataclass, field

from csdctl.worker.protocol.json_codec import SCHEMA
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.tasks import Task


@dataclass(frozen=True)
class DatasetSlice:
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
    private: DatasetSlice | None
    public: DatasetSlice | None
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
    public: DatasetSlice | None
    """All public samples, as the host reads them."""
    validation: DatasetSlice | None
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
    task: Task = field(default_factory=Task)
    """What the ranks are asked to do."""
    noise: Noise | None = None
    """Of every rank's private samples."""
    schema: int = SCHEMA
