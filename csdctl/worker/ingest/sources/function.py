"""The user's function, `FILE.py:NAME`: called with the path of the data, it returns all samples.

Its result is named as Keras' fit reads it: a dict names inputs and outputs, a tuple or list has them in
the model's order. Several inputs or outputs become the fields of a structured array.
"""

import dis
import hashlib
import random
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import has_libraries_only, keras, load_backend, tf
from csdctl.worker.data.arrays import Array, as_samples, label_dtype
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.ingest.sources import source as sources
from csdctl.worker.ingest.sources.arrays import ArraySource
from csdctl.worker.ingest.sources.images import ImageDecoder, known_shape
from csdctl.worker.ingest.sources.source import Block, DecodedSource, StructureError, Tree, to_records
from csdctl.worker.process.errors import JobError, WorkerError, describe, find_remedy
from csdctl.worker.protocol import datasets as protocol
from csdctl.worker.protocol.datasets import OUTPUT, SAMPLE_WEIGHT, PrepareSpec, takes

ENDING = "yield each sample once, without repeat() or an endless loop: every epoch reads all samples"
USE_NUMBERS = (
    "turn text into numbers in the function, with keras.layers.TextVectorization or StringLookup, numbers of "
    "several types into one, with astype('float32'), and lists "
    "of different lengths into one array, with keras.utils.pad_sequences"
)
SHUFFLE_SEED = 0
"""Seed of the random numbers of the user's code while data is prepared."""
MAX_NAME = 128
MODULE = "csdctl_users_data"
END = object()

Parts = dict[str, Any]
"""Arrays, tensors or their specs by the name of an input or output, '' for the only one."""


class UserFunction:
    """The user's function. All its failures become a WorkerError that exposes no private data."""

    def __init__(self, spec: PrepareSpec) -> None:
        path, _, self._name = spec.function.rpartition(":")
        self._path = Path(path)
        self._is_private = spec.is_private
        self._code = spec.code.archive if spec.code else ""
        self._words: set[str] = set()
        """The words of the code, which the host has too."""

    def call(self, root: Path) -> Any:
        """Call the function, with TensorFlow if its code mentions it, and with the same random numbers."""
        source = self._path.read_bytes()
        stated = re.match(r"[0-9a-f]{64}", self._path.name)  # the name of a file in the store
        if stated and stated[0] != hashlib.sha256(source).hexdigest():
            raise WorkerError(f"{self._path} has been changed since csdctl sent it", remedy="deploy again")
        texts = [source]
        if self._code:
            check_stored(self._code)
            archive = str(Path(self._code).resolve())
            sys.path.insert(0, archive)
            with zipfile.ZipFile(archive) as packed:
                texts += [packed.read(name) for name in packed.namelist()]
        self._words = set(re.findall(r"\w+", b" ".join(texts).decode(errors="replace")))
        random.seed(SHUFFLE_SEED)
        np.random.seed(SHUFFLE_SEED)
        mention = rb"tensorflow|keras"
        if has_libraries_only():  # then what only mentions it may run
            mention = rb"(?m)^\s*(?:import|from)\b.*(?:tensorflow|keras)"
        if any(re.search(mention, text) for text in texts):
            load_backend()
            keras.utils.set_random_seed(SHUFFLE_SEED)
        return self.guard(lambda: self._load(source)(str(root)))

    def _load(self, source: bytes) -> Callable[[str], Any]:
        module = ModuleType(MODULE)
        module.__file__ = str(self._path)
        sys.modules[MODULE] = module  # where dataclasses look up the types that they are written with
        exec(compile(source, self._path, "exec"), module.__dict__)  # no __pycache__ is read or written
        function: Callable[[str], Any] = getattr(module, self._name)
        return function

    def guard(self, code: Callable[[], Any]) -> Any:
        """Return what `code` returns. Raises WorkerError for whatever it raises."""
        try:
            return code()
        except BaseException as error:
            # The message may name a private file or contain private data.
            reason = type(error).__name__ if self._is_private else describe(error, self._path)
            if isinstance(error, ModuleNotFoundError) and self._is_private and error.name in self._words:
                reason += f" for {error.name}"
            remedy = find_remedy(error) or "fix its file"
            raise JobError(f"the function {self._name} fails: {reason}", remedy) from None

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Convert the error of a result that is not samples to a WorkerError, which names the function."""
        try:
            yield
        except StructureError as error:
            raise JobError(f"the function {self._name} {error}", error.remedy) from None


class Elements(DecodedSource):
    """Samples from an iterator, a tf.data.Dataset or a keras.utils.PyDataset, one by one or in batches."""

    def __init__(
        self,
        function: UserFunction,
        elements: Iterator[Any],
        spec: PrepareSpec,
        *,
        is_batched: bool = False,
        num_samples: int = 0,
    ) -> None:
        super().__init__(spec)
        self.num_samples = num_samples
        self._function = function
        self._elements = elements
        self._spec = spec
        self._axes = int(is_batched)
        self._decoder: ImageDecoder | None = None

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all samples from index `start` on. Raises WorkerError for whatever fails or does not fit."""
        with self._function.checking():
            yield from self._batches(start) if self._axes else super().blocks(start)

    def _batches(self, start: int) -> Iterator[Block]:
        stop = 0
        for samples, labels in self._records():
            first, stop = stop, stop + len(samples)
            if stop > start:
                num_skipped = max(0, start - first)
                yield sources.block_at(first + num_skipped, samples[num_skipped:], labels[num_skipped:])

    def _records(self) -> Iterator[tuple[Array, Array]]:
        while (element := self._function.guard(lambda: next(self._elements, END))) is not END:
            inputs, outputs = (to_arrays(parts, self._axes) for parts in name_parts(element, self._spec))
            samples = to_records(inputs, self._axes)
            num_samples = samples.shape[: self._axes]
            labels = to_records(outputs, self._axes) if outputs else no_labels(num_samples)
            if num_samples != labels.shape[: self._axes]:
                raise StructureError(f"yields {len(samples)} samples with {len(labels)} labels")
            yield samples, labels

    def candidates(self) -> Iterator[sources.Candidate]:
        """Yield all samples. Raises StructureError if they differ in shape or type."""
        expected = None
        shape = known_shape(self._spec.picture)
        takes_images = shape is not None and shape[2] in (1, 3)
        for yielded, label in self._records():
            sample = as_samples(yielded)
            is_image = takes_images and sample.dtype == np.uint8 and sample.ndim in (2, 3)
            if is_image and sample.ndim == 2:
                sample = sample[..., np.newaxis]
            if is_image and self._decoder is None:
                self._decoder = ImageDecoder(self._spec.picture)
            form = None if is_image else sample.shape, label.shape, sample.dtype, label_dtype(label.dtype)
            if expected not in (None, form):
                raise StructureError("yields samples of different shapes or types", sources.GIVE_ONE_SHAPE)
            expected = form
            yield sample, label

    def decode(self, content: Array, label: Any) -> tuple[Array, Any]:
        """Return the sample in its final shape, and its label. Raises UnusableError."""
        return self._decoder.fit(content) if self._decoder else content, label


def call_function(tree: Tree, spec: PrepareSpec) -> sources.SampleSource:
    """Call the user's function, and return its result as a source. Raises WorkerError, exit code 2."""
    function = UserFunction(spec)
    returned = function.call(tree.root)
    with function.checking():
        if "tensorflow" in sys.modules and isinstance(returned, tf.data.Dataset):
            return _open_dataset(returned, function, spec)
        if "keras" in sys.modules and isinstance(returned, keras.utils.PyDataset):
            return _open_py_dataset(returned, function, spec)
        if isinstance(returned, list) and len(returned) in (2, 3):  # as validation_data=[x, y] of fit
            lengths = {tuple(getattr(part, "shape", ()))[:1] for part in returned}
            returned = tuple(returned) if len(lengths) == 1 and lengths != {()} else returned
        if isinstance(returned, tuple | Mapping) or hasattr(returned, "shape"):
            return _open_arrays(returned, spec)
        return _open_iterator(returned, function, spec)


def _open_dataset(returned: Any, function: UserFunction, spec: PrepareSpec) -> Elements:
    size = int(returned.cardinality())
    if size == tf.data.INFINITE_CARDINALITY:
        raise StructureError("returned a tf.data.Dataset without an end", ENDING)
    inputs, outputs = name_parts(returned.element_spec, spec)
    for name, part in (inputs | outputs).items():
        if getattr(part, "shape", None) is None or part.shape.rank is None:
            problem = f"returned a tf.data.Dataset without a known rank of {name or 'samples or labels'}"
            raise StructureError(problem, "set it in map(), with tf.ensure_shape or set_shape")
    shapes = [tuple(part.shape) for part in (*inputs.values(), *outputs.values())]
    is_batched = _is_batched(inputs, shapes, spec)
    num_samples = 0 if is_batched else max(0, size)
    elements = function.guard(lambda: iter(returned))
    return Elements(function, elements, spec, is_batched=is_batched, num_samples=num_samples)


def _is_batched(inputs: Parts, shapes: list[tuple[int | None, ...]], spec: PrepareSpec) -> bool:
    """Return whether elements are batches, by the `shapes` of all parts and what the model takes."""
    if not all(shapes):
        return False
    if set(inputs) == set(spec.inputs):
        pairs = [(spec.inputs[name], tuple(part.shape)) for name, part in inputs.items()]
        fits = [all(takes(expected, shape[axes:]) for expected, shape in pairs) for axes in (0, 1)]
        if fits[0] != fits[1]:
            return fits[1]
    sizes = {shape[0] for shape in shapes}
    return len(sizes) == 1 and (None in sizes or len(shapes) > 1)


def _open_py_dataset(returned: Any, function: UserFunction, spec: PrepareSpec) -> Elements:
    num_batches = function.guard(lambda: returned.num_batches)
    if num_batches is None:
        raise StructureError("returned a PyDataset without an end", "give it a length: def __len__(self)")
    elements = map(returned.__getitem__, range(num_batches))
    return Elements(function, elements, spec, is_batched=True)


def _open_iterator(returned: Any, function: UserFunction, spec: PrepareSpec) -> Elements:
    try:
        iterator = iter(returned)
    except TypeError:
        raise StructureError(f"returned a {type(returned).__name__}") from None
    code = getattr(iterator, "gi_code", None)
    ends = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS"}
    if code and not ends & {instruction.opname for instruction in dis.Bytecode(code)}:
        raise StructureError("returned a generator without an end: `while True`, without break", ENDING)
    return Elements(function, iterator, spec)


def _open_arrays(returned: Any, spec: PrepareSpec) -> ArraySource:
    if isinstance(returned, tuple) and any(hasattr(part, "element_spec") for part in returned):
        raise StructureError("returned several data sets", "return one, and write a function for each")
    inputs, outputs = name_parts(returned, spec)
    samples, labels = to_arrays(inputs, 1), to_arrays(outputs, 1)
    lengths = {array.shape[:1] for array in (*samples.values(), *labels.values())}
    if len(lengths) > 1 and isinstance(returned, tuple) and all(isinstance(part, tuple) for part in returned):
        problem = "returned arrays of different lengths, as (train, test) of load_data() has"
        raise StructureError(problem, "return one pair, and write a function for each")
    return ArraySource(samples, labels or {"": no_labels(next(iter(lengths)))}, spec)


def name_parts(element: Any, spec: PrepareSpec) -> tuple[Parts, Parts]:
    """Return inputs and outputs, {} without labels, by their names in the model. Raises StructureError."""
    if isinstance(element, Mapping) or getattr(element, "shape", ()) not in ((), None):
        element = (element, None)
    if not (isinstance(element, tuple | list) and len(element) in (2, 3)):
        raise StructureError("yields something that is not (sample, label)")
    samples, labels, weights = (*element, None)[:3]
    return _name_inputs(samples, spec), _name_outputs(labels, weights, spec)


def no_labels(num_samples: tuple[int, ...]) -> Array:
    """Return labels without values, shape (*num_samples, 0)."""
    return np.zeros((*num_samples, 0), np.float32)


def _name_inputs(samples: Any, spec: PrepareSpec) -> Parts:
    """Return the parts of `samples` by the names of the model's inputs. '' if there is only one."""
    parts, names = _parts_of(samples, protocol.INPUT), list(spec.inputs)
    if len(names) == len(parts) == 1 and "" in (*names, *parts):
        return {names[0]: next(iter(parts.values()))}
    if names and set(names) <= set(parts):  # Keras leaves out what the model does not take, too
        return {name: parts[name] for name in names}
    return parts


def _name_outputs(labels: Any, weights: Any, spec: PrepareSpec) -> Parts:
    """Return the parts of `labels` by the model's outputs, '' for the only one. The samples' weights last."""
    if labels is None:
        return {}
    parts = _parts_of(labels, OUTPUT)
    if len(parts) == 1 and not (spec.outputs and set(parts) <= set(spec.outputs)):
        parts = {"": next(iter(parts.values()))}
    elif set(parts) <= set(spec.outputs):
        parts = {name: parts[name] for name in spec.outputs if name in parts}
    if SAMPLE_WEIGHT in parts:
        raise StructureError(f"returned an output with the name {SAMPLE_WEIGHT}", "rename the output")
    if weights is None:
        return parts
    weight_parts = _parts_of(weights, OUTPUT)
    if len(weight_parts) > 1:
        remedy = "return one weight for each sample, or weigh losses instead"
        raise StructureError("returned weights for each output", remedy)
    if "" in parts:
        parts = {protocol.LABEL: parts[""]}
    return parts | {SAMPLE_WEIGHT: next(iter(weight_parts.values()))}


def _parts_of(structure: Any, kind: str) -> Parts:
    if isinstance(structure, Mapping):
        parts = dict(structure)
        for name in parts:
            is_text = isinstance(name, str) and name.isascii() and name.isprintable()
            if not is_text or not 0 < len(name) <= MAX_NAME:
                remedy = f"name inputs and outputs with up to {MAX_NAME} printable ASCII characters"
                raise StructureError(f"returned the name {str(name)[:MAX_NAME]!r}", remedy)
    elif isinstance(structure, tuple | list) and structure and all(map(_is_part, structure)):
        parts = {protocol.name_of_position(kind, number): part for number, part in enumerate(structure)}
        if len(parts) == 1:
            parts = {"": structure[0]}
    else:
        parts = {"": structure}
    if not parts or any(isinstance(part, Mapping) for part in parts.values()):
        remedy = "give each input and output one array, under its own name"
        raise StructureError("returned nested structures", remedy)
    return parts


def _is_part(value: Any) -> bool:
    """Return whether an item of a tuple is an input or output. Numbers make up a list of numbers."""
    return (hasattr(value, "shape") and not isinstance(value, np.generic)) or isinstance(value, Mapping)


def to_arrays(parts: Mapping[str, Any], num_axes: int) -> dict[str, Array]:
    """Return parts as arrays of numbers, 1 axis of several samples or 0. Raises StructureError."""
    arrays = {name: _to_array(part, f" as {name}" if name else "") for name, part in parts.items()}
    if SAMPLE_WEIGHT in arrays:
        weights = arrays[SAMPLE_WEIGHT]
        if weights.ndim == num_axes + 1 and weights.shape[-1] == 1:
            weights = weights[..., 0]
        if weights.ndim < num_axes:
            remedy = "return weights of shape (n,), or with further axes of the labels, such as (n, steps)"
            raise StructureError("returned a single weight for all samples", remedy)
        arrays[SAMPLE_WEIGHT] = weights.astype(np.float32, copy=False)
    return arrays


def _to_array(part: Any, where: str) -> Array:
    if hasattr(part, "to_tensor"):
        raise StructureError(f"returned a ragged tensor{where}", "pad it: to_tensor(shape=…)")
    if hasattr(part, "dense_shape"):
        part = sys.modules["tensorflow"].sparse.to_dense(part)
    elif hasattr(part, "toarray"):
        part = part.toarray()
    if np.ma.is_masked(part):
        raise StructureError(f"returned a masked array{where}", "replace masked values: array.filled(0)")
    try:
        array = np.asarray(part)
    except (TypeError, ValueError):
        raise StructureError(f"returned lists of different lengths{where}", USE_NUMBERS) from None
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.dtype.kind in "OSU":
        raise StructureError(f"returned text or Python objects{where}", USE_NUMBERS)
    if array.dtype.kind not in "uifb":
        raise StructureError(f"returned values of type {array.dtype}{where}", "convert them to numbers")
    return array
