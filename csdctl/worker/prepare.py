"""`prepare`: turns what people have into a prepared data set, where the data lies.

Sources: a directory with images.npy and labels.npy; an .npz file with x/y or images/labels; a directory
with one pair of IDX files (`*images-idx3-ubyte[.gz]`, `*labels-idx1-ubyte[.gz]`). Private data is
prepared on its own node by this code, and only counts, shapes and a fingerprint go back: messages
name no file below the root.
"""

import gzip
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

from csdctl.worker.contract import DatasetInfo, from_json, to_json
from csdctl.worker.data import Array, as_labels, map_array
from csdctl.worker.events import WorkerError

FORMATS = "a directory with images.npy and labels.npy, an .npz file with x and y, or a pair of IDX files"


def prepare(source: str, store: str) -> DatasetInfo:
    """Prepare `source` below the directory `store`; done before with the same content: nothing happens.

    Raises WorkerError when the source is missing, empty, or of no known format.
    """
    try:
        root = Path(source).expanduser()
    except RuntimeError:
        raise WorkerError(f"there is no home directory for {source}", exit_code=2) from None
    if not root.exists():
        raise WorkerError(f"there is no data at {source}", remedy="mend the path in job.yaml", exit_code=2)
    try:
        fingerprint = _fingerprint(root)
    except OSError as error:
        raise WorkerError(
            f"data at {source} cannot be read: {error.strerror}", remedy="mend its permissions", exit_code=2
        ) from None
    target = Path(store) / fingerprint
    record = target / "dataset.json"
    if record.exists():
        return from_json(DatasetInfo, record.read_text())
    images, labels = _read(root, source)
    _check(images, labels, source)
    in_place = (root / "images.npy").exists() and images.ndim != 3
    if images.ndim == 3:
        images = images[..., np.newaxis]
    info = DatasetInfo(
        path=str(root) if in_place else str(target),
        num_samples=len(images),
        sample_shape=images.shape[1:],
        dtype=str(images.dtype),
        label_shape=labels.shape[1:],
        max_label=int(labels.max()) if labels.dtype.kind in "iu" and labels.min() >= 0 else -1,
        fingerprint=fingerprint,
    )
    _save(target, None if in_place else (images, labels), info)
    return info


def _fingerprint(root: Path) -> str:
    """Changes whenever a file below `root` is added, removed or written to."""
    digest = hashlib.sha256(b"2" + str(root.resolve()).encode())
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    for path in files:
        status = path.stat()
        digest.update(os.fsencode(path.relative_to(root)))
        digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _read(root: Path, source: str) -> tuple[Array, Array]:
    try:
        if root.is_file() and root.suffix == ".npz":
            return _read_npz(root, source)
        if (root / "images.npy").exists() != (root / "labels.npy").exists():
            raise WorkerError(
                f"data at {source} lacks one of images.npy and labels.npy",
                remedy="add the other",
                exit_code=2,
            )
        if (root / "images.npy").exists():
            return map_array(root / "images.npy"), map_array(root / "labels.npy")
        archives = sorted(root.glob("*.npz")) if root.is_dir() else []
        if len(archives) == 1:
            return _read_npz(archives[0], source)
        pairs = [sorted(root.glob(pattern)) for pattern in ("*images-idx*-ubyte*", "*labels-idx1-ubyte*")]
        if all(len(found) == 1 for found in pairs):
            return _read_idx(pairs[0][0]), _read_idx(pairs[1][0])
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise WorkerError(
            f"data at {source} cannot be read: {type(error).__name__}",
            remedy="replace the damaged file",
            exit_code=2,
        ) from None
    raise WorkerError(f"data at {source} is of no known format", remedy=f"expected {FORMATS}", exit_code=2)


def _read_npz(path: Path, source: str) -> tuple[Array, Array]:
    with np.load(path, allow_pickle=False) as archive:
        for images, labels in (("x", "y"), ("images", "labels")):
            if images in archive and labels in archive:
                return archive[images], archive[labels]
    raise WorkerError(f"the .npz at {source} has no arrays x and y (or images and labels)", exit_code=2)


def _read_idx(path: Path) -> Array:
    """An IDX file of bytes: magic 00 00 08 <dimensions>, big-endian sizes, data."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise ValueError("not an IDX file of bytes")
    num_dimensions = content[3]
    shape = np.frombuffer(content, ">u4", num_dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


def _check(images: Array, labels: Array, source: str) -> None:
    if images.ndim == 0 or labels.ndim == 0:
        raise WorkerError(f"data at {source} is one number, not samples", exit_code=2)
    if len(images) == 0:
        raise WorkerError(
            f"data at {source} is empty", remedy="add samples or remove it from job.yaml", exit_code=2
        )
    if len(images) != len(labels):
        raise WorkerError(
            f"data at {source} does not fit together: {len(images)} samples, {len(labels)} labels",
            exit_code=2,
        )
    if images.dtype.kind not in "uif" or labels.dtype.kind not in "uif":
        raise WorkerError(f"data at {source} is not numeric: {images.dtype} and {labels.dtype}", exit_code=2)


def _save(target: Path, arrays: tuple[Array, Array] | None, info: DatasetInfo) -> None:
    """Write aside and rename: a target directory is whole or not there. None: the source serves as it is."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".part-"))
    try:
        if arrays is not None:
            images, labels = arrays
            np.save(aside / "images.npy", images)
            np.save(aside / "labels.npy", as_labels(labels))
        (aside / "dataset.json").write_text(to_json(info))
        os.replace(aside, target)
    except OSError as error:
        raise WorkerError(
            f"prepared data cannot be written: {error.strerror or 'no room for all of it'}",
            remedy="make room on the disk",
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
