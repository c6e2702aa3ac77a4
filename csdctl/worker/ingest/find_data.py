"""`find-data`: what in a directory could be prepared, by its format. Nothing of a user's runs here."""

import re
from pathlib import Path

from csdctl.worker.ingest.look import is_picture
from csdctl.worker.ingest.sources.detect import detect_format
from csdctl.worker.ingest.sources.tree import Tree, read_tree
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import FoundData, PrepareSpec

MAX_DEPTH = 2
"""Folders below the directory: data/pictures/train."""
_TRAINING = {"train", "training"}
_VALIDATION = {"val", "valid", "validation", "test", "testing"}
_FILES_PER_FOLDER = 5
"""Of a class folder, that are opened to see whether it has pictures."""


def find_data(directory: Path) -> FoundData:
    """Return the data below `directory`; names that begin with a dot are left out."""
    found = sorted(str(path.relative_to(directory)) for path in _find(directory, 0))
    validation = tuple(path for path in found if _words(path) & _VALIDATION)
    return FoundData(tuple(path for path in found if path not in validation), validation)


def _find(directory: Path, depth: int) -> list[Path]:
    found: list[Path] = []
    try:
        entries = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    for path in entries:
        if _is_data(path):
            found.append(path)
        elif path.is_dir() and not path.is_symlink() and depth < MAX_DEPTH:
            found += _find(path, depth + 1)
    return found


def _is_data(path: Path) -> bool:
    if path.is_dir() and path.is_symlink():
        return False
    try:
        tree = read_tree(str(path))
        found = detect_format(tree, PrepareSpec(str(path), ""))
    except WorkerError:
        return False
    return found != "class folders" or _has_classes(tree)


def _has_classes(tree: Tree) -> bool:
    """Return whether every folder has pictures, and the folders are not parts of a data set: train, val."""
    if set(tree.folders) <= _TRAINING | _VALIDATION:
        return False
    return all(
        any(
            is_picture(tree.path_of(file))
            for file in [file for file in tree.files if file.parts[0] == folder][:_FILES_PER_FOLDER]
        )
        for folder in tree.folders
    )


def _words(path: str) -> set[str]:
    return set(re.split(r"[^a-z]+", path.lower()))
