"""Saves a trained model as a file of Keras without Keras: one that Keras has written, with other weights."""

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.tensorflow_c import BFLOAT16
from csdctl.worker.process.files import sync_directory

WEIGHTS = "model.weights.h5"
"""The member of a .keras file with all variables."""


@dataclass(frozen=True)
class KerasFile:
    """A file of Keras, .keras or .weights.h5, and where it has the variables of a state."""

    path: str
    places: dict[str, tuple[str, ...]]
    """By number of the variable, its datasets in the HDF5 file."""


def save_like(template: KerasFile, values: Mapping[int, Array], path: Path) -> None:
    """Write the file `path` as `template`, with other values of variables; raises OSError.

    It has its name only once it is on the disk.
    """
    aside = path.with_name(f"part-{path.name}")
    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(template.path) as source, zipfile.ZipFile(aside, "w") as target:
                for member in source.infolist():
                    content = source.read(member)
                    target.writestr(
                        member, _replace(content, template, values) if member.filename == WEIGHTS else content
                    )
        else:
            aside.write_bytes(_replace(Path(template.path).read_bytes(), template, values))
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    os.replace(aside, path)
    sync_directory(path.parent)


def _replace(content: bytes, template: KerasFile, values: Mapping[int, Array]) -> bytes:
    """Return an HDF5 file with other values."""
    import h5py

    buffer = io.BytesIO(content)
    with h5py.File(buffer, "r+") as file:
        for number, names in template.places.items():
            value = values[int(number)]
            for name in names:
                file[name][...] = value["bfloat16"] if value.dtype == BFLOAT16 else value
    return buffer.getvalue()


def find_places(content: bytes, marks: Sequence[Array]) -> dict[str, tuple[str, ...]] | None:
    """Return where an HDF5 file has arrays with the values `marks`, by their number; None if one is missing.

    `marks`: random values, each unlike all others.
    """
    import h5py

    numbers = {_key(mark): str(number) for number, mark in enumerate(marks)}
    places: dict[str, tuple[str, ...]] = {}

    def look(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and (number := numbers.get(_key(np.asarray(item)))):
            places[number] = (*places.get(number, ()), name)

    with h5py.File(io.BytesIO(content)) as file:
        file.visititems(look)
    return places if len(places) == len(marks) else None


def _key(array: Array) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()
