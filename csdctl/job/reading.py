"""How a job's data is read: images, classes, TFRecord features, tables, user functions, path checks."""

import ast
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from csdctl.documents import Document
from csdctl.errors import InputError
from csdctl.worker.protocol.datasets import ImageRule, RecordSchema, TableSchema

MAX_PIXELS = 1 << 27
"""TensorFlow's limit for a PNG with four channels."""

Size = Annotated[int, Field(ge=1, le=1 << 16)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f/]+$")]


class ImageEntry(Document):
    """How images are converted."""

    shape: tuple[Size, Size, Literal[1, 3]] | None = None
    fit: Literal["stretch", "crop", "pad"] = "stretch"
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] = ImageRule.max_pixels


class RecordEntry(Document):
    """The features of TFRecord examples that contain a sample."""

    image: Annotated[str, Field(min_length=1)]
    label: Annotated[str, Field(min_length=1)]
    shape: Annotated[list[Size], Field(min_length=1, max_length=8)] | None = None
    dtype: Literal["uint8", "int8", "uint16", "int16", "int32", "float16", "float32"] = "uint8"

    @model_validator(mode="after")
    def _check_raw_shape(self) -> Self:
        if self.shape is None and self.dtype != "uint8":
            raise ValueError("dtype applies to raw numbers, which need a shape")
        return self


class TableEntry(Document):
    """The columns of .csv files that are not features."""

    label: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    weight: str = ""
    drop: list[str] = []

    @property
    def labels(self) -> list[str]:
        """The columns with labels."""
        return [self.label] if isinstance(self.label, str) else self.label

    @model_validator(mode="after")
    def _check_once(self) -> Self:
        named = [*self.labels, *([self.weight] if self.weight else []), *self.drop]
        if len(set(named)) != len(named):
            raise ValueError("names a column twice")
        return self


@dataclass(frozen=True)
class Reading:
    """How the data of a job is read. Functions are `FILE.py:NAME`, with an absolute path; '' for none."""

    picture: ImageRule = field(default_factory=ImageRule)
    classes: tuple[str, ...] | None = None
    records: RecordSchema | None = None
    public_function: str = ""
    validation_function: str = ""
    private_function: str = ""
    table: TableSchema | None = None

    @property
    def function_files(self) -> tuple[Path, ...]:
        """The files of the user's functions, each once."""
        return files_of((self.public_function, self.validation_function, self.private_function))


def files_of(references: Iterable[str]) -> tuple[Path, ...]:
    """Return the files of those `references` that are user functions, `FILE.py:NAME`, each once."""
    files = (reference.rpartition(":")[0] for reference in references)
    return tuple(dict.fromkeys(Path(file) for file in files if file.endswith(".py")))


def find_imported(file: Path, roots: Sequence[Path]) -> tuple[Path, ...]:
    """Return those of the job's files and packages `roots` that a Python file imports, or they."""
    by_name = {root.stem: root for root in roots if root != file}
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        for name in _imports_of(waiting.pop()):
            root = by_name.get(name)
            if root and root not in found:
                found[root] = None
                waiting += python_files([root])
    return tuple(found)


def python_files(roots: Iterable[Path]) -> tuple[Path, ...]:
    """Return all Python files of files and packages."""
    return tuple(file for root in roots for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root]))


def _imports_of(file: Path) -> set[str]:
    """Return the top-level names that a Python file imports; none if it cannot be parsed."""
    names: set[str] = set()
    try:
        module = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return names
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def check_private_path(private: str, public: dict[str, tuple[Path, Path]], job_path: Path) -> None:
    """Raise InputError when `private` contains `..`, or overlaps with other data.

    `public` maps the name of each other data set to its path as written and as resolved on the host. The
    private path is compared as written, because only the node itself can resolve its links.
    """
    if ".." in Path(private).parts:
        raise InputError(
            f"{job_path}: data.private.path {private} contains `..`",
            remedy="write the path without `..`",
        )
    own = {os.path.normpath(private), os.path.normpath(os.path.expanduser(private))}
    for name, paths in public.items():
        others = {os.path.normpath(path) for path in paths}
        if any(_overlap(path, other_path) for path in own for other_path in others):
            raise InputError(
                f"{job_path}: data.private.path {private} and data.{name}.path {paths[0]} overlap",
                remedy="private data must not be readable as other data: use separate directories",
            )


def _overlap(first: str, second: str) -> bool:
    """Return whether two paths are equal or nested; a relative and an absolute path never overlap."""
    if os.path.isabs(first) != os.path.isabs(second):
        return False
    return os.path.commonpath([first, second]) in (first, second)
