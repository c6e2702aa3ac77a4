"""The user's own function, `FILE.py:NAME`: called with the path of the data, it returns all samples.

It returns arrays, a tf.data.Dataset, batched or not, a keras.utils.PyDataset, or an iterator of samples.
"""

import dis
import hashlib
import random
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import has_libraries_only, keras, load_backend, tf
from csdctl.worker.data.arrays import Array, as_samples, label_dtype
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.ingest.sources.arrays import ArraySource
from csdctl.worker.ingest.sources.images import ImageDecoder, known_shape
from csdctl.worker.ingest.sources.source import (
    LABELS,
    SAMPLES,
    Block,
    Candidate,
    DecodedSource,
    SampleSource,
    StructureError,
    Tree,
    name_parts,
    no_labels,
    skip_rows,
    to_arrays,
    to_records,
)
from csdctl.worker.process.errors import InputError, WorkerError, describe, find_remedy
from csdctl.worker.protocol.datasets import PrepareSpec, takes

_END = object()
ENDING = "yield each sample once, without repeat() or an endless loop: every epoch reads all samples"
Shape = tuple[int, ...]
SHUFFLE_SEED = 0
_MODULE = "csdctl_users_data"


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
        sources = [source]
        if self._code:
            check_stored(self._code)
            archive = str(Path(self._code).resolve())
            sys.path.insert(0, archive)
            with zipfile.ZipFile(archive) as packed:
                sources += [packed.read(name) for name in packed.namelist()]
        self._words = set(re.findall(r"\w+", b" ".join(sources).decode(errors="replace")))
        random.seed(SHUFFLE_SEED)
        np.random.seed(SHUFFLE_SEED)
        named = rb"tensorflow|keras"
        if has_libraries_only():  # then what only mentions it may run
            named = rb"(?m)^\s*(?:import|from)\b.*(?:tensorflow|keras)"
        if any(re.search(named, one) for one in sources):
            load_backend()
            keras.utils.set_random_seed(SHUFFLE_SEED)
        return self.guard(lambda: self._load(source)(str(root)))

    def _load(self, source: bytes) -> Callable[[str], Any]:
        module = ModuleType(_MODULE)
        module.__file__ = str(self._path)
        sys.modules[_MODULE] = module  # where dataclasses look up the types that they are written with
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
            raise InputError(f"the function {self._name} fails: {reason}", remedy) from None

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Convert the error of a result that is not samples to a WorkerError, which names the function."""
        try:
            yield
        except StructureError as error:
            raise InputError(f"the function {self._name} {error}", error.remedy) from None


class Elements(DecodedSource):
    """Samples from an iterator, a tf.data.Dataset or a keras.utils.PyDataset, one by one or in batches."""

    def __init__(
        self,
        function: UserFunction,
        begin: Callable[[], Iterator[Any]],
        spec: PrepareSpec,
        threads: int,
        *,
        is_batched: bool = False,
        num_samples: int = 0,
    ) -> None:
        """`begin` starts the iteration. More than once only for `pad_to_longest`."""
        super().__init__(spec, threads)
        self.num_samples = num_samples
        self._function = function
        self._begin = begin
        self._spec = spec
        self._axes = int(is_batched)
        self._targets: dict[str, Shape] = {}
        self._decoder: ImageDecoder | None = None

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all samples from index `start` on. Raises WorkerError for whatever fails or does not fit."""
        with self._function.checking():
            yield from skip_rows(self._records(), start) if self._axes else super().blocks(start)

    def pad_to_longest(self, names: Collection[str]) -> None:
        """Pad `names` with 0 to the shape of model or public data, or of the longest sample."""
        known = {name or SAMPLES: shape for name, shape in self._spec.inputs.items()}
        known |= {name or LABELS: shape for name, (_, shape) in self._spec.labels.items()}
        self._targets = {name: known[name] for name in names if name in known and all(known[name])}
        missing = [name for name in names if name not in self._targets]
        for inputs, outputs in self._arrays() if missing else ():
            for name, array in named_in_messages(inputs, outputs):
                if name in missing:
                    shape = array.shape[self._axes :]
                    before = self._targets.setdefault(name, shape)
                    if len(before) != len(shape):
                        raise StructureError("yields samples of different shapes or types")
                    self._targets[name] = tuple(map(max, before, shape))

    def _records(self) -> Iterator[tuple[Array, Array]]:
        """Yield samples and labels. Raises StructureError, and WorkerError for whatever fails."""
        for inputs, outputs in self._arrays():
            padded = [
                {name: self._pad(array, name or kind) for name, array in part.items()}
                for part, kind in ((inputs, SAMPLES), (outputs, LABELS))
            ]
            samples = to_records(padded[0], self._axes)
            num_samples = samples.shape[: self._axes]
            labels = to_records(padded[1], self._axes) if outputs else no_labels(num_samples)
            if num_samples != labels.shape[: self._axes]:
                raise StructureError(f"yields {len(samples)} samples with {len(labels)} labels")
            yield samples, labels

    def _arrays(self) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
        iterator = self._function.guard(self._begin)
        while (element := self._function.guard(lambda: next(iterator, _END))) is not _END:
            inputs, outputs = name_parts(element, self._spec)
            yield to_arrays(inputs, self._axes), to_arrays(outputs, self._axes)

    def _pad(self, array: Array, name: str) -> Array:
        target, shape = self._targets.get(name), array.shape[self._axes :]
        if target is None or shape == target or len(shape) != len(target):
            return array
        if any(size > most for size, most in zip(shape, target, strict=True)):
            how = "such as padded_batch(…, padded_shapes=…) or to_tensor(shape=…)"
            problem = f"yields {name} of shape {shape}, longer than {target} of the model or the public data"
            raise StructureError(problem, f"pad or cut all data to one length in the function, {how}")
        self.padded[name] = target
        padded = np.zeros((*array.shape[: self._axes], *target), array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        return padded

    def candidates(self) -> Iterator[Candidate]:
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
            shapes = None if is_image else sample.shape, label.shape
            found = shapes, sample.dtype, label_dtype(label.dtype)
            if expected is not None and found != expected:
                remedy = "give all samples one shape and type, or return a tf.data.Dataset, which is padded"
                raise StructureError("yields samples of different shapes or types", remedy)
            expected = found
            yield sample, label

    def decode(self, content: Array, label: Any) -> tuple[Array, Any]:
        """Return the sample in its final shape, and its label. Raises UnusableError."""
        return self._decoder.fit(content) if self._decoder else content, label


def named_in_messages(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return inputs and outputs with the names that they have in messages."""
    kinds = (SAMPLES, inputs), (LABELS, outputs)
    return [(name or kind, part) for kind, parts in kinds for name, part in parts.items()]


"""Seed of the random numbers of the user's code while data is prepared."""

Sizes = tuple[int | None, ...]


def open_dataset(returned: Any, function: UserFunction, spec: PrepareSpec, threads: int) -> Elements:
    """Return a tf.data.Dataset as a source. Raises StructureError or WorkerError."""
    size = int(returned.cardinality())
    if size == tf.data.INFINITE_CARDINALITY:
        raise StructureError("returned a tf.data.Dataset without an end", ENDING)
    inputs, outputs = _spec_parts(returned.element_spec, spec)
    parts = named_in_messages(inputs, outputs)
    shapes = [tuple(part.shape) for _, part in parts]
    is_batched = _is_batched({name: tuple(part.shape) for name, part in inputs.items()}, shapes, spec)
    num_samples = 0 if is_batched else max(0, size)
    fixed = function, lambda: iter(returned), spec, threads
    source = Elements(*fixed, is_batched=is_batched, num_samples=num_samples)
    if not is_batched and list(inputs) == [""] and inputs[""].dtype == tf.uint8:
        del parts[0]  # images, which are converted to one shape
    source.pad_to_longest([name for name, part in parts if None in part.shape[int(is_batched) :]])
    return source


def open_py_dataset(returned: Any, function: UserFunction, spec: PrepareSpec, threads: int) -> Elements:
    """Return a keras.utils.PyDataset as a source. Raises as `open_dataset`."""
    num_batches = function.guard(lambda: returned.num_batches)
    if num_batches is None:
        raise StructureError("returned a PyDataset without an end", "give it a length: def __len__(self)")
    batches = range(num_batches)
    source = Elements(function, lambda: map(returned.__getitem__, batches), spec, threads, is_batched=True)
    source.pad_to_longest([name or SAMPLES for name, shape in spec.inputs.items() if 0 in shape])
    return source


def _spec_parts(element_spec: Any, spec: PrepareSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specs of inputs and of outputs by name. Raises StructureError."""
    inputs, outputs = name_parts(element_spec, spec)
    for name, part in (inputs | outputs).items():
        if getattr(part, "shape", None) is None or part.shape.rank is None:
            problem = f"returned a tf.data.Dataset without a known rank of {name or 'samples or labels'}"
            raise StructureError(problem, "set it in map(), with tf.ensure_shape or set_shape")
    return inputs, outputs


def _is_batched(inputs: dict[str, Sizes], shapes: list[Sizes], spec: PrepareSpec) -> bool:
    """Return whether elements are batches, by their `shapes` and what the model takes."""
    if any(not shape for shape in shapes):
        return False
    if set(inputs) == set(spec.inputs):
        sizes_of = [(spec.inputs[name], shape) for name, shape in inputs.items()]
        fits = [all(takes(expected, shape[axes:]) for expected, shape in sizes_of) for axes in (0, 1)]
        if fits[0] != fits[1]:
            return fits[1]
    sizes = {shape[0] for shape in shapes}
    return len(sizes) == 1 and (None in sizes or len(shapes) > 1)


def call_function(tree: Tree, spec: PrepareSpec, threads: int) -> SampleSource:
    """Call the user's function, and return its result as a source. Raises WorkerError, exit code 2."""
    function = UserFunction(spec)
    returned = function.call(tree.root)
    with function.checking():
        return _as_source(returned, function, spec, threads)


def _as_source(returned: Any, function: UserFunction, spec: PrepareSpec, threads: int) -> SampleSource:
    """Return what a function returned as a source. Raises StructureError or WorkerError."""
    if "tensorflow" in sys.modules and isinstance(returned, tf.data.Dataset):
        return open_dataset(returned, function, spec, threads)
    if "keras" in sys.modules and isinstance(returned, keras.utils.PyDataset):
        return open_py_dataset(returned, function, spec, threads)
    if isinstance(returned, list) and len(returned) in (2, 3):  # as validation_data=[x, y] of fit
        lengths = {tuple(getattr(one, "shape", ()))[:1] for one in returned}
        if len(lengths) == 1 and lengths != {()}:
            returned = tuple(returned)
    if isinstance(returned, tuple | Mapping) or hasattr(returned, "shape"):
        return _open_arrays(returned, spec)
    try:
        iterator = iter(returned)
    except TypeError:
        raise StructureError(f"returned a {type(returned).__name__}") from None
    code = getattr(iterator, "gi_code", None)
    ends = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS"}
    if code and not ends & {one.opname for one in dis.Bytecode(code)}:
        raise StructureError("returned a generator without an end: `while True`, without break", ENDING)
    return Elements(function, lambda: iterator, spec, threads)


def _open_arrays(returned: Any, spec: PrepareSpec) -> ArraySource:
    if isinstance(returned, tuple) and any(hasattr(part, "element_spec") for part in returned):
        raise StructureError("returned several data sets", "return one, and write a function for each")
    inputs, outputs = name_parts(returned, spec)
    arrays = [to_arrays(parts, 1) for parts in (inputs, outputs)]
    lengths = {array.shape[:1] for part in arrays for array in part.values()}
    if len(lengths) > 1 and isinstance(returned, tuple) and all(isinstance(part, tuple) for part in returned):
        problem = "returned arrays of different lengths, as (train, test) of load_data() has"
        raise StructureError(problem, "return one pair, and write a function for each")
    source = ArraySource(arrays[0], arrays[1] or {"": no_labels(next(iter(lengths)))}, spec)
    parts = zip(named_in_messages(inputs, outputs), named_in_messages(*arrays), strict=True)
    source.padded = {
        name: array.shape[1:] for (name, part), (_, array) in parts if hasattr(part, "to_tensor")
    }
    return source
