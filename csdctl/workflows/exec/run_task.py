"""`exec --task`: a Fabric task of the user on all nodes at once, unchanged.

The task runs in csdctl's process, one thread per node. What it prints, and what its commands print, is the
answer of its node. Imported only when a task was asked for: Fabric takes 0.1 s to load.
"""

import contextlib
import importlib.util
import io
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import CommandTimedOut, Exit, UnexpectedExit
from invoke.tasks import Call, Task

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError
from csdctl.fleet.model import Fleet
from csdctl.runs.ledger import record_traffic
from csdctl.transport.fabric_group import FleetConnection, known_hosts_only, open_group
from csdctl.transport.known_hosts import KnownHosts
from csdctl.transport.many import MAX_WORKERS, fleet_known_hosts_paths, run_on_all
from csdctl.transport.meter import add_up
from csdctl.transport.session import MAX_OUTPUT_BYTES, bounded
from csdctl.workflows.exec.run_command import Answer, ExecOptions, ExecResult, build_answer

_BOOLS = dict.fromkeys(("1", "yes", "true", "on"), True) | dict.fromkeys(("0", "no", "false", "off"), False)


def run_task(
    fleet: Fleet, spec: str, words: Sequence[str], *, directory: Path, options: ExecOptions
) -> ExecResult:
    """Run task `FILE.py:NAME` with arguments KEY=VALUE on all nodes of `fleet`; errors are in the result.

    Each command of the task has the deadline of `options`. Raises InputError.
    """
    if options.has_host:
        raise InputError("--host applies to commands only", remedy="a task has c.local for the host")
    printed = {node.name: {"out": Printed(), "err": Printed()} for node in fleet.nodes}
    # Other threads print to standard error: with --json, standard output is a document.
    out, err = ThreadOutput(sys.stderr), ThreadOutput(sys.stderr)
    with (
        known_hosts_only(KnownHosts.load(fleet_known_hosts_paths(fleet, directory))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        task = load_task(spec, words, directory)

        def visit(connection: FleetConnection) -> Answer:
            name, started_s = connection.node.name, time.monotonic()
            out.own.stream, err.own.stream = printed[name]["out"], printed[name]["err"]
            code, error = _run(task, connection)
            shown, duration_s = printed[name], time.monotonic() - started_s
            return build_answer(code, shown["out"].data, shown["err"].data, error, duration_s)

        group = open_group(
            fleet,
            directory=directory,
            connect_deadline_s=options.connect_deadline_s,
            command_deadline_s=options.timeout_s,
            folder=task.path.parent,
            printed=printed,
        )
        try:
            with group:
                connections = {connection.node.name: connection for connection in group}
                outcomes = run_on_all(connections, visit, max_workers=MAX_WORKERS)
        finally:
            record_traffic(directory, "exec")(add_up(group.link.jumps.opened))
    return ExecResult(fleet, outcomes)


def _run(task: "LoadedTask", connection: FleetConnection) -> tuple[int, str]:
    """Run the task; return its exit code and why it failed, or raise csdctl's error."""
    name = connection.node.name
    try:
        task.run(connection)
    except CsdctlError:
        raise
    except CommandTimedOut as error:
        raise DeadlineError(
            f"`{error.result.command[:80]}` did not finish within {error.timeout:g} s; it was ended",
            node=name,
            remedy="raise --timeout, or pass `timeout=` to this c.run",
        ) from None
    except UnexpectedExit as error:
        code = error.result.exited
        return code, f"`{bounded(error.result.command)}` ended with exit code {code}"
    except (Exit, SystemExit) as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        return code, f"the task ended with exit code {code}" if code else ""
    except Exception as error:
        message = f"task {task.task.name} raised {type(error).__name__}: {error}"
        raise NodeError(bounded(message), node=name) from error
    return 0, ""


class Printed(io.StringIO):
    """Printed text, up to a limit."""

    def write(self, text: str) -> int:
        """Keep `text` while there is room."""
        if self.tell() < MAX_OUTPUT_BYTES:
            super().write(text)
        return len(text)

    @property
    def data(self) -> bytes:
        """All that was kept, as bytes; what is not Unicode text is escaped."""
        return self.getvalue().encode(errors="backslashreplace")


class ThreadOutput(io.TextIOBase):
    """A standard stream; a thread that sets `own.stream` writes there instead."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.own = threading.local()

    def write(self, text: str) -> int:
        """Write to the stream of this thread."""
        return int(getattr(self.own, "stream", self._stream).write(text))


@dataclass(frozen=True)
class LoadedTask:
    """A task with its arguments; `path` is its file."""

    path: Path
    task: Any
    arguments: dict[str, Any]

    def run(self, connection: Context) -> None:
        """Run the task on a connection, with the tasks of its `pre` and `post`."""
        for other in self.task.pre:
            _call(other, connection)
        result = self.task(connection, **self.arguments)
        if self.task.autoprint:
            print(result)
        for other in self.task.post:
            _call(other, connection)


def _call(other: Any, connection: Context) -> None:
    """Run a task of `pre` or `post`, which may have its arguments with it."""
    if isinstance(other, Call):
        other.task(connection, *other.args, **other.kwargs)
    else:
        other(connection)


def load_task(spec: str, words: Sequence[str], directory: Path) -> LoadedTask:
    """Return the task `FILE.py:NAME` with the arguments KEY=VALUE; raises InputError.

    The file's folder is on the module path while it is loaded and afterwards, as with `fab`.
    """
    name, _, task_name = spec.rpartition(":")
    if not name or not task_name:
        raise InputError(f"--task {spec!r} is not FILE.py:TASK", remedy="such as --task tasks.py:restart")
    path = (directory / name).resolve()
    if not path.is_file():
        raise InputError(f"--task: {path} does not exist", remedy=f"pass the path of {path.name}")
    task = _find(_load(path), task_name, path)
    return LoadedTask(path, task, _parse_arguments(task, words))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not spec or not spec.loader:
        raise InputError(f"{path} is not a Python file", remedy="use --task FILE.py:TASK")
    sys.path.insert(0, str(path.parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        remedy = "run it with Python by itself, in the environment of csdctl"
        if isinstance(error, ImportError) and "fabric." in str(error):
            remedy = "this is how Fabric 1 was imported: csdctl runs tasks of Fabric 2 and 3"
        raise InputError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}", remedy=remedy
        ) from error
    return module


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
    options = {option.name.replace("-", "_"): option for option in task.get_arguments()}
    for word in words:
        key, equals, text = word.partition("=")
        option = options.get(key.lstrip("-").replace("-", "_"))
        if not equals or option is None:
            listed = ", ".join(options) or "none"
            raise InputError(f"{word!r} is not an argument of {task.name}", remedy=f"KEY=VALUE of: {listed}")
        try:
            option.set_value(_BOOLS[text.lower()] if option.kind is bool else text)
        except KeyError:
            raise InputError(f"{word!r}: expected yes or no") from None
        except ValueError:
            raise InputError(f"{word!r}: expected a number such as {option.default}") from None
    missing = [name for name, option in options.items() if option.positional and option.value is None]
    if missing:
        raise InputError(
            f"task {task.name} needs {', '.join(missing)}",
            remedy=f"csdctl exec --task FILE.py:{task.name} {' '.join(f'{name}=…' for name in missing)}",
        )
    return {name: option.value for name, option in options.items()}
