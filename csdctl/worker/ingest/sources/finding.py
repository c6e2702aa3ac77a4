"""What kind of data lies at a root, and the source for each kind."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from csdctl.worker.ingest.sources.arrays import empty, open_idx_pair, open_npy_files, open_npz
from csdctl.worker.ingest.sources.class_folders import ClassFolders
from csdctl.worker.ingest.sources.function import call_function
from csdctl.worker.ingest.sources.source import SampleSource
from csdctl.worker.ingest.sources.tfrecord import RecordFiles, is_shard
from csdctl.worker.ingest.sources.tree import DataFile, Tree
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec

FORMATS = (
    "folders named by class with PNG, JPEG, BMP or GIF in them, TFRecord files, images.npy and labels.npy, "
    "an .npz file with x and y, or a pair of IDX files"
)
KINDS = ("function", "npy", "npz", "idx", "tfrecord", "class folders")
_IDX_PATTERNS = ("*images-idx*-ubyte*", "*labels-idx1-ubyte*")


def find_kind(tree: Tree, spec: PrepareSpec) -> str:
    """One of KINDS; raises WorkerError, exit code 2, when there is nothing that we know."""
    if spec.function:
        return "function"
    if not tree.files and not tree.folders:
        raise empty(spec.source)
    top = [file for file in tree.files if len(file.parts) < 2]
    names = {file.name for file in top if file.parts}
    if names & {"images.npy", "labels.npy"}:
        return "npy"
    if len(_npz_files(top, tree)) == 1:
        return "npz"
    if all(len(found) == 1 for found in _idx_files(top)):
        return "idx"
    shards = [file for file in tree.files if is_shard(file, tree)]
    if any(file in shards for file in top) or (shards and spec.records):
        return "tfrecord"
    if tree.folders:
        return "class folders"
    raise WorkerError(
        f"data at {spec.source} is of no known format", remedy=f"expected {FORMATS}", exit_code=2
    )


def settings_of(kind: str, tree: Tree, spec: PrepareSpec) -> str:
    """All that decides the prepared bytes besides the files: text for the fingerprint."""
    settings: dict[str, object] = {"kind": kind, "classes": spec.classes}
    if kind in ("tfrecord", "class folders", "function"):
        settings["picture"] = asdict(spec.picture)
    if kind == "class folders":
        settings["folders"] = tree.folders
    if kind == "tfrecord":
        settings["records"] = asdict(spec.records) if spec.records else None
    if kind == "function":
        path, _, name = spec.function.rpartition(":")
        settings["function"] = [hashlib.sha256(Path(path).read_bytes()).hexdigest(), name]
    return json.dumps(settings, sort_keys=True)


def open_source(kind: str, tree: Tree, spec: PrepareSpec, threads: int) -> SampleSource:
    """The source of `kind`; raises WorkerError, exit code 2, when it cannot be read or used."""
    top = [file for file in tree.files if len(file.parts) < 2]
    npz, idx = _npz_files(top, tree), _idx_files(top)
    openers: dict[str, Callable[[], SampleSource]] = {
        "function": lambda: call_function(tree, spec, threads),
        "npy": lambda: open_npy_files(tree.root, spec),
        "npz": lambda: open_npz(tree.path_of(npz[0]), spec),
        "idx": lambda: open_idx_pair(tree.path_of(idx[0][0]), tree.path_of(idx[1][0]), spec),
        "tfrecord": lambda: RecordFiles(tree, spec, threads),
        "class folders": lambda: ClassFolders(tree, spec, threads),
    }
    return openers[kind]()


def _npz_files(top: list[DataFile], tree: Tree) -> list[DataFile]:
    return [file for file in top if tree.path_of(file).suffix == ".npz"]


def _idx_files(top: list[DataFile]) -> list[list[DataFile]]:
    return [[file for file in top if file.parts and fnmatch(file.name, pattern)] for pattern in _IDX_PATTERNS]
