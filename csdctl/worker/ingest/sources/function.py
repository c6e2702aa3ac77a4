"""The user's own function, `FILE.py:NAME`: called with the path of the data, it returns all samples.

It returns arrays, a tf.data.Dataset, batched or not, a keras.utils.PyDataset, or an iterator of samples.
"""

import hashlib
import itertools
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_tensorflow
from csdctl.worker.data.arrays import Array, as_labels, as_samples
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.ingest.sources.arrays import ArraySource, join_rows, rows_of
from csdctl.worker.ingest.sources.images import ImageDecoder, known_shape
from csdctl.worker.ingest.sources.source import (
    EXPECTED,
    Block,
    EncodedSample,
    IngestLimits,
    SampleSource,
    StructureError,
    Tree,
    check_lengths,
    decode_blocks,
    is_ragged,
    name_inputs,
    name_outputs,
    no_labels,
    skip_rows,
    split,
    to_arrays,
    to_records,
)
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.datasets import PrepareSpec

_END = object()
SAMPLES, LABELS = "samples", "labels"
"""How the only input and the only output are named in messages."""

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


class UserFunction:
    """The user's function; all its failures become a WorkerError that exposes no private data."""

    def __init__(self, spec: PrepareSpec) -> None:
        path, _, self._name = spec.function.rpartition(":")
        self._path = Path(path)
        self._is_private = spec.is_private
        self._code = spec.code.archive if spec.code else ""

    def call(self, root: Path) -> Any:
        """Return what the function returns for the data at `root`; raises WorkerError.

        TensorFlow is loaded first if the user's code does that: its threads must be set before it starts.
        Random numbers are the same in every call, so that the same data gives the same bytes.
        """
        source = self._path.read_bytes()
        stated = re.match(r"[0-9a-f]{64}", self._path.name)  # the name of a file in the store
        if stated and stated[0] != hashlib.sha256(source).hexdigest():
            raise WorkerError(f"{self._path} has been changed since csdctl sent it", remedy="deploy again")
        sources = [source]
        if self._code:
            check_stored(self._code)
            archive = str(Path(self._code).resolve())
            sys.path.insert(0, archive)
            with zipfile.ZipFile(archive) as packed:
                sources += [packed.read(name) for name in packed.namelist()]
        if any(map(_USES_TENSORFLOW.search, sources)):
            load_tensorflow()
            import keras

            keras.utils.set_random_seed(SHUFFLE_SEED)
        return self.guard(lambda: self._load(source)(str(root)))

    def _load(self, source: bytes) -> Callable[[str], Any]:
        """Import the function; raises whatever its file raises."""
        module = ModuleType(_MODULE)
        module.__file__ = str(self._path)
        sys.modules[_MODULE] = module  # where dataclasses look up the types that they are written with
        exec(compile(source, self._path, "exec"), module.__dict__)  # no __pycache__ is read or written
        function: Callable[[str], Any] = getattr(module, self._name)
        return function

    def guard(self, code: Callable[[], Any]) -> Any:
        """Return what `code` returns; raises WorkerError for whatever it raises."""
        try:
            return code()
        except BaseException as error:
            # The message may name a private file or contain private data.
            reason = type(error).__name__ if self._is_private else describe(error)
            remedy = "fix its file"
            if isinstance(error, ModuleNotFoundError):
                remedy = "install the module on this machine; name your own modules in `code` of job.yaml"
            raise WorkerError(
                f"the function {self._name} fails: {reason}", remedy=remedy, exit_code=2
            ) from None

    def error(self, problem: str, remedy: str = EXPECTED) -> WorkerError:
        """Return the error for a result that is not samples."""
        return WorkerError(f"the function {self._name} {problem}", remedy=remedy, exit_code=2)


class Elements:
    """What a function yields, as arrays: from an iterator, a tf.data.Dataset or a keras.utils.PyDataset."""

    def __init__(
        self,
        function: UserFunction,
        begin: Callable[[], Iterator[Any]],
        spec: PrepareSpec,
        *,
        is_batched: bool,
        num_total: int = 0,
    ) -> None:
        """`begin` starts the iteration; more than once only for `measure`."""
        self.is_batched = is_batched
        self.num_total = num_total
        """Elements; 0 if unknown."""
        self.padded: Shapes = {}
        self._function = function
        self._begin = begin
        self._spec = spec
        self._targets: Shapes = {}

    def pad_to_longest(self, names: Iterable[str]) -> None:
        """Pad the inputs and outputs `names`, as in `_display_name`, with 0: all to one shape.

        It is the one that the model or the public data have; without one, all elements are read once more.
        """
        known = {
            **{_display_name(name, SAMPLES): shape for name, shape in self._spec.inputs.items()},
            **{_display_name(name, LABELS): shape for name, (_, shape) in self._spec.labels.items()},
        }
        self._targets = {name: known[name] for name in names if name in known and all(known[name])}
        if missing := [name for name in names if name not in self._targets]:
            self._targets |= self._measure(missing)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        """Yield samples and labels; raises WorkerError for whatever fails or does not fit."""
        for inputs, outputs in self._arrays():
            with self._checking():
                records = self._to_records(self._pad(inputs, SAMPLES), self._pad(outputs, LABELS))
            yield records

    def _to_records(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> tuple[Array, Array]:
        axes = int(self.is_batched)
        samples = to_records(inputs, axes)
        labels = to_records(outputs, axes) if outputs else no_labels(samples.shape[:axes])
        if axes and samples.shape[:1] != labels.shape[:1]:
            raise StructureError(f"yields {len(samples)} samples with {len(labels)} labels")
        return as_samples(samples), as_labels(labels)

    def _arrays(self) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
        iterator = self._function.guard(self._begin)
        while (element := self._function.guard(lambda: next(iterator, _END))) is not _END:
            with self._checking():
                arrays = self._to_arrays(element)
            yield arrays

    def _to_arrays(self, element: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        samples, labels, weights = split(element)
        inputs = name_inputs(samples, self._spec)
        outputs = name_outputs(labels, weights, self._spec)
        axes = int(self.is_batched)
        return to_arrays(inputs, axes), to_arrays(outputs, axes)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except StructureError as error:
            raise self._function.error(error.problem, error.remedy) from None

    def _measure(self, names: list[str]) -> Shapes:
        """Return the largest shape of a sample or label of each of `names`, by reading everything once."""
        axes = int(self.is_batched)
        largest: Shapes = {}
        for inputs, outputs in self._arrays():
            for name, _, array in describe_parts((inputs, outputs), (inputs, outputs)):
                if name in names:
                    shape = array.shape[axes:]
                    before = largest.setdefault(name, shape)
                    if len(before) != len(shape):
                        raise self._function.error("yields samples of different shapes or types")
                    largest[name] = tuple(map(max, before, shape))
        return largest

    def _pad(self, arrays: dict[str, Array], kind: str) -> dict[str, Array]:
        return {name: self._pad_one(array, _display_name(name, kind)) for name, array in arrays.items()}

    def _pad_one(self, array: Array, name: str) -> Array:
        target, axes = self._targets.get(name), int(self.is_batched)
        shape = array.shape[axes:]
        if target is None or shape == target or len(shape) != len(target):
            return array
        if any(size > most for size, most in zip(shape, target, strict=True)):
            raise self._function.error(
                f"yields {name} of shape {shape}, longer than {target} of the model or the public data",
                "pad or cut all data to one length in the function, "
                "such as padded_batch(…, padded_shapes=…) or to_tensor(shape=…)",
            )
        self.padded[name] = target
        padded = np.zeros((*array.shape[:axes], *target), array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        return padded


def _display_name(name: str, kind: str) -> str:
    """Return the name of an input or output, or what the only one is called."""
    return name or kind


def describe_parts(
    parts: Sequence[Mapping[str, Any]], arrays: Sequence[Mapping[str, Array]]
) -> list[tuple[str, Any, Array]]:
    """Return the name, the part and the array of each input and output; both have inputs and outputs."""
    return [
        (_display_name(name, kind), part, array[name])
        for kind, found, array in zip((SAMPLES, LABELS), parts, arrays, strict=True)
        for name, part in found.items()
    ]


class IteratedSamples(SampleSource):
    """Samples one by one; uint8 images are converted to the job's shape, others stay unchanged."""

    def __init__(self, function: UserFunction, elements: Elements, spec: PrepareSpec, threads: int) -> None:
        super().__init__(spec)
        self.num_samples = elements.num_total
        self.padded = elements.padded
        self._function = function
        self._elements = elements
        self._threads = threads
        self._rule = spec.picture
        self._decoder: ImageDecoder | None = None

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all samples from index `start` on."""
        candidates: Iterable[EncodedSample] = itertools.islice(self._candidates(), start, None)
        return decode_blocks(
            candidates, self._decode, limits, threads=self._threads, sample_bytes=self.sample_bytes
        )

    def _candidates(self) -> Iterator[EncodedSample]:
        expected = None
        shape = known_shape(self._rule)
        takes_images = shape is not None and shape[2] in (1, 3)
        for yielded, label in self._elements:
            sample = yielded
            is_image = takes_images and sample.dtype == np.uint8 and sample.ndim in (2, 3)
            if is_image and sample.ndim == 2:
                sample = sample[..., np.newaxis]
            if is_image and self._decoder is None:
                self._decoder = ImageDecoder(self._rule, load_tensorflow())
            found = (None if is_image else sample.shape, sample.dtype, label.shape, label.dtype)
            if expected is not None and found != expected:
                raise self._function.error(
                    "yields samples of different shapes or types",
                    "give all samples one shape and type, or return a tf.data.Dataset, which is padded",
                )
            expected = found
            yield EncodedSample(sample, label)

    def _decode(self, candidate: EncodedSample) -> tuple[Array, Any]:
        if self._decoder:
            return self._decoder.fit(candidate.content), candidate.label
        return candidate.content, candidate.label


class BatchedSamples(SampleSource):
    """Samples in batches of any size, which stay as they are."""

    def __init__(self, elements: Elements, spec: PrepareSpec) -> None:
        super().__init__(spec)
        self.padded = elements.padded
        self._elements = elements

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all samples from index `start` on."""
        return skip_rows(self._elements, start)


SHUFFLE_SEED = 0
"""Of what the user's code draws at random while data is prepared."""

_END_IT = "leave out repeat(), or end the data set with take()"

Sizes = tuple[int | None, ...]
"""A shape with None for any size."""


def open_dataset(
    returned: Any, function: UserFunction, spec: PrepareSpec, threads: int
) -> SampleSource | None:
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
            _display_name(name, kind)
            for parts, kind in ((inputs, SAMPLES), (outputs, LABELS))
            for name, part in parts.items()
            if None in part.shape[int(is_batched) :] and not (is_image and kind == SAMPLES)
        ]
    )
    return source


def open_py_dataset(
    returned: Any, function: UserFunction, spec: PrepareSpec, threads: int
) -> SampleSource | None:
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
    open_shapes = [name for name, shape in spec.inputs.items() if 0 in shape]
    elements.pad_to_longest([_display_name(name, SAMPLES) for name in open_shapes])
    return source


def _source(elements: Elements, function: UserFunction, spec: PrepareSpec, threads: int) -> SampleSource:
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


_MODULE = "csdctl_users_data"
_USES_TENSORFLOW = re.compile(rb"tensorflow|keras")


def call_function(tree: Tree, spec: PrepareSpec, threads: int) -> SampleSource:
    """Call the user's function and return its result as a source.

    Raises WorkerError, exit code 2, if it fails or returns something else.
    """
    function = UserFunction(spec)
    returned = function.call(tree.root)
    try:
        return _as_source(returned, function, spec, threads)
    except StructureError as error:
        raise function.error(error.problem, error.remedy) from None


def _as_source(returned: Any, function: UserFunction, spec: PrepareSpec, threads: int) -> SampleSource:
    """Return what a function returned as a source; raises StructureError or WorkerError."""
    for open_elements in (open_dataset, open_py_dataset):
        if (source := open_elements(returned, function, spec, threads)) is not None:
            return source
    if isinstance(returned, tuple | Mapping) or hasattr(returned, "shape"):
        return _open_arrays(returned, spec)
    try:
        iterator = iter(returned)
    except TypeError:
        raise StructureError(f"returned a {type(returned).__name__}") from None
    elements = Elements(function, lambda: iterator, spec, is_batched=False)
    return IteratedSamples(function, elements, spec, threads)


def _open_arrays(returned: Any, spec: PrepareSpec) -> ArraySource:
    if isinstance(returned, tuple) and any(hasattr(part, "element_spec") for part in returned):
        raise StructureError("returned several data sets", "return one, and write a function for each")
    try:
        samples, labels, weights = split(returned)
    except StructureError:
        raise StructureError(f"returned {len(returned)} values") from None
    inputs, outputs = name_inputs(samples, spec), name_outputs(labels, weights, spec)
    arrays = [to_arrays(parts, 1) for parts in (inputs, outputs)]
    lengths = {array.shape[:1] for part in arrays for array in part.values()}
    if len(lengths) > 1 and isinstance(returned, tuple) and all(isinstance(part, tuple) for part in returned):
        raise StructureError(
            "returned arrays of different lengths, as (train, test) of load_data() has",
            "return one pair, and write a function for each",
        )
    if not outputs:
        arrays[1] = {"": no_labels(next(iter(arrays[0].values())).shape[:1])}
    for part in arrays:
        check_lengths(part, 1)
    rows = [join_rows({name: rows_of(array) for name, array in part.items()}) for part in arrays]
    source = ArraySource(rows[0], rows[1], spec)
    source.padded = {
        name: array.shape[1:]
        for name, part, array in describe_parts((inputs, outputs), arrays)
        if is_ragged(part)
    }
    return source
