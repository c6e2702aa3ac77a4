"""Data sets as Keras' fit takes them: a tf.data.Dataset, batched or not, or a keras.utils.PyDataset."""

import sys
from collections.abc import Iterator
from typing import Any

from csdctl.worker.ingest.sources.iterated import (
    LABELS,
    SAMPLES,
    BatchedSamples,
    Elements,
    Guard,
    IteratedSamples,
    describe,
)
from csdctl.worker.ingest.sources.source import SampleSource
from csdctl.worker.ingest.sources.structure import StructureError, name_inputs, name_outputs, split
from csdctl.worker.protocol.datasets import PrepareSpec

SHUFFLE_SEED = 0
"""Of what the user's code draws at random while data is prepared."""

_END_IT = "leave out repeat(), or end the data set with take()"

Sizes = tuple[int | None, ...]
"""A shape with None for any size."""


def open_dataset(returned: Any, function: Guard, spec: PrepareSpec, threads: int) -> SampleSource | None:
    """Return a tf.data.Dataset as a source, None for anything else; raises StructureError or WorkerError."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(returned, tf.data.Dataset):
        return None
    size = int(returned.cardinality())
    if size == tf.data.INFINITE_CARDINALITY:
        raise StructureError("returned a tf.data.Dataset without an end", _END_IT)
    inputs, outputs = _spec_parts(returned.element_spec, spec)
    shapes = [tuple(part.shape) for part in (*inputs.values(), *outputs.values())]
    is_batched = _is_batched({name: tuple(part.shape) for name, part in inputs.items()}, shapes, spec)
    num_total = size if size > 0 and not is_batched else 0
    elements = Elements(function, lambda: iter(returned), spec, is_batched=is_batched, num_total=num_total)
    source = _source(elements, function, spec, threads)
    is_image = not is_batched and list(inputs) == [""] and inputs[""].dtype == tf.uint8
    elements.pad_to_longest(
        [
            describe(name, kind)
            for parts, kind in ((inputs, SAMPLES), (outputs, LABELS))
            for name, part in parts.items()
            if None in part.shape[int(is_batched) :] and not (is_image and kind == SAMPLES)
        ]
    )
    return source


def open_py_dataset(returned: Any, function: Guard, spec: PrepareSpec, threads: int) -> SampleSource | None:
    """Return a keras.utils.PyDataset as a source, None for anything else; raises as `open_dataset`."""
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(returned, keras.utils.PyDataset):
        return None
    num_batches = function.guard(lambda: returned.num_batches)
    if num_batches is None:
        raise StructureError("returned a PyDataset without an end", "give it a length: def __len__(self)")

    def begin() -> Iterator[Any]:
        return (returned[number] for number in range(num_batches))

    elements = Elements(function, begin, spec, is_batched=True)
    source = _source(elements, function, spec, threads)
    elements.pad_to_longest([describe(name, SAMPLES) for name, shape in spec.inputs.items() if 0 in shape])
    return source


def _source(elements: Elements, function: Guard, spec: PrepareSpec, threads: int) -> SampleSource:
    if elements.is_batched:
        return BatchedSamples(elements, spec)
    return IteratedSamples(function, elements, spec, threads)


def _spec_parts(element_spec: Any, spec: PrepareSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specs of inputs and of outputs by name; raises StructureError."""
    try:
        samples, labels, weights = split(element_spec)
    except StructureError:
        raise StructureError(
            "returned a tf.data.Dataset whose elements are not samples or (samples, labels)",
            "map() its elements to (samples, labels) or (samples, labels, weights)",
        ) from None
    inputs, outputs = name_inputs(samples, spec), name_outputs(labels, weights, spec)
    for name, part in (inputs | outputs).items():
        if getattr(part, "shape", None) is None or part.shape.rank is None:
            raise StructureError(
                f"returned a tf.data.Dataset without a known rank of {name or 'samples or labels'}",
                "set it in map(), with tf.ensure_shape or set_shape",
            )
    return inputs, outputs


def _is_batched(inputs: dict[str, Sizes], shapes: list[Sizes], spec: PrepareSpec) -> bool:
    """Return whether elements are batches, by their `shapes` and what the model takes."""
    if any(not shape for shape in shapes):
        return False
    if set(inputs) == set(spec.inputs):
        fits = [
            all(_fits(spec.inputs[name], shape[axes:]) for name, shape in inputs.items()) for axes in (0, 1)
        ]
        if fits[0] != fits[1]:
            return fits[1]
    sizes = {shape[0] for shape in shapes}
    return len(sizes) == 1 and (None in sizes or len(shapes) > 1)


def _fits(expected: tuple[int, ...], shape: Sizes) -> bool:
    """Return whether an input takes a sample; Keras adds and removes a last axis of size 1."""
    if len(shape) == len(expected) - 1 and expected[-1] == 1:
        shape = (*shape, 1)
    elif len(shape) == len(expected) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    return len(shape) == len(expected) and all(
        size is None or most in (0, size) for most, size in zip(expected, shape, strict=True)
    )
