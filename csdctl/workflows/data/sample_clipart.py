"""Pictures of Debian's openclipart-png as sample data: six classes, 300 pictures of each (public domain)."""

import itertools
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from csdctl.errors import CsdctlError
from csdctl.notify import Say
from csdctl.workflows.data.sample_parts import SampleFiles, SampleSplit
from csdctl.workflows.data.sample_sources import DatasetOrigin, DebianPackage, load_first

PACKAGE = DebianPackage(
    "openclipart", "openclipart-png", Path("/usr/share/openclipart/png"), num_megabytes=131
)
CLASSES = ("animals", "computer", "food", "shapes", "signs_and_symbols", "transportation")
PICTURES_PER_CLASS = 300
MAX_PIXELS = 1_500_000
"""Larger pictures would take most of the time of `prepare`."""
VALIDATION_FRACTION = 1 / 4
_HEADER_BYTES = 24


def fetch_clipart(cache: Path, *, say: Say, sources: Sequence[DatasetOrigin] | None = None) -> SampleFiles:
    """Return the chosen pictures, found in `cache` or copied there from the first complete source.

    `say` gets messages about slow steps. Raises CsdctlError, listing all sources.
    """
    folders = ", ".join(CLASSES)
    cached = DatasetOrigin("the cache", lambda _scratch, _say: cache)

    def load(source: DatasetOrigin, directory: Path) -> SampleFiles:
        chosen = SampleFiles(directory, choose_pictures(directory))
        if source is not cached:
            try:
                chosen.save(cache)
            except OSError as error:
                shutil.rmtree(cache, ignore_errors=True)
                raise CsdctlError(f"the pictures cannot be copied to {cache}: {error.strerror}") from None
        return SampleFiles(cache, chosen.files)

    return load_first(
        "openclipart",
        (cached, *(_default_sources() if sources is None else sources)),
        load,
        say,
        remedy=f"install Debian's package {PACKAGE.name}, or copy its folders {folders} to {cache}",
    )


def _default_sources() -> list[DatasetOrigin]:
    return [
        DatasetOrigin(f"Debian's {PACKAGE.name}", lambda _scratch, _say: PACKAGE.directory),
        DatasetOrigin("apt-get download", PACKAGE.download),
    ]


def choose_pictures(directory: Path) -> tuple[str, ...]:
    """Return the paths, class/name, of the pictures below `directory` that the sample has; the same always.

    Raises CsdctlError if a class has too few.
    """
    chosen: list[str] = []
    for name in CLASSES:
        found = [
            path for path in sorted((directory / name).rglob("*.png")) if _num_pixels(path) <= MAX_PIXELS
        ]
        if len(found) < PICTURES_PER_CLASS:
            raise CsdctlError(
                f"{directory / name} has {len(found)} pictures, expected {PICTURES_PER_CLASS} or more"
            )
        order = np.random.default_rng(0).permutation(len(found))
        chosen += sorted(str(found[place].relative_to(directory)) for place in order[:PICTURES_PER_CLASS])
    return tuple(chosen)


def _num_pixels(path: Path) -> float:
    """Return the pixels of a PNG by its header, infinity for anything else."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or header[12:16] != b"IHDR":
        return np.inf
    width, height = struct.unpack(">II", header[16:24])
    return float(width * height)


def split_clipart(
    pictures: SampleFiles, *, num_nodes: int, private_fraction: float, seed: int
) -> SampleSplit:
    """Shuffle the pictures; a quarter is for validation, `private_fraction` of the rest for the nodes."""
    files = [pictures.files[place] for place in np.random.default_rng(seed).permutation(len(pictures))]
    num_validation = round(VALIDATION_FRACTION * len(files))
    num_private = round(private_fraction * (len(files) - num_validation))
    stop = num_validation + num_private
    bounds = np.linspace(num_validation, stop, num_nodes + 1).round().astype(int)

    def part(start: int, end: int) -> SampleFiles:
        return SampleFiles(pictures.root, tuple(sorted(files[start:end])))

    return SampleSplit(
        public=part(stop, len(files)),
        private=tuple(part(start, end) for start, end in itertools.pairwise(bounds)),
        validation=part(0, num_validation),
    )
