"""What users' Keras code calls (x, y, sample_weight), as one array of samples and one of labels.

Structures are named as Keras' fit reads them: a dict names inputs and outputs, a tuple or list has them in
the model's order. Several inputs or outputs become the fields of a structured array.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array, as_labels, as_samples, fields_of
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.protocol.datasets import INPUT, LABEL, OUTPUT, SAMPLE_WEIGHT, PrepareSpec, name_of_position

EXPECTED = (
    "expected (samples, labels), (samples, labels, weights), or samples alone, as arrays or as a "
    "tf.data.Dataset, a keras.utils.PyDataset, or an iterator of single (sample, label)"
)
_NUMBERS = (
    "turn text into numbers in the function, with keras.layers.TextVectorization or StringLookup, and lists "
    "of different lengths into one array, with keras.utils.pad_sequences"
)
_MAX_NAME = 128


class StructureError(Exception):
    """What a function returned is not samples: a problem, such as 'returned an int', and a remedy."""

    def __init__(self, problem: str, remedy: str = EXPECTED) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def split(element: Any) -> tuple[Any, Any, Any]:
    """Return samples, labels or None, and weights or None; raises StructureError.

    Without labels, for a model whose layers have the loss (add_loss), there are only samples: not a tuple.
    """
    if isinstance(element, Mapping) or getattr(element, "shape", ()) not in ((), None):
        return element, None, None
    if isinstance(element, tuple | list) and len(element) == 2:
        return element[0], element[1], None
    if isinstance(element, tuple | list) and len(element) == 3:
        return element[0], element[1], element[2]
    raise StructureError("yields something that is not (sample, label)")


def no_labels(num_samples: tuple[int, ...]) -> Array:
    """Return labels without values, shape (*num_samples, 0)."""
    return np.zeros((*num_samples, 0), np.float32)


def name_inputs(samples: Any, spec: PrepareSpec) -> dict[str, Any]:
    """Return the parts of `samples` by the names of the model's inputs; '' if there is only one."""
    parts = _name_parts(samples, INPUT)
    known = list(spec.inputs)
    if len(known) == len(parts) == 1 and "" in (*known, *parts):
        return {known[0]: next(iter(parts.values()))}
    if known and set(known) <= set(parts):  # Keras leaves out what the model does not take, too
        return {name: parts[name] for name in known}
    return parts


def name_outputs(labels: Any, weights: Any, spec: PrepareSpec) -> dict[str, Any]:
    """Return the parts of `labels` by the model's outputs, '' for the only one; the samples' weights last."""
    if labels is None:
        return {}
    parts = _name_parts(labels, OUTPUT)
    if len(parts) == 1 and not (spec.outputs and set(parts) <= set(spec.outputs)):
        parts = {"": next(iter(parts.values()))}
    elif set(parts) <= set(spec.outputs):
        parts = {name: parts[name] for name in spec.outputs if name in parts}
    if SAMPLE_WEIGHT in parts:
        raise StructureError(f"returned an output with the name {SAMPLE_WEIGHT}", "rename the output")
    if weights is None:
        return parts
    weight_parts = _name_parts(weights, OUTPUT)
    if len(weight_parts) > 1:
        raise StructureError(
            "returned weights for each output", "return one weight for each sample, or weigh losses instead"
        )
    if "" in parts:
        parts = {LABEL: parts[""]}
    return parts | {SAMPLE_WEIGHT: next(iter(weight_parts.values()))}


def _name_parts(structure: Any, kind: str) -> dict[str, Any]:
    if isinstance(structure, Mapping):
        parts = dict(structure)
        if bad := [name for name in parts if not _is_name(name)]:
            raise StructureError(
                f"returned the name {str(bad[0])[:_MAX_NAME]!r}",
                f"name inputs and outputs with up to {_MAX_NAME} printable ASCII characters",
            )
    elif isinstance(structure, tuple | list) and structure and all(map(_is_part, structure)):
        parts = {name_of_position(kind, number): part for number, part in enumerate(structure)}
        if len(parts) == 1:
            parts = {"": structure[0]}
    else:
        parts = {"": structure}
    if not parts or any(isinstance(part, Mapping) for part in parts.values()):
        raise StructureError(
            "returned nested structures", "give each input and output one array, under its own name"
        )
    return parts


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isascii() and name.isprintable()


def _is_part(value: Any) -> bool:
    """Whether an item of a tuple is an input or output; numbers make up a list of numbers."""
    return (hasattr(value, "shape") and not isinstance(value, np.generic)) or isinstance(value, Mapping)


def to_array(part: Any, name: str) -> Array:
    """Return an array or tensor as an array of numbers, ragged ones padded with 0; raises StructureError."""
    if hasattr(part, "to_tensor"):
        part = part.to_tensor()
    elif hasattr(part, "dense_shape"):
        part = sys.modules["tensorflow"].sparse.to_dense(part)
    elif hasattr(part, "toarray"):
        part = part.toarray()
    try:
        array = np.asarray(part)
    except (TypeError, ValueError):
        raise StructureError(f"returned lists of different lengths{_of(name)}", _NUMBERS) from None
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.dtype.kind in "OSU":
        raise StructureError(f"returned text or Python objects{_of(name)}", _NUMBERS)
    if array.dtype.kind not in "uifb":
        raise StructureError(f"returned values of type {array.dtype}{_of(name)}", "convert them to numbers")
    return array


def _of(name: str) -> str:
    return f" as {name}" if name else ""


def is_ragged(part: Any) -> bool:
    """Return whether `to_array` pads a part."""
    return hasattr(part, "to_tensor")


def to_arrays(parts: Mapping[str, Any], num_axes: int) -> dict[str, Array]:
    """Return the parts as arrays of numbers, with weights as float32; raises StructureError.

    `num_axes` is 1 for several samples, 0 for a single one.
    """
    arrays = {name: to_array(part, name) for name, part in parts.items()}
    if SAMPLE_WEIGHT in arrays:
        weights = arrays[SAMPLE_WEIGHT]
        if weights.ndim == num_axes + 1 and weights.shape[-1] == 1:
            weights = weights[..., 0]
        if weights.ndim != num_axes:
            raise StructureError(
                "returned weights that are not one number for each sample",
                "return weights of shape (n,); weigh time steps or pixels in a loss of your own",
            )
        arrays[SAMPLE_WEIGHT] = weights.astype(np.float32, copy=False)
    return arrays


def check_lengths(arrays: Mapping[str, Array], num_axes: int) -> None:
    """Raise StructureError unless all arrays have the same number of samples."""
    if len({array.shape[:num_axes] for array in arrays.values()}) != 1:
        listed = ", ".join(f"{name} {array.shape[:1]}" for name, array in arrays.items())
        raise StructureError(f"returned arrays of different lengths: {listed}")


def to_records(arrays: Mapping[str, Array], num_axes: int) -> Array:
    """Return several arrays as the fields of one, and the only array as it is; raises StructureError."""
    if list(arrays) == [""]:
        return arrays[""]
    check_lengths(arrays, num_axes)
    dtype = np.dtype([(name, array.dtype, array.shape[num_axes:]) for name, array in arrays.items()])
    records = np.empty(next(iter(arrays.values())).shape[:num_axes], dtype)
    for name, array in arrays.items():
        records[name] = array
    return records


def conform(block: Block, spec: PrepareSpec) -> Block:
    """Return a block in the types that are stored, and with what the job's model and public data have.

    Grey images of a model that takes (h, w, 1) get an axis of channels. Samples without weights get 1, and
    integer labels become float32 where those of the public data are.
    """
    samples, labels = as_samples(block.samples), as_labels(block.labels)
    if takes_grey(spec) and samples.dtype.names is None and samples.ndim == 3:
        samples = samples[..., np.newaxis]
    if SAMPLE_WEIGHT in spec.labels and SAMPLE_WEIGHT not in (labels.dtype.names or ()):
        fields = {name or LABEL: field for name, field in fields_of(labels).items()}
        labels = to_records(fields | {SAMPLE_WEIGHT: np.ones(len(labels), np.float32)}, 1)
    fields = fields_of(labels)
    if fields.keys() == spec.labels.keys():
        wide = {
            name: field.astype(np.float32, copy=False) if spec.labels[name][0] == "float32" else field
            for name, field in fields.items()
        }
        labels = to_records(wide, 1)
    return replace(block, samples=samples, labels=labels)


def takes_grey(spec: PrepareSpec) -> bool:
    """Return whether the model takes pictures of one channel."""
    shape = spec.inputs.get("", ())
    return len(shape) == 3 and shape[2] == 1
