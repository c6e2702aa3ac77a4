"""A Fabric task from the user's own file: found, loaded, and its arguments converted as `fab` does.

Needs the extra `fabric`; imported only when a task was asked for.
"""

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from invoke.collection import Collection
from invoke.context import Context
from invoke.tasks import Call, Task

from csdctl.errors import InputError

_TRUE = ("1", "yes", "true", "on")
_FALSE = ("0", "no", "false", "off")


@dataclass(frozen=True)
class LoadedTask:
    """A task with its arguments; `path` is its file."""

    path: Path
    task: Any
    arguments: dict[str, Any]

    def run(self, connection: Context) -> Any:
        """Run the task on a connection, with those that it asks to run before and after it."""
        for other in self.task.pre:
            _call(other, connection)
        result = self.task(connection, **self.arguments)
        if self.task.autoprint:
            print(result)
        for other in self.task.post:
            _call(other, connection)
        return result


def load_task(spec: str, words: Sequence[str], directory: Path) -> LoadedTask:
    """Return the task `FILE.py:NAME` with the arguments KEY=VALUE; raises InputError.

    The file's folder is on the module path while it is loaded and afterwards, as with `fab`.
    """
    name, _, task_name = spec.rpartition(":")
    if not name or not task_name:
        raise InputError(f"--task {spec!r} is not FILE.py:TASK", remedy="such as --task tasks.py:restart")
    path = (directory / name).resolve()
    if not path.is_file():
        raise InputError(f"--task: {path} does not exist")
    task = _find(_load(path), task_name, path)
    return LoadedTask(path, task, _parse_arguments(task, words))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not spec or not spec.loader:
        raise InputError(f"{path} is not a Python file", remedy="give --task FILE.py:TASK")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        remedy = (
            "this is how Fabric 1 was imported: csdctl runs tasks of Fabric 2 and 3" if _is_old(error) else ""
        )
        raise InputError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}",
            remedy=remedy or "run it with Python by itself, in the environment of csdctl",
        ) from error
    return module


def _is_old(error: BaseException) -> bool:
    return isinstance(error, ImportError) and "fabric." in str(error)


def _find(module: ModuleType, name: str, path: Path) -> Any:
    """Return a task by its function's name, or by the name that `fab --list` shows."""
    found = vars(module).get(name)
    if isinstance(found, Task):
        return found
    tasks = Collection.from_module(module)
    try:
        return tasks[name.replace("_", "-")]
    except (KeyError, ValueError):
        listed = ", ".join(sorted(tasks.task_names)) or "none: a task is a function with @task"
        raise InputError(f"{path} has no task {name!r}", remedy=f"its tasks: {listed}") from None


def _parse_arguments(task: Any, words: Sequence[str]) -> dict[str, Any]:
    """Return KEY=VALUE as the types of the task's default values; raises InputError."""
    parameters = dict(list(inspect.signature(task.body).parameters.items())[1:])
    takes_any = any(one.kind == one.VAR_KEYWORD for one in parameters.values())
    named = {
        name: one for name, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        if not equals or (key not in named and not takes_any):
            listed = ", ".join(named) or "none"
            raise InputError(f"{word!r} is not an argument of {task.name}", remedy=f"KEY=VALUE of: {listed}")
        default = named[key].default if key in named else None
        if key in task.iterable:
            arguments.setdefault(key, []).append(text)
        else:
            arguments[key] = _convert(key, text, default)
    missing = [name for name, one in named.items() if one.default is one.empty and name not in arguments]
    if missing and set(missing) - set(task.iterable):
        raise InputError(
            f"task {task.name} needs {', '.join(missing)}",
            remedy=f"csdctl exec --task FILE.py:{task.name} {' '.join(f'{name}=…' for name in missing)}",
        )
    return {**{name: [] for name in missing}, **arguments}


def _convert(key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in (*_TRUE, *_FALSE):
            raise InputError(f"{key}={text!r}: expected yes or no")
        return text.lower() in _TRUE
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            raise InputError(f"{key}={text!r}: expected a number such as {default}") from None
    return text


def _call(other: Any, connection: Context) -> None:
    """Run a task of `pre` or `post`, which may have its arguments with it."""
    if isinstance(other, Call):
        other.task(connection, *other.args, **other.kwargs)
    else:
        other(connection)
