"""What the job's own code imports, found by reading it: nothing is imported or run.

Left out: the standard library, the packages that every rank needs, the job's own modules, and what is
imported for type checking alone, in a program's main part, or where its absence is caught.
"""

import ast
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.job.model import Job
from csdctl.job.reading import files_of, find_imported, python_files, statements_of

CHECKED_APART = frozenset({"csdctl", "keras", "numpy", "tensorflow"})
"""Packages that `doctor` checks on all machines, and csdctl itself."""
_CATCHES = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


WELL_KNOWN = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Module → the package that pip installs it with, where the names differ."""


@dataclass(frozen=True)
class Needed:
    """A module or package that the job's code imports."""

    module: str
    importer: str
    """The name of the file that imports it."""
    is_beside: bool = False
    """Whether the file has it in its own directory: the job's own, but not named in `code`."""


@dataclass(frozen=True)
class JobImports:
    """What each kind of machine needs for a job's own code."""

    host: tuple[Needed, ...] = ()
    nodes: tuple[Needed, ...] = ()
    perhaps: tuple[Needed, ...] = ()
    """On the nodes, if the model cannot be rebuilt there without its file, which is not known yet."""
    problem: str = ""
    """Why the job could not be read."""


def list_imports(job: Job, needs_code: bool | None) -> JobImports:
    """Return what `job` needs; `needs_code`: whether nodes need it to build the model, None if unknown."""
    model = {need.module: need for need in _needed(python_files(job.code_roots), job)}
    of_functions = _needed(_function_files(job, job.reading.function_files), job)
    # On the host, the model's files find what lies beside them.
    host = {need.module: need for need in model.values() if not need.is_beside}
    private = files_of([job.reading.private_function])
    sent = [*_function_files(job, private), *python_files(job.augment_roots)]
    nodes = {need.module: need for need in _needed(sent, job)}
    perhaps = {name: need for name, need in model.items() if name not in nodes}
    if needs_code is None and has_own_classes(job):
        needs_code = True
    if needs_code:
        nodes |= perhaps
    return JobImports(
        tuple((host | {need.module: need for need in of_functions}).values()),
        tuple(nodes.values()),
        tuple(perhaps.values()) if needs_code is None else (),
    )


def has_own_classes(job: Job) -> bool:
    """Return whether the job has losses, metrics, layers of its own, as far as reading it tells."""
    losses = [term.name for term in job.recipe.losses.values()]
    if set(job.code) - set(job.augment_roots) or files_of([*losses, *job.recipe.metrics]):
        return True
    return any(isinstance(node, ast.ClassDef) for file in job.code_roots for node in statements_of(file))


def _function_files(job: Job, files: Sequence[Path]) -> list[Path]:
    """Return the files of data functions, with those that they import of the job's code."""
    roots = [root for file in files for root in find_imported(file, job.code_roots)]
    return list(dict.fromkeys([*files, *python_files(roots)]))


def _needed(files: Iterable[Path], job: Job) -> list[Needed]:
    own = {root.stem for root in job.code_roots}
    found: dict[str, Needed] = {}
    for file in files:
        for name in sorted(required_modules(file) - own):
            beside = (file.parent / f"{name}.py").is_file() or (file.parent / name).is_dir()
            found.setdefault(name, Needed(name, file.name, beside))
    return list(found.values())


def required_modules(file: Path) -> set[str]:
    """Return the top-level names that a Python file cannot do without; none if it cannot be parsed."""
    imports = _Imports()
    try:
        imports.visit(ast.Module(statements_of(file), []))
    except RecursionError:
        return set()
    return imports.names - sys.stdlib_module_names - CHECKED_APART


def describe_missing(missing: Sequence[Needed]) -> str:
    """Return what a machine lacks, in words that follow its name."""
    return "has " + ", and ".join(f"no {need.module}, which {need.importer} imports" for need in missing)


def remedy_of(missing: Sequence[Needed], python: str) -> str:
    """Return what to install on the machine, or to name in the job."""
    parts = []
    if beside := [need.module for need in missing if need.is_beside]:
        parts.append(f"add {', '.join(beside)} to `code` in job.yaml")
    if others := [need.module for need in missing if not need.is_beside]:
        names = " ".join(shlex.quote(WELL_KNOWN.get(module, module)) for module in others)
        parts.append(f"install it there: `{shlex.quote(python)} -m pip install {names}`")
    return "; ".join(parts)


class _Imports(ast.NodeVisitor):
    """Collects the names of imports, in functions too."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.names |= {alias.name.partition(".")[0] for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            self.names.add(node.module.partition(".")[0])

    def visit_Try(self, node: ast.Try) -> None:
        """Skip what may be missing, and what takes its place."""
        is_optional = any(handler.type is None or _catches(handler.type) for handler in node.handlers)
        for part in node.finalbody if is_optional else ast.iter_child_nodes(node):
            self.visit(part)

    def visit_With(self, node: ast.With) -> None:
        """Skip the body of `with suppress(ImportError)`."""
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        if not any(_name_of(call.func) == "suppress" and any(map(_catches, call.args)) for call in calls):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Skip `if TYPE_CHECKING:` and `if __name__ == "__main__":`."""
        test = node.test
        is_main = isinstance(test, ast.Compare) and _name_of(test.left) == "__name__"
        is_skipped = is_main or _name_of(test) == "TYPE_CHECKING"
        for part in (*(() if is_skipped else node.body), *node.orelse):
            self.visit(part)


def _catches(error: ast.expr) -> bool:
    """Return whether an exception, or a tuple of them, includes ImportError."""
    return any(_name_of(one) in _CATCHES for one in (error.elts if isinstance(error, ast.Tuple) else [error]))


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
