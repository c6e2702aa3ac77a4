"""A tree with a folder for each class; files may be at any depth below it."""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from csdctl.worker.compute.backend import load_tensorflow
from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.limits import IngestLimits
from csdctl.worker.ingest.sources.images import ImageDecoder
from csdctl.worker.ingest.sources.source import Block, EncodedSample, UnusableError, decode_blocks
from csdctl.worker.ingest.sources.tree import DataFile, Tree
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec

BYTES_PER_PIXEL = 8
"""Upper limit of the file size of an image, per pixel: 16 bits in four channels."""

_SPARE_BYTES = 1 << 20
_MAX_NAMED_CLASSES = 5


class ClassFolders:
    """Images in class folders, class by class and sorted by path."""

    def __init__(self, tree: Tree, spec: PrepareSpec, threads: int) -> None:
        """Raise WorkerError, exit code 2, for a folder that is not one of the job's classes."""
        if spec.classes is None and not spec.names_classes:
            raise WorkerError(
                f"data at {spec.source} consists of class folders, but the job does not list its classes",
                remedy="list them as data.classes in job.yaml, or use public data of class folders",
                exit_code=2,
            )
        self.class_names: tuple[str, ...] | None = spec.classes or tuple(
            sorted(_normalize(name) for name in tree.folders)
        )
        self._label_of = {_normalize(name): label for label, name in enumerate(self.class_names)}
        _check_folders(tree.folders, self._label_of, spec.source)
        self._tree = tree
        self._threads = threads
        self.padded: dict[str, tuple[int, ...]] = {}
        self._rule = spec.picture
        self._files = sorted(tree.files, key=self._label)  # stable: sorted by path within a class
        counts = [0] * len(self.class_names)
        for file in self._files:
            if len(file.parts) > 1:
                counts[self._label(file)] += 1
        self.files_of_class = tuple(counts)
        self.num_samples = len(self._files)
        self._decoder = ImageDecoder(spec.picture, load_tensorflow())
        self.sample_bytes = self._decoder.sample_bytes

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all images from index `start` on."""
        candidates = (EncodedSample(file, self._label(file)) for file in self._files[start:])
        return decode_blocks(
            candidates, self._decode, limits, threads=self._threads, sample_bytes=self.sample_bytes
        )

    def _label(self, file: DataFile) -> int:
        """Return the index of the file's class; files beside the class folders come last."""
        return self._label_of[_normalize(file.parts[0])] if len(file.parts) > 1 else len(self._label_of)

    def _decode(self, candidate: EncodedSample) -> tuple[Array, Any]:
        file: DataFile = candidate.content
        if len(file.parts) == 1:
            raise UnusableError("no_class")
        if file.size > BYTES_PER_PIXEL * self._rule.max_pixels + _SPARE_BYTES:
            raise UnusableError("too_large")
        try:
            content = self._tree.path_of(file).read_bytes()
        except OSError:
            raise UnusableError("unreadable") from None
        return self._decoder.decode(content), candidate.label


def printable_name(name: str) -> str:
    """Return a folder's name with unprintable characters escaped."""
    return name if name.isprintable() else ascii(name)


def _normalize(folder: str) -> str:
    """Return the NFC form of a name: some file systems store letters and accents separately."""
    return unicodedata.normalize("NFC", folder)


def _check_folders(folders: Sequence[str], label_of: dict[str, int], source: str) -> None:
    unprintable = [name for name in folders if not name.isprintable()]
    if unprintable:
        raise WorkerError(
            f"data at {source} has a class folder with an unprintable name, {printable_name(unprintable[0])}",
            remedy="rename the folder",
            exit_code=2,
        )
    unknown = [name for name in folders if _normalize(name) not in label_of]
    if unknown:
        num_more = len(unknown) - _MAX_NAMED_CLASSES
        named = ", ".join(unknown[:_MAX_NAMED_CLASSES]) + (f" and {num_more} more" if num_more > 0 else "")
        raise WorkerError(
            f"data at {source} has {'classes' if len(unknown) > 1 else 'class'} {named}, "
            f"not among the job's {len(label_of)} classes",
            remedy="add it to data.classes in job.yaml, or rename the folder",
            exit_code=2,
        )
