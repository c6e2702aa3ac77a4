"""User code: functions by reference `FILE.py:NAME` on the host, and the packed code of a job on the ranks."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from csdctl.worker.process.errors import WorkerError, describe

_PACKED: dict[str, ModuleType] = {}
"""Modules of the job's code, which take the place of the user's files on a rank."""


def load_function(reference: str) -> Any:
    """Return the function or class that `reference` names; raises WorkerError, exit code 2, without one."""
    path, _, name = reference.rpartition(":")
    packed = _PACKED.get(Path(path).stem)
    function = getattr(packed or import_file(Path(path)), name, None)
    if not callable(function):
        raise WorkerError(f"{path} has no function {name!r}", exit_code=2)
    return function


def run_user_code(description: str, code: Callable[[], Any]) -> Any:
    """Return what `code` returns; whatever it raises, even SystemExit, becomes a WorkerError."""
    try:
        return code()
    except BaseException as error:
        raise WorkerError(
            f"{description} fails: {describe(error)}",
            remedy="fix the model's code, or model_args",
            exit_code=2,
        ) from None


def import_file(path: Path) -> Any:
    """Import a user's file once, under its own name, with the modules beside it; raises WorkerError."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise WorkerError(f"{path} cannot be imported", exit_code=2)
    module = importlib.util.module_from_spec(specification)
    if loaded is None:  # a library of that name is not replaced
        sys.modules[path.stem] = module
    directory = str(path.parent.resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    run_user_code(f"{path}", lambda: specification.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def import_roots(roots: Sequence[str]) -> None:
    """Import the user's files and packages `roots` on the host; raises WorkerError if one fails."""
    for root in map(Path, roots):
        if root.is_file():
            import_file(root)
        else:
            sys.path.insert(0, str(root.parent))
            run_user_code(str(root), lambda name=root.name: importlib.import_module(name))  # type: ignore[misc]


def import_packed(archive: str, modules: Sequence[str]) -> dict[str, Any]:
    """Import `modules` from the zip `archive`; return what Keras may need of them, by name.

    Raises WorkerError, exit code 2, if one cannot be imported on this machine.
    """
    if not archive:
        return {}
    sys.path.insert(0, archive)
    for name in modules:
        try:
            _PACKED[name] = importlib.import_module(name)
        except BaseException as error:
            raise WorkerError(
                _missing_module(error, archive)
                or f"the job's code cannot be imported here: {name}: {describe(error)}",
                remedy="install what it imports, or add the user's own modules to `code` in job.yaml",
                exit_code=2,
            ) from None
    return find_objects(lambda file: file.startswith(archive))


def _missing_module(error: BaseException, archive: str) -> str:
    """Return, in words that follow the machine's name, which module it lacks; '' for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    importers = [file.removeprefix(f"{archive}/") for file in files if file.startswith(f"{archive}/")]
    return f"has no {error.name.partition('.')[0]}, which {importers[-1]} imports" if importers else ""


def missing_packages(content: Any) -> list[str]:
    """Return the packages that a model's configuration names, and that cannot be imported here."""
    if isinstance(content, list):
        return sorted({name for part in content for name in missing_packages(part)})
    if not isinstance(content, dict):
        return []
    package = str(content.get("module") or "").partition(".")[0]
    is_missing = package.isidentifier() and importlib.util.find_spec(package) is None
    return sorted({*missing_packages(list(content.values())), *([package] if is_missing else [])})


def find_objects(is_users: Callable[[str], bool]) -> dict[str, Any]:
    """Return classes and functions of the imported modules whose file `is_users`, by name."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if is_users(str(getattr(module, "__file__", None) or "")):
            for key, value in vars(module).items():
                if callable(value) and getattr(value, "__module__", None) == name:
                    found[key] = value
    return found


def imported_beside(directory: Path) -> list[Path]:
    """Return the files below `directory` that modules of this process were imported from."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    below, installed = f"{directory.resolve()}/", f"{Path(sys.prefix).resolve()}/"
    own = {file for file in files if file and file.startswith(below) and not file.startswith(installed)}
    return sorted(map(Path, own))
