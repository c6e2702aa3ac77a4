"""Saves a trained model as a file of Keras without Keras: one that Keras has written, with other weights."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.step import StepInfo
from csdctl.worker.engine.tensorflow_c import BFLOAT16
from csdctl.worker.protocol.durable_files import replacing_by_name

WEIGHTS = "model.weights.h5"
Places = Mapping[str, tuple[str, ...]]
"""By number of a variable, the datasets of an HDF5 file that have it."""


def save_like(template: str, places: Places, values: Sequence[Array], path: Path, comment: str = "") -> Path:
    """Write `path`, or .weights.h5 beside it: `template` with other values and `comment`. Raises OSError."""
    if template.endswith(".h5"):
        path = path.with_suffix(".weights.h5")
    with replacing_by_name(path) as partial:
        if path.suffix == ".keras":
            with zipfile.ZipFile(template) as source, zipfile.ZipFile(partial, "w") as target:
                target.comment = comment.encode()
                for member in source.infolist():
                    content = source.read(member)
                    is_changed = member.filename == WEIGHTS
                    target.writestr(member, _replace(content, places, values) if is_changed else content)
        else:
            partial.write_bytes(_replace(Path(template).read_bytes(), places, values))
    return path


def _replace(content: bytes, places: Places, values: Sequence[Array]) -> bytes:
    import h5py  # type: ignore[import-untyped]

    buffer = io.BytesIO(content)
    with h5py.File(buffer, "r+") as file:
        for number, names in places.items():
            value = values[int(number)]
            for name in names:
                file[name][...] = value["bfloat16"] if value.dtype == BFLOAT16 else value
    return buffer.getvalue()


def places_of_head(head: StepInfo, model: StepInfo, weights: Sequence[int]) -> Places:
    """Return where a file with the whole model has the variables of its head's step. {}: unknown.

    `weights`: the number of each of the head's weights in the whole model. Their optimizers have the same
    variables, for the head has all that is trained. The learning rate comes last.
    """
    num_of_optimizer, num_variables = len(head.variables) - head.num_weights, len(model.variables)
    numbers = [*weights, *range(model.num_weights, num_variables + 1)]
    if not model.places or num_of_optimizer != num_variables - model.num_weights:
        return {}
    pairs = [(str(place), str(number)) for place, number in enumerate(numbers)]
    return {place: model.places[number] for place, number in pairs if number in model.places}


def find_places(content: bytes, marks: Sequence[Array]) -> dict[str, tuple[str, ...]]:
    """Return where an HDF5 file has `marks`, arrays each unlike all others, by their number."""
    import h5py

    numbers = {(mark.shape, mark.tobytes()): str(number) for number, mark in enumerate(marks)}
    places: dict[str, tuple[str, ...]] = {}

    def look(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            array = np.asarray(item)
            if number := numbers.get((array.shape, array.tobytes())):
                places[number] = (*places.get(number, ()), name)

    with h5py.File(io.BytesIO(content)) as file:
        file.visititems(look)
    return places
