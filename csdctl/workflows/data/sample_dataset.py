"""Fashion-MNIST as sample data: 60,000 + 10,000 real images, found on this machine or downloaded.

`fetch_fashion_mnist` tries several sources, local sources first, and copies the files to the cache. Debian's
package is unpacked into a temporary directory: that needs no root and installs nothing. This module never
imports TensorFlow; the download of Keras runs in a separate process.
"""

import gzip
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from csdctl.documents import save_bytes
from csdctl.errors import CsdctlError, InputError
from csdctl.notify import Say
from csdctl.workflows.data.sample_parts import SampleArrays, SampleSplit
from csdctl.workflows.data.sample_sources import DatasetOrigin, DebianPackage, load_first, run_program

PACKAGE = DebianPackage(
    "Fashion-MNIST", "dataset-fashion-mnist", Path("/usr/share/datasets/fashion-mnist"), num_megabytes=31
)
KERAS_DEADLINE_S = 600.0

_FILES = {
    "train-images-idx3-ubyte.gz": (60_000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60_000,),
    "t10k-images-idx3-ubyte.gz": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10_000,),
}


@dataclass(frozen=True)
class FashionMnist:
    """Images uint8, shape (n, 28, 28, 1); labels int64 from 0 to 9, shape (n,)."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


def fetch_fashion_mnist(
    cache: Path, *, say: Say, sources: Sequence[DatasetOrigin] | None = None
) -> FashionMnist:
    """Return Fashion-MNIST from `cache` or the first complete source, and copy it to `cache`.

    `say` gets messages about slow steps and failures. Raises CsdctlError, listing all sources.
    """
    cached = DatasetOrigin("the cache", lambda _scratch, _say: _existing(cache))

    def load(source: DatasetOrigin, directory: Path) -> FashionMnist:
        dataset = load_fashion_mnist(directory)
        if source is not cached:
            _copy_to_cache(directory, cache, say)
        return dataset

    return load_first(
        "Fashion-MNIST",
        (cached, *(default_sources() if sources is None else sources)),
        load,
        say,
        remedy=f"install Debian's package {PACKAGE.name}, or copy {', '.join(_FILES)} to {cache}",
    )


def default_sources() -> list[DatasetOrigin]:
    """Return the sources of Fashion-MNIST besides the cache, local sources first."""
    return [
        DatasetOrigin(f"Debian's {PACKAGE.name}", lambda _scratch, _say: _existing(PACKAGE.directory)),
        DatasetOrigin("Keras' cache", lambda _scratch, _say: _existing(_keras_directory())),
        DatasetOrigin("apt-get download", download_with_apt),
        DatasetOrigin("Keras' download", _download_with_keras),
    ]


def load_fashion_mnist(directory: Path) -> FashionMnist:
    """Read the four files in `directory`; raises InputError when one is damaged or has another format."""
    images, labels, test_images, test_labels = (
        read_idx(directory / name, shape) for name, shape in _FILES.items()
    )
    return FashionMnist(
        images[..., np.newaxis],
        labels.astype(np.int64),
        test_images[..., np.newaxis],
        test_labels.astype(np.int64),
    )


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the bytes of a gzipped IDX file of `shape`; raises InputError.

    IDX: magic 00 00 08 <number of dimensions>, the sizes as big-endian 32-bit numbers, the bytes.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    header = bytes([0, 0, 8, len(shape)])
    if content[:4] != header:
        raise InputError(
            f"{path} is not an IDX file of bytes: starts {content[:4].hex()}, expected {header.hex()}"
        )
    start = 4 + 4 * len(shape)
    found = tuple(int.from_bytes(content[at : at + 4]) for at in range(4, start, 4))
    if found != shape:
        raise InputError(f"{path} has shape {found}, expected {shape}")
    size = int(np.prod(shape))
    if len(content) - start != size:
        raise InputError(f"{path} has {len(content) - start} bytes of data, expected {size}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def download_with_apt(scratch: Path, say: Say) -> Path:
    """Download Debian's package and unpack it below `scratch`; raises CsdctlError."""
    return _existing(PACKAGE.download(scratch, say))


def split_sample(
    dataset: FashionMnist, *, num_nodes: int, private_fraction: float = 1 / 7, seed: int
) -> SampleSplit:
    """Shuffle the training samples and split them into public samples and equal private parts for the nodes.

    A private fraction of 1/7 is that of the paper: 12,000 of 84,000 images. The test samples are the
    validation data. Raises InputError.
    """
    if num_nodes < 1:
        raise InputError(f"received {num_nodes} nodes, expected at least 1")
    if not 0 <= private_fraction < 1:
        raise InputError(f"received a private fraction of {private_fraction}, expected 0 up to below 1")
    order = np.random.default_rng(seed).permutation(len(dataset.train_labels))
    num_private = round(private_fraction * len(order))

    def samples(rows: NDArray[np.int64]) -> SampleArrays:
        return SampleArrays(dataset.train_images[rows], dataset.train_labels[rows])

    return SampleSplit(
        public=samples(order[num_private:]),
        private=tuple(samples(rows) for rows in np.array_split(order[:num_private], num_nodes)),
        validation=SampleArrays(dataset.test_images, dataset.test_labels),
    )


def _existing(directory: Path) -> Path:
    missing = [name for name in _FILES if not (directory / name).is_file()]
    if missing:
        raise CsdctlError(f"{directory} does not contain {missing[0] if directory.is_dir() else 'any files'}")
    return directory


def _copy_to_cache(directory: Path, cache: Path, say: Say) -> None:
    try:
        for name in _FILES:
            save_bytes(cache / name, (directory / name).read_bytes())
    except OSError as error:
        say(f"the files could not be cached: {error}")


def _keras_directory() -> Path:
    home = os.environ.get("KERAS_HOME")
    return (Path(home) if home else Path.home() / ".keras") / "datasets" / "fashion-mnist"


def _download_with_keras(scratch: Path, say: Say) -> Path:
    say("downloading Fashion-MNIST with Keras")
    code = "import keras; keras.datasets.fashion_mnist.load_data()"
    run_program([sys.executable, "-c", code], scratch, KERAS_DEADLINE_S)
    return _existing(_keras_directory())
