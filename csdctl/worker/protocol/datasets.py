"""Prepared data sets: what `prepare` is asked to do, and what it reports."""

import dataclasses
from dataclasses import dataclass, field


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
    def element_spec(self) -> "DatasetInfo":
        """Shapes and types, which is what computing needs, without classes and skipped samples."""
        return dataclasses.replace(self, num_skipped={}, class_counts={}, unusable_classes=())


@dataclass(frozen=True)
class ImageRule:
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
    picture: ImageRule = field(default_factory=ImageRule)
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
class DatasetDigest:
    """What a machine sees of a prepared data set: equal answers mean the same data."""

    num_samples: int
    digest: str


@dataclass(frozen=True)
class PrepareProgress:
    """How far `prepare` is: samples looked at, of `num_total` (0: not known), and those left out."""

    num_done: int = 0
    num_total: int = 0
    num_skipped: int = 0
