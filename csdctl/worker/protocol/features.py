"""The request to run a model over prepared samples: for features, or for what `predict` is asked for."""

from dataclasses import dataclass
from typing import Annotated

from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.json_codec import BatchSize, Between, Count, OneOf, Sha256, Shape, ShortText
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime

FLOAT32, FLOAT16 = "float32", "float16"
PRECISIONS = (FLOAT32, FLOAT16)

FEATURE_STORE, RESULT_STORE = ".csdctl/features", ".csdctl/predictions"
"""The directories, on each machine, of features and of results."""

SOFTMAX, SIGMOID, VALUES = "softmax", "sigmoid", "values"
"""The kinds of results of an output: class and probability, or all values."""


@dataclass(frozen=True)
class ResultRule:
    """The results that are kept of one output of the model."""

    name: str
    kind: str
    from_logits: bool = False
    """Whether probabilities must be computed from the output."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a result."""
        names = ("value",) if self.kind == VALUES else ("class", "probability")
        return tuple(f"{self.name}.{name}" if self.name else name for name in names)


@dataclass(frozen=True)
class Augmented:
    """Views of samples: `num_views` of each, which `data.augment` makes."""

    augment: str
    seed: int
    num_views: BatchSize


@dataclass(frozen=True)
class ExtractSpec:
    """A request to compute features or results on one machine. The first line of its standard input."""

    source: DatasetSlice
    store: str
    prefix: Prefix
    runtime: Runtime
    results: tuple[ResultRule, ...] = ()
    """The results that are kept of the model's outputs; none: features, beside the samples' labels."""
    layer: str = ""
    """The layer whose output is taken in place of the model's; '' for none."""
    more_sources: tuple[DatasetSlice, ...] = ()
    """Further samples: the model is loaded once for all."""
    augmented: Augmented | None = None
    """The views that are computed of training samples in place of themselves."""
    num_plain: Count = 0
    """The last sources, of validation samples, are never augmented: how many these are."""


@dataclass(frozen=True)
class Extracted:
    """The stored data sets: of `source`, then of `more_sources`."""

    parts: tuple[DatasetInfo, ...]
    num_computed: Count


@dataclass(frozen=True)
class SendSpec:
    """The results or the features to send to the host. The first line of standard input."""

    fingerprint: Sha256
    """The fingerprint of data in `store`: nothing else can be requested."""
    sha256: Sha256
    num_bytes: Annotated[int, Between(0, 1 << 50)]
    """The largest number of bytes that the host takes."""
    store: Annotated[str, OneOf((RESULT_STORE, FEATURE_STORE))] = RESULT_STORE
    """FEATURE_STORE: the host asks for features of public samples only."""


@dataclass(frozen=True)
class GatheredPart:
    """Features of some of the samples, as a file on the host."""

    node: ShortText
    path: str
    sha256: str
    start: Count
    """The first of rows[start:stop] of the samples' permutation."""
    stop: Count


@dataclass(frozen=True)
class GatherSpec:
    """Features of all samples of `request.source`, to be put together. The first line of standard input."""

    request: ExtractSpec
    """The request that would compute them only on the host."""
    shape: Shape
    parts: tuple[GatheredPart, ...] = ()
    """Together all samples; none: only look whether the features are stored."""


@dataclass(frozen=True)
class Gathered:
    """The answer to a `GatherSpec`."""

    is_stored: bool
