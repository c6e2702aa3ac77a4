"""Detection of the format of a user's data, and the source that reads each format."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from csdctl.worker.ingest.sources.arrays import empty_data_error, open_idx_pair, open_npy_files, open_npz
from csdctl.worker.ingest.sources.function import call_function
from csdctl.worker.ingest.sources.images import ClassFolders
from csdctl.worker.ingest.sources.source import DataFile, SampleSource, Tree
from csdctl.worker.ingest.sources.structure import takes_grey
from csdctl.worker.ingest.sources.table import TableFiles, is_table
from csdctl.worker.ingest.sources.tfrecord import RecordFiles, is_record_file
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec

SUPPORTED_DATA = (
    "folders named by class that contain PNG, JPEG, BMP or GIF images, TFRecord files, images.npy and "
    "labels.npy, an .npz file with x and y, a pair of IDX files, or .csv files"
)
FORMATS = ("function", "npy", "npz", "idx", "csv", "tfrecord", "class folders")
"""Part of every fingerprint: renaming one prepares all data of that format again."""
_IDX_PATTERNS = ("*images-idx*-ubyte*", "*labels-idx1-ubyte*")


def detect_format(tree: Tree, spec: PrepareSpec) -> str:
    """Return one of FORMATS; raises WorkerError, exit code 2, if the data is empty or not supported."""
    if spec.function:
        return "function"
    if not tree.files and not tree.folders:
        raise empty_data_error(spec.source)
    top = _top_level_files(tree)
    names = {file.name for file in top if file.parts}
    if names & {"images.npy", "labels.npy"}:
        return "npy"
    if len(_npz_files(top, tree)) == 1:
        return "npz"
    if all(len(found) == 1 for found in _idx_files(top)):
        return "idx"
    if top and all(is_table(file, tree) for file in (tree.files if spec.table else top)):
        return "csv"
    record_files = [file for file in tree.files if is_record_file(file, tree)]
    if any(file in record_files for file in top) or (record_files and spec.records):
        return "tfrecord"
    if tree.folders:
        return "class folders"
    raise WorkerError(
        f"data at {spec.source} is not in a supported format",
        remedy=f"expected {SUPPORTED_DATA}",
        exit_code=2,
    )


def fingerprint_settings(source_format: str, tree: Tree, spec: PrepareSpec) -> str:
    """Return, as text, everything besides the files that determines the prepared bytes."""
    settings: dict[str, object] = {"kind": source_format, "classes": spec.classes}
    if source_format in ("tfrecord", "class folders", "function"):
        settings["picture"] = asdict(spec.picture)
    if source_format == "class folders":
        settings["folders"] = tree.folders
    if source_format == "tfrecord":
        settings["records"] = asdict(spec.records) if spec.records else None
    if source_format == "function":
        path, _, name = spec.function.rpartition(":")
        settings["function"] = [hashlib.sha256(Path(path).read_bytes()).hexdigest(), name]
        settings["code"] = Path(spec.code.archive).name if spec.code else ""
    if source_format in ("csv", "function"):
        settings["inputs"], settings["table"] = spec.inputs, asdict(spec.table) if spec.table else None
    settings["outputs"] = spec.outputs
    types = {name: dtype for name, (dtype, _) in spec.labels.items()}
    settings["conform"] = [takes_grey(spec), spec.labels if source_format == "function" else types]
    return json.dumps(settings, sort_keys=True)


def open_source(source_format: str, tree: Tree, spec: PrepareSpec, threads: int) -> SampleSource:
    """Return the source that reads `source_format`; raises WorkerError, exit code 2, if it cannot be used."""
    top = _top_level_files(tree)
    npz, idx = _npz_files(top, tree), _idx_files(top)
    openers: dict[str, Callable[[], SampleSource]] = {
        "function": lambda: call_function(tree, spec, threads),
        "npy": lambda: open_npy_files(tree.root, spec),
        "npz": lambda: open_npz(tree.path_of(npz[0]), spec),
        "idx": lambda: open_idx_pair(tree.path_of(idx[0][0]), tree.path_of(idx[1][0]), spec),
        "csv": lambda: TableFiles(tree, spec),
        "tfrecord": lambda: RecordFiles(tree, spec, threads),
        "class folders": lambda: ClassFolders(tree, spec, threads),
    }
    return openers[source_format]()


def _top_level_files(tree: Tree) -> list[DataFile]:
    return [file for file in tree.files if len(file.parts) < 2]


def _npz_files(top: list[DataFile], tree: Tree) -> list[DataFile]:
    return [file for file in top if tree.path_of(file).suffix == ".npz"]


def _idx_files(top: list[DataFile]) -> list[list[DataFile]]:
    return [[file for file in top if file.parts and fnmatch(file.name, pattern)] for pattern in _IDX_PATTERNS]
