"""A first look at a user's data, before there is a job: the requests, and what was found."""

from dataclasses import dataclass, field

from csdctl.worker.protocol.bounds import Count, Shape
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareSpec, RecordSchema, TableSchema


@dataclass(frozen=True)
class LookSpec:
    """What to `look` at; the first line of standard input."""

    prepare: PrepareSpec
    """As `prepare` would get it; its store is not used."""
    label: str = ""
    """The column or feature with the label, of tables and TFRecord files; '': the one whose name says so."""
    dropped: tuple[str, ...] = ()
    """Columns of a table that are no features."""


@dataclass(frozen=True)
class PictureSizes:
    """Of the encoded pictures that were looked at, by their headers."""

    formats: tuple[str, ...]
    """'png', 'jpeg', …, sorted."""
    smallest: Shape
    """(height, width) of the picture with the fewest pixels."""
    largest: Shape


@dataclass(frozen=True)
class DataLook:
    """What a data set is like, from all or some of its samples."""

    format: str
    """As `worker.ingest.sources.detect` names it."""
    info: DatasetInfo
    """Of the samples that were read; there is nothing at its path."""
    num_samples: Count
    """Of the whole data set; 0 if unknown."""
    is_whole: bool
    """Whether all samples were read."""
    pictures: PictureSizes | None = None
    """None for data that is not encoded pictures in files."""
    class_counts: dict[str, Count] = field(default_factory=dict)
    """Files in each class folder of the whole data set."""
    table: TableSchema | None = None
    """The columns that were chosen."""
    records: RecordSchema | None = None
    """The features that were chosen."""


@dataclass(frozen=True)
class FoundData:
    """Data in a directory that `prepare` could read, by the names of its files and folders."""

    training: tuple[str, ...]
    """Paths relative to the directory, sorted."""
    validation: tuple[str, ...]
    """Those whose name says so: val, valid, validation, test."""
