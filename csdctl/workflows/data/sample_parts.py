"""Samples by owner, as they are written to the data paths of a job."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from csdctl.documents import write_atomically

ARRAYS = ("images.npy", "labels.npy")


class SamplePart(Protocol):
    """Samples of one owner."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def names(self) -> Iterable[str]:
        """Return the paths of the files that `save` writes."""

    def save(self, directory: Path) -> None:
        """Write the samples below `directory`, as `prepare` reads them."""


@dataclass(frozen=True)
class SampleArrays:
    """Images (n, …) and their labels (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def names(self) -> Iterable[str]:
        """Return the paths of the files that `save` writes."""
        return ARRAYS

    def save(self, directory: Path) -> None:
        """Write one array of images and one of labels."""
        arrays: tuple[NDArray[np.generic], ...] = (self.images, self.labels.astype(np.int32))
        for name, array in zip(ARRAYS, arrays, strict=True):
            with write_atomically(directory / name) as file:
                np.save(file, array)


@dataclass(frozen=True)
class SampleFiles:
    """Encoded pictures, found at `root`/class/name."""

    root: Path
    files: tuple[str, ...]
    """Their paths: class/name."""

    def __len__(self) -> int:
        return len(self.files)

    def names(self) -> Iterable[str]:
        """Return the paths of the files that `save` writes."""
        return self.files

    def save(self, directory: Path) -> None:
        """Copy the pictures, with a folder for each class."""
        for name in self.files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(directory / name) as file, (self.root / name).open("rb") as source:
                shutil.copyfileobj(source, file)


@dataclass(frozen=True)
class SampleSplit:
    """Samples by owner: `private` has one entry for each node."""

    public: SamplePart
    private: tuple[SamplePart, ...]
    validation: SamplePart
