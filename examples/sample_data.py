"""Sample data for the jobs beside this file: Fashion-MNIST, or pictures of six classes from openclipart.

    python sample_data.py fashion-mnist          in a directory with fleet.yaml

writes public and validation data below data/, and a private part to ~/private of each node, with
`csdctl deploy`. The files come from this machine, from Debian's packages, or, for Fashion-MNIST, from
keras.datasets. Packages are downloaded and unpacked, not installed. A copy is kept in .csdctl/samples.
"""

import argparse
import gzip
import itertools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import csdctl

PRIVATE_FRACTION = 1 / 7
"""Of the samples that are trained on, as in the paper: 12,000 of 84,000 images."""
FASHION_FILES = {
    "train-images-idx3-ubyte.gz": (60_000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60_000,),
    "t10k-images-idx3-ubyte.gz": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10_000,),
}
CLIPART_CLASSES = ("animals", "computer", "food", "shapes", "signs_and_symbols", "transportation")
PICTURES_PER_CLASS = 300
MAX_PIXELS = 1_500_000
"""Larger pictures would take most of the time of `prepare`."""


class SampleError(Exception):
    """The sample cannot be fetched or written."""


@dataclass(frozen=True)
class FashionMnist:
    """Images uint8, shape (n, 28, 28, 1); labels int64 from 0 to 9, shape (n,)."""

    train_images: Any
    train_labels: Any
    test_images: Any
    test_labels: Any


def fetch(
    cache: Path, package: str, installed: Path, names: Sequence[str], others: Sequence[Path] = ()
) -> Path:
    """Return a directory with `names`: `cache`, one of `others`, or Debian's `package`.

    Raises SampleError when the package cannot be downloaded.
    """
    for directory in (cache, *others, installed):
        if all((directory / name).exists() for name in names):
            return directory
    remedy = f"→ install {package}, or copy {', '.join(names)} to {cache}"
    if not shutil.which("apt-get"):
        raise SampleError(f"{package} was not found, and there is no apt-get to download it\n{remedy}")
    print(f"downloading {package} with apt-get; nothing is installed", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        download = f"apt-get download --quiet {package}"
        script = (
            f"{{ {download} || {{ apt-get update --quiet && {download}; }} }} && dpkg -x {package}_*.deb ."
        )
        output = _run(["sh", "-c", script], scratch)
        source = Path(scratch) / installed.relative_to("/")
        if not all((source / name).exists() for name in names):
            raise SampleError(f"{package} was not found and could not be downloaded: {output}\n{remedy}")
        for name in names:
            cache.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, cache / name)
    return cache


def _run(command: Sequence[str], directory: str) -> str:
    """Run a command, whatever it returns; return the end of what it printed."""
    done = subprocess.run(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout.strip()[-500:]


def fetch_fashion_mnist(cache: Path) -> FashionMnist:
    """Return the 70,000 images, from `cache` if they are there; raises SampleError."""
    keras = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras", "datasets", "fashion-mnist")
    package, installed = "dataset-fashion-mnist", Path("/usr/share/datasets/fashion-mnist")
    try:
        directory = fetch(cache, package, installed, list(FASHION_FILES), [keras])
    except SampleError as error:
        print("downloading Fashion-MNIST with keras.datasets", flush=True)
        load = "import keras; keras.datasets.fashion_mnist.load_data()"
        output = _run([sys.executable, "-c", load], ".")
        directory = keras
        if not all((keras / name).exists() for name in FASHION_FILES):
            cause = (output.splitlines() or ["no message"])[-1]
            raise SampleError(f"keras.datasets has not downloaded Fashion-MNIST: {cause}\n{error}") from None
    images, labels, test_images, test_labels = (
        read_idx(directory / name, shape) for name, shape in FASHION_FILES.items()
    )
    return FashionMnist(
        images[..., None], labels.astype(np.int64), test_images[..., None], test_labels.astype(np.int64)
    )


def read_idx(path: Path, shape: tuple[int, ...]) -> Any:
    """Return the bytes of a gzipped IDX file as an array; raises SampleError unless it has `shape`.

    IDX: magic 00 00 08 <number of dimensions>, the sizes as big-endian 32-bit numbers, the bytes.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, ValueError) as error:
        raise SampleError(f"{path} cannot be read: {error}\n→ remove it") from None
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if not content.startswith(header) or len(content) != len(header) + int(np.prod(shape)):
        raise SampleError(f"{path} does not have {shape} bytes in IDX format\n→ remove it")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def write_fashion_mnist(cache: Path, parts: Sequence[Path], seed: int) -> list[int]:
    """Write validation, public and private parts; return the number of samples in each."""
    dataset = fetch_fashion_mnist(cache)
    order = np.random.default_rng(seed).permutation(len(dataset.train_labels))
    num_private = round(PRIVATE_FRACTION * len(order)) if len(parts) > 2 else 0
    rows = [order[num_private:], *np.array_split(order[:num_private], max(1, len(parts) - 2))]
    arrays = [(dataset.test_images, dataset.test_labels)]
    arrays += [(dataset.train_images[part], dataset.train_labels[part]) for part in rows]
    for part, (images, labels) in zip(parts, arrays, strict=False):
        part.mkdir(parents=True, exist_ok=True)
        np.save(part / "images.npy", images)
        np.save(part / "labels.npy", labels.astype(np.int32))
    return [len(labels) for _, labels in arrays[: len(parts)]]


def choose_pictures(directory: Path) -> list[Path]:
    """Return PICTURES_PER_CLASS pictures of each class, always the same; raises SampleError for too few."""
    chosen: list[Path] = []
    for name in CLIPART_CLASSES:
        found = [path for path in sorted((directory / name).rglob("*.png")) if _is_small(path)]
        if len(found) < PICTURES_PER_CLASS:
            raise SampleError(f"{directory / name} has {len(found)} pictures, expected {PICTURES_PER_CLASS}")
        order = np.random.default_rng(0).permutation(len(found))
        chosen += sorted(found[place] for place in order[:PICTURES_PER_CLASS])
    return chosen


def _is_small(path: Path) -> bool:
    header = path.read_bytes()[:24]
    is_png = len(header) == 24 and header[12:16] == b"IHDR"
    return is_png and int(np.prod(struct.unpack(">II", header[16:]), dtype=float)) <= MAX_PIXELS


def write_clipart(cache: Path, parts: Sequence[Path], seed: int) -> list[int]:
    """Write validation, public and private parts as class folders; return the number of pictures in each."""
    directory = fetch(cache, "openclipart-png", Path("/usr/share/openclipart/png"), CLIPART_CLASSES)
    pictures = choose_pictures(directory)
    files = [pictures[place] for place in np.random.default_rng(seed).permutation(len(pictures))]
    num_validation = len(files) // 4
    num_private = round(PRIVATE_FRACTION * (len(files) - num_validation)) if len(parts) > 2 else 0
    stop = num_validation + num_private
    bounds = np.linspace(num_validation, stop, max(2, len(parts) - 1)).round().astype(int)
    slices = [(0, num_validation), (stop, len(files)), *itertools.pairwise(bounds)][: len(parts)]
    for part, (start, end) in zip(parts, slices, strict=True):
        for file in files[start:end]:
            target = part / file.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return [int(end - start) for start, end in slices]


WRITERS: dict[str, Callable[[Path, Sequence[Path], int], list[int]]] = {
    "fashion-mnist": write_fashion_mnist,
    "openclipart": write_clipart,
}


def place(name: str, fleet_file: str, data: Path, private: str, seed: int) -> None:
    """Write sample `name` below `data` and to `private`, if given, on the nodes.

    Raises SampleError where there is other data.
    """
    nodes = [node.name for node in csdctl.load_fleet(fleet_file).nodes] if private else []
    record = data / ".sample"
    described = f"{name}, seed {seed}, {', '.join(nodes)}\n"
    if record.is_file() and record.read_text() == described:
        print(f"{data} has this sample already")
        return
    if data.exists() and any(data.iterdir()):
        raise SampleError(f"{data} contains other data\n→ remove it, or use another directory with --data")
    with tempfile.TemporaryDirectory() as scratch:
        parts = [Path(scratch) / node for node in nodes]
        cache = Path(".csdctl", "samples", name).absolute()
        sizes = WRITERS[name](cache, [data / "validation", data / "public", *parts], seed)
        deploy = [sys.executable, "-m", "csdctl", "deploy", "--fleet", fleet_file]
        copies = [
            subprocess.Popen(
                [*deploy, "--limit", node, "--tree", f"{part}:{private}"], stdout=subprocess.DEVNULL
            )
            for node, part in zip(nodes, parts, strict=True)
        ]
        if failed := [node for node, copy in zip(nodes, copies, strict=True) if copy.wait()]:
            raise SampleError(f"the private part was not copied to {', '.join(failed)}")
    record.write_text(described)
    print(f"{name}: {sizes[1]:,} public samples, {sum(sizes[2:]):,} private samples on {len(nodes)} nodes")


def main() -> None:
    """Place the sample that the command line names."""
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=list(WRITERS))
    parser.add_argument("--fleet", default="fleet.yaml", help="the fleet file")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where public and validation data go")
    parser.add_argument(
        "--private", default="private", help="the path on the nodes, below the home directory; '' for none"
    )
    parser.add_argument("--seed", type=int, default=7, help="of the division")
    chosen = parser.parse_args()
    try:
        place(chosen.name, chosen.fleet, chosen.data, chosen.private, chosen.seed)
    except (SampleError, csdctl.CsdctlError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
