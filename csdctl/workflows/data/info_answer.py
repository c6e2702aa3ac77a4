"""What a node may say about the data set that it has prepared; pure.

The host plans shards, memory and the model's shapes with these numbers, and never sees the samples.
"""

import json
import re
from typing import Any

from csdctl.transport.answer import Answer

MAX_SAMPLES = 1 << 40
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 31
MAX_CLASSES = 100_000
MAX_REASONS = 100
MAX_FIELDS = 1000
"""Arrays of one sample, for a model with several inputs."""

MAX_VALUE = 1 << 63
MAX_DTYPE_LENGTH = 1 << 17

_NUMPY_TYPE = re.compile(r"[<>|=]?[a-z]{1,12}[0-9]{0,3}")


def check_info(answer: Answer, *, may_be_empty: bool = False) -> None:
    """Raise RemoteCommandError for a DatasetInfo with a value of another type, or out of range."""
    if not answer.text("path") or not re.fullmatch(r"[0-9a-f]{8,64}", answer.text("fingerprint")):
        raise answer.error("received a data set without a path or a fingerprint")
    answer.number("num_samples", 0 if may_be_empty else 1, MAX_SAMPLES)
    for shape in ("sample_shape", "label_shape"):
        answer.numbers(shape, MAX_DIMENSIONS, 0, MAX_SIZE)
    for dtype in ("dtype", "label_dtype"):
        if not _is_dtype(found := answer.text(dtype, max_length=MAX_DTYPE_LENGTH)):
            raise answer.error(f"received {found[:80]!r} as `{dtype}`, expected a type of numpy")
    answer.number("max_label", -1, MAX_SIZE)
    answer.counts("num_skipped", MAX_REASONS)
    for key in ("max_labels", "max_values", "padded"):
        by_field = answer.part(key)
        if len(by_field.content) > MAX_FIELDS:
            raise answer.error(f"received {len(by_field.content)} {key}, expected at most {MAX_FIELDS}")
        for name in by_field.content:
            if key == "padded":
                by_field.numbers(name, MAX_DIMENSIONS, 0, MAX_SIZE)
            else:
                by_field.number(name, -1, MAX_VALUE)
    answer.counts("class_counts", MAX_CLASSES)
    answer.texts("unusable_classes", MAX_CLASSES)


def _is_dtype(text: str) -> bool:
    """Whether `text` is a type of numpy, or the JSON list of the arrays of a sample."""
    if not text.startswith("["):
        return bool(_NUMPY_TYPE.fullmatch(text))
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return len(fields) <= MAX_FIELDS and all(map(_is_field, fields))


def _is_field(field: Any) -> bool:
    """Whether `field` is [name, type, shape]."""
    if not (isinstance(field, list) and [type(value) for value in field] == [str, str, list]):
        return False
    sizes = field[2]
    is_shape = len(sizes) <= MAX_DIMENSIONS and all(
        type(size) is int and 0 <= size < MAX_SIZE for size in sizes
    )
    return is_shape and bool(_NUMPY_TYPE.fullmatch(field[1]))
