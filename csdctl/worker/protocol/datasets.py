"""Data sets: the requests to look at data and to prepare it, the results, and the names of fields."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from csdctl.worker.protocol import json_codec
from csdctl.worker.protocol.json_codec import Between, Bound, Count, MaxLength, OneOf, Shape, ShortText
from csdctl.worker.protocol.recipe import Name, Written
from csdctl.worker.protocol.run_spec import UserCode

INPUT, OUTPUT = "input", "output"
"""Parts without names of their own have their position: `input_0`, `output_1`."""
LABEL = "label"
"""The field of labels that have no name of their own, beside the samples' weights."""
SAMPLE_WEIGHT = "sample_weight"
MAX_CLASSES = 100_000
SKIPPED = "skipped.txt"
"""The file beside prepared data that names all skipped samples."""

SampleShape = Annotated[tuple[Annotated[int, Between(0, 1 << 31)], ...], MaxLength(8)]
"""The shape of a sample or a label; 0 for any size."""
NumpyType = Annotated[
    str, Bound("a type of numpy", lambda text: re.fullmatch("[<>|=]?[a-z]{1,12}[0-9]{0,3}", text) is not None)
]
Fields = Annotated[tuple[tuple[str, NumpyType, SampleShape], ...], MaxLength(1000)]
"""Name, type and shape of each array of a sample, or field of a label."""


def is_data_type(text: str) -> bool:
    """Return whether `text` is a type of numpy, the JSON of `Fields`, or '', which is not known yet."""
    try:
        content = json_codec.parse_json(text) if text.startswith("[") else text or "f4"
        json_codec.read_as(NumpyType if isinstance(content, str) else Fields, content)
    except json_codec.ProtocolError:
        return False
    return True


DataType = Annotated[str, Bound("a type of samples or labels", is_data_type)]
Reasons = Annotated[dict[ShortText, Count], MaxLength(1000)]
Largest = Annotated[int, Between(-1, 1 << 64)]
"""The largest of several integers from 0; -1 if there are others among them."""
LargestOf = Annotated[dict[str, Largest], MaxLength(1000)]
Parts = dict[str, tuple[str, Shape]]
"""Type and shape of each field of a sample or a label by name, '' for the only one."""


def name_of_position(kind: str, number: int) -> str:
    """Return the name of the input or output with this position."""
    return f"{kind}_{number}"


def is_position(name: str, kind: str) -> bool:
    """Return whether a name only says a position among the inputs or outputs."""
    start, _, number = name.rpartition("_")
    return start == kind and number.isdigit()


def as_inputs(parts: Mapping[str, Any]) -> Any:
    """Return what a model is called with: its only input, a list, or a dict where the inputs have names."""
    if list(parts) == [""]:
        return parts[""]
    return list(parts.values()) if all(is_position(name, INPUT) for name in parts) else dict(parts)


def list_names(names: Sequence[str], most: int = 5) -> str:
    """Return some of the names, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a prepared data set, whose arrays are in `path`. Without names of files and samples."""

    path: str
    num_samples: Annotated[int, Between(0, 1 << 40)]
    sample_shape: SampleShape
    dtype: DataType
    label_shape: SampleShape
    max_label: Annotated[int, Between(-1, 1 << 31)]
    """The largest label, or the label of the last class; -1 if labels are not non-negative integers, or have
    several fields."""
    fingerprint: ShortText
    num_skipped: Reasons = field(default_factory=dict)
    """Skipped samples by reason, such as 'undecodable'; docs/how-to/prepare-data.md lists all reasons."""
    class_counts: Annotated[dict[str, Count], MaxLength(MAX_CLASSES)] = field(default_factory=dict)
    """Samples of each of the job's classes, in the order of their labels; empty if classes have no names."""
    unusable_classes: Annotated[tuple[str, ...], MaxLength(MAX_CLASSES)] = ()
    """Classes that have files here, none of which is usable."""
    images_sha256: str = ""
    labels_sha256: str = ""
    label_dtype: DataType = ""
    """As `dtype`; several outputs, and weights of samples, are fields. '' in a description of an earlier
    version."""
    max_labels: LargestOf = field(default_factory=dict)
    """The largest label of each field of integers; '' is the only one."""
    max_values: LargestOf = field(default_factory=dict)
    """The largest value of each input of integers, which may be indices; without uint8. Of weights: 1, or 0
    if all are 0."""
    columns: tuple[str, ...] = ()
    """The columns of a table in the order of a sample's values; empty for private data."""
    skipped: Annotated[tuple[ShortText, ...], MaxLength(5)] = ()
    """Where the first skipped samples are in the source; empty for private data."""

    @property
    def num_read(self) -> int:
        """Samples that were processed: usable ones, and those that were skipped."""
        return self.num_samples + sum(self.num_skipped.values())

    @property
    def inputs(self) -> Parts:
        """The arrays of a sample."""
        return parts_of(self.dtype, self.sample_shape)

    @property
    def labels(self) -> Parts:
        """The fields of a label. Of descriptions of earlier versions, the type is ''."""
        return parts_of(self.label_dtype, self.label_shape)

    @property
    def element_spec(self) -> "DatasetInfo":
        """Shapes and types, which is what computing needs, without classes and skipped samples."""
        return dataclasses.replace(
            self, num_skipped={}, skipped=(), class_counts={}, unusable_classes=(), columns=()
        )


def equals(expected: Sequence[int], shape: Sequence[int | None]) -> bool:
    """Return whether shapes are equal. 0 and None are any size."""
    pairs = zip(expected, shape, strict=False)
    return len(expected) == len(shape) and all(a == b or not a or not b for a, b in pairs)


def takes(expected: Sequence[int], shape: Sequence[int | None]) -> bool:
    """Return whether an input takes samples of `shape`. Keras adds or removes a last axis of size 1."""
    if len(shape) == len(expected) - 1 and expected[-1] == 1:
        shape = (*shape, 1)
    elif len(shape) == len(expected) + 1 and shape[-1] == 1 and len(expected):
        shape = shape[:-1]
    return equals(expected, shape)


def parts_of(dtype: str, shape: Shape) -> Parts:
    """Return the fields of the type `dtype`, as text, of a sample or label of `shape`."""
    if not dtype.startswith("["):
        return {"": (dtype, shape)}
    return {name: (base, tuple(sizes)) for name, base, sizes in json.loads(dtype)}


def _check_picture(written: Any) -> Any:
    """Raise ValueError for a shape in job.yaml that pictures cannot have. A model's shape may be any."""
    sizes = written if isinstance(written, list) and len(written) == 3 else [0]
    if not all(type(size) is int and 1 <= size <= 1 << 16 for size in sizes) or sizes[2] not in (1, 3):
        raise ValueError("expected [height, width, 1 or 3]")
    return written


@dataclass(frozen=True)
class ImageRule:
    """The conversion of images: to uint8 of `shape`, (height, width, channels)."""

    shape: Annotated[Shape, Written(_check_picture)] | None = None
    """If None, or with a 0 in it: unknown; images cannot be prepared then, arrays can."""
    fit: Annotated[str, OneOf(("stretch", "crop", "pad"))] = "stretch"
    """'crop': to the centre; 'pad': with white bars. For images of another aspect ratio."""
    max_pixels: Annotated[int, Between(1, 1 << 27)] = 100_000_000
    """TensorFlow's limit is the most that a PNG with four channels may have."""

    @property
    def max_bytes(self) -> int:
        """Upper limit of the size of an image file: 16 bits in four channels, and what else is in it."""
        return 8 * self.max_pixels + (1 << 20)


@dataclass(frozen=True)
class RecordSchema:
    """Features of a TFRecord example that hold a sample."""

    image: Name
    label: Name
    shape: Annotated[tuple[Annotated[int, Between(1, 1 << 16)], ...], MaxLength(8, 1)] | None = None
    """None if the image is encoded, otherwise the shape of its raw values."""
    dtype: Annotated[str, OneOf(("uint8", "int8", "uint16", "int16", "int32", "float16", "float32"))] = (
        "uint8"
    )


@dataclass(frozen=True)
class TableSchema:
    """Columns of .csv files that are no features."""

    labels: Annotated[
        tuple[Name, ...],
        MaxLength(1 << 16, minimum=1),
        Written(lambda written: [written] if isinstance(written, str) else written),
    ]
    """The columns with labels. job.yaml may have one name in place of a list."""
    weight: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def named(self) -> list[str]:
        """All columns that are named here."""
        return [*self.labels, *([self.weight] if self.weight else []), *self.dropped]


@dataclass(frozen=True)
class PrepareSpec:
    """A request to `prepare` data on one machine. The first line of its standard input."""

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
    inputs: dict[str, Shape] = field(default_factory=dict)
    """Shape of each of the model's inputs by name, '' for the only one, 0 for any size; {} if unknown."""
    outputs: tuple[str, ...] = ()
    """Names of the model's outputs, in its order; none if it has one, or they are unknown."""
    labels: Parts = field(default_factory=dict)
    """The fields of the labels of the job's public data; {} if unknown."""
    table: TableSchema | None = None
    columns: tuple[str, ...] = ()
    """The columns of the job's public data, in whose order a sample has its values; () if unknown."""
    is_regression: bool = False
    """Whether labels are values, not classes, even if all are integers."""
    allows_nan: bool = False
    code: UserCode | None = None


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of `prepare`: samples processed, out of `num_total` (0 if unknown), and samples skipped."""

    num_done: Count = 0
    num_total: Count = 0
    num_skipped: Count = 0


@dataclass(frozen=True)
class LookSpec:
    """A request to `look` at data. The first line of standard input."""

    prepare: PrepareSpec
    """As `prepare` would get it; its store is not used."""
    label: str = ""
    """The column of a table with the label; '': the one whose name says so."""
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class PictureSizes:
    """Formats and sizes of the encoded pictures that were looked at, by their headers."""

    formats: tuple[str, ...]
    smallest: Shape
    largest: Shape


@dataclass(frozen=True)
class DataLook:
    """The properties of a data set, from all or some of its samples."""

    format: str
    """As `worker.ingest.prepare` names it."""
    info: DatasetInfo
    """Description of the samples that were read; there is nothing at its path."""
    num_samples: Count
    """Number of samples of the whole data set; 0 if unknown."""
    is_whole: bool
    pictures: PictureSizes | None = None
    """None for data that is not encoded pictures in files."""
    class_counts: dict[str, Count] = field(default_factory=dict)
    table: TableSchema | None = None
