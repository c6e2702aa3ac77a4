"""The user's own function, `FILE.py:NAME`: called with the path of the data, it returns all samples."""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_tensorflow
from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.limits import IngestLimits
from csdctl.worker.ingest.sources.arrays import ArraySource
from csdctl.worker.ingest.sources.images import ImageDecoder, known_shape
from csdctl.worker.ingest.sources.rows import InMemoryRows
from csdctl.worker.ingest.sources.source import Block, EncodedSample, SampleSource, decode_blocks
from csdctl.worker.ingest.sources.tree import Tree
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.datasets import PrepareSpec

_END = object()
EXPECTED = "it must return (images, labels) or an iterator of (image, label)"


def call_function(tree: Tree, spec: PrepareSpec, threads: int) -> SampleSource:
    """Call the user's function and return its result as a source.

    Raises WorkerError, exit code 2, if it fails or returns something else.
    """
    function = UserFunction(spec)
    function.check_content()
    returned = function.guard(lambda: function.load()(str(tree.root)))
    if (
        isinstance(returned, tuple)
        and len(returned) == 2
        and all(hasattr(array, "shape") for array in returned)
    ):
        samples, labels = (np.asarray(array) for array in returned)
        return ArraySource(InMemoryRows(samples), InMemoryRows(labels), spec)
    try:
        iterator = iter(returned)
    except TypeError:
        raise function.error(f"returned a {type(returned).__name__}") from None
    return IteratedSamples(function, iterator, spec, threads)


class UserFunction:
    """The user's function; all its failures become a WorkerError that exposes no private data."""

    def __init__(self, spec: PrepareSpec) -> None:
        path, _, self._name = spec.function.rpartition(":")
        self._path = Path(path)
        self._source = b""
        self._is_private = spec.is_private

    def check_content(self) -> None:
        """Raise WorkerError if the file, whose name in the store begins with its hash, was changed."""
        self._source = self._path.read_bytes()
        stated = re.match(r"[0-9a-f]{64}", self._path.name)
        if stated and stated[0] != hashlib.sha256(self._source).hexdigest():
            raise WorkerError(f"{self._path} has been changed since csdctl sent it", remedy="deploy again")

    def load(self) -> Callable[[str], Any]:
        """Import the function; raises whatever its file raises."""
        module = ModuleType("csdctl_users_data")
        module.__file__ = str(self._path)
        exec(compile(self._source, self._path, "exec"), module.__dict__)  # no __pycache__ is read or written
        function: Callable[[str], Any] = getattr(module, self._name)
        return function

    def guard(self, code: Callable[[], Any]) -> Any:
        """Return what `code` returns; raises WorkerError for whatever it raises."""
        try:
            return code()
        except BaseException as error:
            # The message may name a private file or contain private data.
            reason = type(error).__name__ if self._is_private else describe(error)
            raise WorkerError(
                f"the function {self._name} fails: {reason}", remedy="fix its file", exit_code=2
            ) from None

    def error(self, problem: str) -> WorkerError:
        """Return the error for a result that is not samples."""
        return WorkerError(f"the function {self._name} {problem}", remedy=EXPECTED, exit_code=2)


class IteratedSamples:
    """Samples from an iterator; uint8 images are converted to the job's shape, others stay unchanged."""

    num_samples = 0
    files_of_class: tuple[int, ...] = ()

    def __init__(
        self, function: UserFunction, iterator: Iterator[Any], spec: PrepareSpec, threads: int
    ) -> None:
        self.class_names = spec.classes
        self.sample_bytes = 0
        self._function = function
        self._iterator = iterator
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
        while (returned := self._function.guard(lambda: next(self._iterator, _END))) is not _END:
            candidate = self._as_candidate(returned)
            sample, label = candidate.content, candidate.label
            is_image = sample.dtype == np.uint8 and sample.ndim == 3 and known_shape(self._rule)
            if is_image and self._decoder is None:
                self._decoder = ImageDecoder(self._rule, load_tensorflow())
            found = (None if is_image else sample.shape, sample.dtype, label.shape, label.dtype.kind)
            if expected is not None and found != expected:
                raise self._function.error("yields samples of different shapes or types")
            expected = found
            yield candidate

    def _as_candidate(self, returned: Any) -> EncodedSample:
        try:
            first, second = returned
            sample, label = np.asarray(first), np.asarray(second)
        except (TypeError, ValueError):
            raise self._function.error("yields something that is not (image, label)") from None
        if sample.dtype.kind not in "uif" or label.dtype.kind not in "uif":
            raise self._function.error(f"yields samples of {sample.dtype} with labels of {label.dtype}")
        if sample.dtype == np.uint8 and sample.ndim == 2:
            sample = sample[..., np.newaxis]
        return EncodedSample(sample, label)

    def _decode(self, candidate: EncodedSample) -> tuple[Array, Any]:
        if self._decoder:
            return self._decoder.fit(candidate.content), candidate.label
        return candidate.content, candidate.label
