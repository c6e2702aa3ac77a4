"""The user's own function, `FILE.py:NAME`: called with the data's path, it gives all samples."""

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_tensorflow
from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.arrays import ArraySource, InMemory
from csdctl.worker.ingest.sources.pictures import PictureDecoder, known_shape
from csdctl.worker.ingest.sources.source import Block, EncodedSample, SampleSource, decode_blocks
from csdctl.worker.ingest.sources.tree import Tree
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.datasets import PrepareSpec

_END = object()
EXPECTED = "it must return (images, labels) or an iterator of (image, label)"


def call_function(tree: Tree, spec: PrepareSpec, threads: int) -> SampleSource:
    """What the function gave, as a source.

    Raises WorkerError, exit code 2, when it fails or gives something else.
    """
    users = UserCode(spec)
    given = users.call(lambda: users.load_function()(str(tree.root)))
    if isinstance(given, tuple) and len(given) == 2 and all(hasattr(one, "shape") for one in given):
        images, labels = (np.asarray(one) for one in given)
        return ArraySource(InMemory(images), InMemory(labels), spec)
    try:
        iterator = iter(given)
    except TypeError:
        raise users.error(f"gave a {type(given).__name__}") from None
    return IteratedSamples(users, iterator, spec, threads)


class UserCode:
    """Code of the user, whose every way to end becomes a WorkerError that shows no private data."""

    def __init__(self, spec: PrepareSpec) -> None:
        self._path, _, self._name = spec.function.rpartition(":")
        self._is_private = spec.is_private

    def load_function(self) -> Callable[[str], Any]:
        """The function itself; raises what its file raises."""
        specification = importlib.util.spec_from_file_location("csdctl_users_data", Path(self._path))
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        function: Callable[[str], Any] = getattr(module, self._name)
        return function

    def call(self, code: Callable[[], Any]) -> Any:
        """What `code` returns; raises WorkerError for whatever it raises."""
        try:
            return code()
        except BaseException as error:
            # The text may name a private file or show what is in it.
            words = type(error).__name__ if self._is_private else describe(error)
            raise WorkerError(
                f"the function {self._name} fails: {words}", remedy="mend its file", exit_code=2
            ) from None

    def error(self, what: str) -> WorkerError:
        """For something that the function should not have given."""
        return WorkerError(f"the function {self._name} {what}", remedy=EXPECTED, exit_code=2)


class IteratedSamples:
    """Samples one by one; uint8 pictures are fitted, everything else stays as it is."""

    num_samples = 0
    files_of_class: tuple[int, ...] = ()

    def __init__(self, users: UserCode, given: Iterator[Any], spec: PrepareSpec, threads: int) -> None:
        self.class_names = spec.classes
        self.sample_bytes = 0
        self._users = users
        self._given = given
        self._threads = threads
        self._rule = spec.picture
        self._decoder: PictureDecoder | None = None

    def blocks(self, start: int) -> Iterator[Block]:
        """All samples from the one numbered `start` on."""
        candidates: Iterable[EncodedSample] = itertools.islice(self._candidates(), start, None)
        return decode_blocks(candidates, self._decode, threads=self._threads, sample_bytes=self.sample_bytes)

    def _candidates(self) -> Iterator[EncodedSample]:
        form = None
        while (sample := self._users.call(lambda: next(self._given, _END))) is not _END:
            candidate = self._as_candidate(sample)
            image, label = candidate.content, candidate.label
            is_picture = image.dtype == np.uint8 and image.ndim == 3 and known_shape(self._rule)
            if is_picture and self._decoder is None:
                self._decoder = PictureDecoder(self._rule, load_tensorflow())
            now = (None if is_picture else image.shape, image.dtype, label.shape, label.dtype.kind)
            if form is not None and now != form:
                raise self._users.error("gives samples of different shapes or types")
            form = now
            yield candidate

    def _as_candidate(self, sample: Any) -> EncodedSample:
        try:
            image, label = sample
            content, number = np.asarray(image), np.asarray(label)
        except (TypeError, ValueError):
            raise self._users.error("gives something that is no (image, label)") from None
        if content.dtype.kind not in "uif" or number.dtype.kind not in "uif":
            raise self._users.error(f"gives samples of {content.dtype} with labels of {number.dtype}")
        if content.dtype == np.uint8 and content.ndim == 2:
            content = content[..., np.newaxis]
        return EncodedSample(content, number)

    def _decode(self, candidate: EncodedSample) -> tuple[Array, Any]:
        if self._decoder:
            return self._decoder.fit(candidate.content), candidate.label
        return candidate.content, candidate.label
