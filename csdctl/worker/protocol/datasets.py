"""Prepared data sets: the request to `prepare` one, and the results."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

from csdctl.worker.protocol.bounds import Between, Count, Shape, ShortText


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a prepared data set; has no file names and no samples.

    `path` is the directory of its images.npy and labels.npy, absolute or relative to the session's home.
    """

    path: str
    num_samples: Count
    sample_shape: Shape
    dtype: str
    label_shape: Shape
    max_label: Annotated[int, Between(-1, 1 << 64)]
    """The largest label, or the label of the last class; -1 if labels are not non-negative integers."""
    fingerprint: ShortText
    num_skipped: dict[ShortText, Count] = field(default_factory=dict)
    """Skipped samples by reason, such as 'undecodable'; docs/how-to/prepare-data.md lists all reasons."""
    class_counts: dict[str, Count] = field(default_factory=dict)
    """Samples of each of the job's classes, in the order of their labels; empty if classes have no names."""
    unusable_classes: tuple[str, ...] = ()
    """Classes that have files here, none of which is usable."""
    images_sha256: str = ""
    """Of images.npy, as it was prepared."""
    labels_sha256: str = ""

    @property
    def element_spec(self) -> "DatasetInfo":
        """Shapes and types, which is what computing needs, without classes and skipped samples."""
        return dataclasses.replace(self, num_skipped={}, class_counts={}, unusable_classes=())


@dataclass(frozen=True)
class ImageRule:
    """How images are converted: to uint8 of `shape`, (height, width, channels)."""

    shape: Shape | None = None
    """If None, or with a 0 in it: unknown; images cannot be prepared then, arrays can."""
    fit: str = "stretch"
    """'stretch', 'crop' (to the centre) or 'pad' (with white bars), for images of another aspect ratio."""
    max_pixels: Count = 100_000_000
    """Images with more pixels are skipped without decoding."""


@dataclass(frozen=True)
class RecordSchema:
    """Features of a TFRecord example that hold a sample."""

    image: str
    label: str
    shape: Shape | None = None
    """None if the image is encoded, otherwise the shape of its raw values."""
    dtype: str = "uint8"


@dataclass(frozen=True)
class PrepareSpec:
    """What to `prepare` on one machine; the first line of its standard input."""

    source: str
    store: str
    picture: ImageRule = field(default_factory=ImageRule)
    classes: tuple[str, ...] | None = None
    """The job's classes in the order of their labels; None if the job lists none."""
    names_classes: bool = False
    """If the job lists no classes, the class folders found here define them, sorted by name."""
    records: RecordSchema | None = None
    function: str = ""
    """FILE.py:NAME of the user's function that reads `source`; '' if csdctl reads it."""
    is_private: bool = False
    """If True, errors of the user's function are reported by type only."""
    is_checked: bool = False
    """If True, data that was prepared before is compared with its hashes, and prepared again if damaged."""
    is_shared: bool = False
    """If True, `store` is on a shared file system, for whoever may read all of `source`."""


@dataclass(frozen=True)
class DatasetDigest:
    """Digest of a prepared data set as a machine sees it; equal digests mean equal data."""

    num_samples: Count
    digest: ShortText


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of `prepare`: samples processed, out of `num_total` (0 if unknown), and samples skipped."""

    num_done: Count = 0
    num_total: Count = 0
    num_skipped: Count = 0
