"""What the tests of `prepare` and `extract` share: data, models, stores, interruptions, refusals."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.model import save_weights, with_settings
from csdctl.worker.data.arrays import map_array
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime
from tests.unit.worker.compute.built_models import keras

SECRET = "patient-4711"
NUM_SAMPLES = 70


class InterruptionError(Exception):
    """Stands for a killed worker."""


def stop_at(num_done: int) -> Callable[[PrepareProgress], None]:
    """Return what interrupts a command as soon as it has done so much."""

    def note(progress: PrepareProgress) -> None:
        if progress.num_done >= num_done:
            raise InterruptionError

    return note


def spec_below(directory: Path, **settings: Any) -> PrepareSpec:
    """Return a request for data that is to be put below `directory`."""
    (directory / "data").mkdir()
    return PrepareSpec(str(directory / "data"), str(directory / "store"), **settings)


def arrays_of(info: DatasetInfo) -> tuple[Any, Any]:
    return map_array(f"{info.path}/images.npy"), map_array(f"{info.path}/labels.npy")


def refusal(spec: PrepareSpec, message: str, **options: Any) -> str:
    """Return the remedy of what `prepare` says instead of preparing, which names no file."""
    with pytest.raises(WorkerError, match=message) as raised:
        prepare(spec, **options)
    said = f"{raised.value.message} {raised.value.remedy}"
    assert raised.value.exit_code == 2
    assert SECRET not in said
    assert "\n" not in said
    assert not list(Path(spec.store).glob("**/*"))
    return raised.value.remedy


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def swap(path: Path) -> None:
    """Change the content of a file, with its size and time as before."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def slice_of(directory: Path | str, **settings: Any) -> DatasetSlice:
    """Return the samples and labels in a directory, as they are now; a file may be missing."""
    paths = [Path(directory, f"{name}.npy") for name in ("images", "labels")]
    hashes = [sha256(path) if path.exists() else "" for path in paths]
    return DatasetSlice(*map(str, paths), images_sha256=hashes[0], labels_sha256=hashes[1], **settings)


def store(path: Path) -> str:
    """Rename a file as the store does: by its content."""
    return str(path.rename(path.with_name(f"{sha256(path)}{path.suffix}")))


def store_prefix(directory: Path, model: Any, weights: list[Any] | None = None) -> Prefix:
    """Write a model as nodes receive it."""
    (directory / "model.json").write_text(with_settings(model.to_json()))
    save_weights(directory / "model.npz", model.get_weights() if weights is None else weights)
    return Prefix(*(store(directory / f"model.{suffix}") for suffix in ("json", "npz")), None)


def extract_spec(directory: Path, *layers: Any, weights: list[Any] | None = None) -> ExtractSpec:
    """Return samples (70, 6), a model of these layers (one of ones), and an empty store below `directory`."""
    directory.mkdir(exist_ok=True)
    np.save(directory / "images.npy", np.random.default_rng(0).normal(size=(NUM_SAMPLES, 6)).astype("f4"))
    np.save(directory / "labels.npy", np.arange(NUM_SAMPLES, dtype=np.int32))
    model = keras().Sequential([keras().Input((6,)), *(layers or [keras().layers.Dense(5, name="dense")])])
    if weights is None:
        weights = model.get_weights() if layers else [np.ones((6, 5), np.float32), np.zeros(5, np.float32)]
    prefix = store_prefix(directory, model, weights)
    return ExtractSpec(slice_of(directory), str(directory / "store"), prefix, Runtime())


def stored(info: DatasetInfo) -> Any:
    """Return the rows that were computed."""
    return np.load(Path(info.path, "images.npy"))
