"""The request to compute features: the output of a model's frozen part for each sample."""

from dataclasses import dataclass

from csdctl.worker.protocol.bounds import Count, Shape
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime

FLOAT32, FLOAT16 = "float32", "float16"
PRECISIONS = (FLOAT32, FLOAT16)
"""The types that features can be stored in."""


@dataclass(frozen=True)
class ExtractSpec:
    """What to `extract` on one machine; the first line of its standard input."""

    source: DatasetSlice
    """Prepared samples."""
    store: str
    """The directory of the machine's features."""
    prefix: Prefix
    runtime: Runtime
    shape: Shape
    """Of the features of one sample."""
    num_samples: Count
    """Samples of `source`."""
