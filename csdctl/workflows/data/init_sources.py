"""What `init` is told, or finds in a directory by reading: a model and data, as job.yaml names them."""

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csdctl.documents import load_text
from csdctl.errors import InputError
from csdctl.worker.protocol.datasets import FoundData

_MAX_LISTED = 10
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}
"""Folders that are parts of a data set, not classes."""
_MODEL_CLASSES = ("Model", "Sequential", "Functional")
_MODEL_MAKERS = ("load_model", "clone_model", "model_from_json")


@dataclass(frozen=True)
class DataReference:
    """A data set as job.yaml has it; `function` is FILE.py:NAME, '' for none."""

    path: str
    function: str = ""


@dataclass(frozen=True)
class Sources:
    """What a job is made of; paths relative to the job file, or absolute."""

    model: str
    public: DataReference
    validation: DataReference | None = None
    private: str = ""
    """A path on each node; '' for none."""
    model_args: dict[str, Any] = field(default_factory=dict)
    code: tuple[str, ...] = ()

    @property
    def is_application(self) -> bool:
        """Whether the model is one of keras.applications."""
        return self.model.startswith("keras.applications:")


def parse_model(text: str, directory: Path) -> str:
    """Return a model reference with its path relative to `directory`; raises InputError without the file."""
    if text.startswith("keras.applications:"):
        return text
    file, separator, function = (text, "", "") if text.endswith(".keras") else text.rpartition(":")
    if not (file.endswith(".keras") or (file.endswith(".py") and function)):
        raise InputError(
            f"--model {text!r} is not a valid reference",
            remedy="expected keras.applications:NAME, PATH.keras or PATH.py:FUNCTION",
        )
    _check_exists("--model", file)
    return f"{written_from(directory, Path(file))}{separator}{function}"


def parse_data(option: str, text: str, directory: Path) -> DataReference:
    """Return the data that `PATH`, `FILE.py:FUNCTION` or `FILE.py:FUNCTION:PATH` names; raises InputError.

    Without a path, a function is called with that of its own file.
    """
    if ".py:" not in text:
        _check_exists(option, text)
        return DataReference(written_from(directory, Path(text)))
    stem, _, rest = text.partition(".py:")
    name, _, path = rest.partition(":")
    if not name.isidentifier():
        raise InputError(f"{option} {text!r} names no function", remedy="expected PATH.py:FUNCTION")
    file = f"{stem}.py"
    for each in (file, path or file):
        _check_exists(option, each)
    return DataReference(
        written_from(directory, Path(path or file)), f"{written_from(directory, Path(file))}:{name}"
    )


def parse_private(text: str) -> str:
    """Return a path on the nodes; a shell has put this machine's home in place of `~`."""
    home = os.path.join(Path.home(), "")
    return f"~/{text.removeprefix(home)}" if text.startswith(home) and len(home) > 2 else text


def written_from(directory: Path, path: Path) -> str:
    """Return `path` as a file in `directory` names it: relative if it is below, or else absolute."""
    absolute = Path(os.path.abspath(path.expanduser()))
    base = Path(os.path.abspath(directory))
    return str(absolute.relative_to(base)) if absolute.is_relative_to(base) else str(absolute)


def find_models(directory: Path) -> list[str]:
    """Return the references of the models in `directory`; functions are found by reading their file."""
    found = [path.name for path in sorted(directory.glob("*.keras"))]
    for path in sorted(directory.glob("*.py")):
        found += [f"{path.name}:{name}" for name in _model_functions(path)]
    return found


def choose_model(found: list[str]) -> str:
    """Return the only model; raises InputError for none or several."""
    return _choose_one(
        found,
        "no model was found here: no .keras file, and no function in a .py file that returns a Keras model",
        "several models were found here",
        "--model",
        "--model FILE.py:FUNCTION, --model FILE.keras or --model keras.applications:NAME",
    )


def choose_public(found: FoundData) -> str:
    """Return the only training data; raises InputError for none or several."""
    return _choose_one(
        list(found.training),
        "no data was found here that csdctl recognizes: class folders of images, TFRecord files, .npy, .npz, "
        "IDX or .csv",
        "several data sets were found here",
        "--public",
        "--public PATH, or --public FILE.py:FUNCTION for a function that reads it",
    )


def choose_validation(found: FoundData) -> str:
    """Return the only validation data, '' if there is none, or several that are called alike."""
    without_tests = [path for path in found.validation if "test" not in path.lower()]
    chosen = without_tests or list(found.validation)
    return chosen[0] if len(chosen) == 1 else ""


def check_classes(option: str, path: str, folders: Iterable[str]) -> None:
    """Raise InputError for folders that are data sets of their own: train, val."""
    names = sorted(folders)
    if names and {name.lower() for name in names} <= _PARTS:
        training = next((name for name in names if name.lower().startswith("train")), names[0])
        others = [name for name in names if name != training]
        validation = f" --validation {Path(path) / others[-1]}" if others else ""
        raise InputError(
            f"{option}: {path} has the folders {', '.join(names)}, which are data sets, not classes",
            remedy=f"--public {Path(path) / training}{validation}",
        )


def _choose_one(found: list[str], none: str, several: str, option: str, remedy: str) -> str:
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError(none, remedy=f"give {remedy}")
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    listed = ", ".join(found[:_MAX_LISTED])
    raise InputError(f"{several}: {listed}{more}", remedy=f"choose one, such as {option} {found[0]}")


def _check_exists(option: str, path: str) -> None:
    if not Path(path).expanduser().exists():
        raise InputError(f"{option}: {path} does not exist", remedy="give the path of an existing file")


def _model_functions(path: Path) -> list[str]:
    """Return the functions of a file that can be called without arguments and return a Keras model."""
    try:
        text = load_text(path)
        tree = ast.parse(text)
    except (InputError, SyntaxError, ValueError, RecursionError):
        return []
    if "keras" not in text:
        return []
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_model_class(node)}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: set[str] = set()
    while True:  # a function may return what another of the file returns
        makers = {*own, *found}
        new = {name for name, node in functions.items() if _returns_model(node, makers)} - found
        if not new:
            return [name for name, node in functions.items() if name in found and _is_callable(node)]
        found |= new


def _is_callable(function: ast.FunctionDef) -> bool:
    arguments = function.args
    has_values = len(arguments.defaults) == len(arguments.args) + len(arguments.posonlyargs)
    return has_values and None not in arguments.kw_defaults and not function.name.startswith("_")


def _is_model_class(node: ast.ClassDef) -> bool:
    return any(_last_name(base) in _MODEL_CLASSES for base in node.bases)


def _returns_model(function: ast.FunctionDef, makers: set[str]) -> bool:
    if function.returns is not None and _last_name(function.returns) in _MODEL_CLASSES:
        return True
    nodes = list(_walk_own(function))
    assigned = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _makes_model(node.value, makers)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assigned |= {  # of any other package: what is compiled here is a model
        node.func.value.id
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "compile"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id != "re"
    }
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    return any(
        _makes_model(value, makers) or (isinstance(value, ast.Name) and value.id in assigned)
        for value in returned
        if value is not None
    )


def _walk_own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _makes_model(value: ast.expr, makers: set[str]) -> bool:
    if not isinstance(value, ast.Call):
        return False
    called = ast.unparse(value.func)
    name = _last_name(value.func)
    return name in (*_MODEL_CLASSES, *_MODEL_MAKERS, *makers) or "applications." in called


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation in quotes
        return node.value.rpartition(".")[2]
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
