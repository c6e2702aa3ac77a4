"""Existing arrays: .npy pairs, and .npz archives. Their values stay unchanged.

Files are mapped, after decompression into a temporary file: memory use does not grow with the data.
"""

import errno
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from csdctl.worker.data.arrays import Array, is_numeric, map_array, map_file
from csdctl.worker.ingest.sources.source import (
    BLOCK_BYTES,
    Block,
    SampleSource,
    block_at,
    convert_read_errors,
    convert_write_errors,
    data_error,
    empty_data_error,
    to_records,
)
from csdctl.worker.process.files import BoundedFile
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec, list_names

COPIED_BYTES = 1 << 20
"""Bytes that are decompressed at once."""
LABEL_NAMES = ("y", "labels")


class ArraySource(SampleSource):
    """Arrays of inputs and of outputs by name, '' for the only one."""

    def __init__(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, unless they are samples and their labels."""
        super().__init__(spec)
        arrays = [*inputs.values(), *outputs.values()]
        if not all(array.shape for array in arrays):
            raise data_error(spec.source, "is a single number, not an array of samples")
        if any(0 in array.shape for array in inputs.values()):  # labels may have no values: of add_loss()
            raise empty_data_error(spec.source)
        counts = [sorted({len(array) for array in part.values()}) for part in (inputs, outputs)]
        if len(counts[0]) > 1 or counts[0] != counts[1]:
            samples, labels = (" or ".join(map(str, sizes)) for sizes in counts)
            raise data_error(spec.source, f"has {samples} samples but {labels} labels")
        if not all(array.dtype.kind == "b" or is_numeric(array.dtype) for array in arrays):
            types = " and ".join(dict.fromkeys(str(array.dtype) for array in arrays))
            remedy = "turn them into numbers, in a function of your own: data.public.function"
            raise data_error(spec.source, f"is not numeric: {types}", remedy)
        self.inputs, self.outputs = inputs, outputs
        (self.num_samples,) = counts[0]
        self.sample_bytes = sum(array.nbytes for array in inputs.values()) // self.num_samples

    def rows(self, start: int, stop: int) -> Block:
        """Return some of the samples."""
        samples, labels = (
            to_records({name: array[start:stop] for name, array in part.items()}, 1)
            for part in (self.inputs, self.outputs)
        )
        return block_at(start, samples, labels)

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, BLOCK_BYTES // max(1, self.sample_bytes))
        return (self.rows(row, row + num_rows) for row in range(start, self.num_samples, num_rows))


def open_npy_files(root: Path, spec: PrepareSpec) -> ArraySource:
    """Map images.npy and labels.npy in `root`."""
    if not ((root / "images.npy").exists() and (root / "labels.npy").exists()):
        raise data_error(spec.source, "lacks one of images.npy and labels.npy", "add the missing file")
    with convert_read_errors(spec.source):
        samples, labels = map_array(root / "images.npy"), map_array(root / "labels.npy")
    return ArraySource({"": samples}, {"": labels}, spec)


def open_npz(path: Path, spec: PrepareSpec) -> ArraySource:
    """Return x and y, images and labels, or y and arrays by input, of an .npz. With `sample_weight`."""
    with (
        convert_read_errors(spec.source),
        BoundedFile(io.FileIO(path)) as file,
        zipfile.ZipFile(file) as archive,
    ):
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        inputs, outputs = _choose_arrays(names, spec)
        if inputs and outputs:
            unread = {*names} - {SAMPLE_WEIGHT, *inputs.values(), *outputs.values()}
            if any("weight" in name.lower() for name in unread):
                problem = f"has weights in an array whose name is not {SAMPLE_WEIGHT}"
                raise data_error(spec.source, problem, f"rename the array to {SAMPLE_WEIGHT}, or remove it")
            if SAMPLE_WEIGHT in names:
                outputs = {name or LABEL: member for name, member in outputs.items()}
                outputs[SAMPLE_WEIGHT] = SAMPLE_WEIGHT
            samples, labels = (
                {name: read_member(archive, member, spec.store) for name, member in part.items()}
                for part in (inputs, outputs)
            )
            return ArraySource(samples, labels, spec)
    there = "" if spec.is_private else f"; it has {list_names(names, 10) or 'none'}"
    several = "for a model with several inputs: y, and an array for each input under its name"
    remedy = f"name a function that returns them, FILE.py:NAME; {several}"
    raise data_error(spec.source, f"has no arrays x and y (or images and labels){there}", remedy)


def _choose_arrays(names: list[str], spec: PrepareSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return the arrays of inputs and of outputs by name, '' for the only one. {} if they are not there."""
    has_inputs = len(spec.inputs) > 1 and set(spec.inputs) <= set(names)
    has_outputs = bool(spec.outputs) and set(spec.outputs) <= set(names)
    for samples, labels in (("x", "y"), ("images", "labels")):
        if samples in names and labels in names and not has_inputs and not has_outputs:
            return {"": samples}, {"": labels}
    label_names = [name for name in LABEL_NAMES if name in names]
    outputs = {"": label_names[0]} if len(label_names) == 1 else {}
    if has_outputs:
        outputs = {name: name for name in spec.outputs}
    inputs = list(spec.inputs) if has_inputs else sorted({*names} - {SAMPLE_WEIGHT, *outputs.values()})
    return {"" if "" in spec.inputs and len(inputs) == 1 else name: name for name in inputs}, outputs


def read_member(archive: zipfile.ZipFile, name: str, store: str) -> Array:
    """Map an array of an .npz file, copied to a nameless file on the disk of `store`.

    Raises ValueError, OSError or an error of zipfile if it is damaged, WorkerError if the disk is too small.
    """
    num_bytes = archive.getinfo(f"{name}.npy").file_size
    with archive.open(f"{name}.npy") as member, tempfile.TemporaryFile(dir=store) as copy:
        with convert_write_errors():
            # Not reserved: the size may be wrong, and other programs would find the disk full meanwhile.
            if num_bytes > shutil.disk_usage(store).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while piece := member.read(COPIED_BYTES):  # to the end, where the archive checks its CRC
            with convert_write_errors():
                copy.write(piece)
        with convert_write_errors():
            copy.flush()
        return map_file(copy)
