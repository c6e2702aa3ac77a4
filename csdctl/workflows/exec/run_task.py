"""`exec --task`: a Fabric task of the user on all nodes at once, unchanged.

The task runs in csdctl's process, one thread per node. Its output and the output of its commands are the
answer of its node. Imported only when a task was asked for: Fabric takes 0.1 s to load.
"""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import CommandTimedOut, Exit, ParseError, UnexpectedExit
from invoke.executor import Executor
from invoke.loader import FilesystemLoader
from invoke.parser.parser import Parser
from invoke.runners import Local
from invoke.tasks import Call

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError
from csdctl.fleet.model import Fleet
from csdctl.runs.ledger import record_traffic
from csdctl.transport.fabric_group import FleetConnection, open_group
from csdctl.transport.many import run_on_all
from csdctl.transport.session import MAX_OUTPUT_BYTES, bounded
from csdctl.workflows.exec.run_command import Answer, ExecOptions, ExecResult, build_answer


def run_task(
    fleet: Fleet, spec: str, words: Sequence[str], *, directory: Path, options: ExecOptions
) -> ExecResult:
    """Run task `FILE.py:NAME` on all nodes. Errors of nodes are in the result. Raises InputError."""
    if options.has_host:
        raise InputError("--host applies to commands only", remedy="a task has c.local for the host")
    # Other threads print to standard error: with --json, standard output is a document.
    out, err = _ThreadOutput(), _ThreadOutput()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        task = load_task(spec, words, directory)

        def visit(connection: FleetConnection) -> Answer:
            started_s = time.monotonic()
            out.of_thread.stream, err.of_thread.stream = streams = (_Printed(), _Printed())
            connection.config.runners.local = _LocalRunner
            code, error = _run(task, connection)
            stdout, stderr = (stream.getvalue().encode(errors="backslashreplace") for stream in streams)
            return build_answer(code, stdout, stderr, error=error, duration_s=time.monotonic() - started_s)

        group = open_group(
            fleet,
            directory=directory,
            connect_deadline_s=options.connect_deadline_s,
            command_deadline_s=options.timeout_s,
            folder=(directory / spec.rpartition(":")[0]).resolve().parent,
            on_traffic=record_traffic(directory, "exec"),
        )
        with group:
            connections = {connection.node.name: connection for connection in group}
            return ExecResult(fleet, run_on_all(connections, visit))


def _run(task: Callable[[Context], object], connection: FleetConnection) -> tuple[int, str]:
    try:
        task(connection)
    except CsdctlError:
        raise
    except CommandTimedOut as error:
        raise DeadlineError(
            f"`{error.result.command[:80]}` did not finish within {error.timeout:g} s; it was ended",
            node=connection.node.name,
            remedy="raise --timeout, or pass `timeout=` to this c.run",
        ) from None
    except UnexpectedExit as error:
        code = error.result.exited
        return code, f"`{bounded(error.result.command)}` ended with exit code {code}"
    except (Exit, SystemExit) as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        return code, f"the task ended with exit code {code}" if code else ""
    except Exception as error:
        message = f"the task raised {type(error).__name__}: {error}"
        raise NodeError(bounded(message), node=connection.node.name) from error
    return 0, ""


class _Printed(io.StringIO):
    def write(self, text: str) -> int:
        return super().write(text) if self.tell() < MAX_OUTPUT_BYTES else len(text)


class _ThreadOutput(io.TextIOBase):
    """Standard error as it is now. A thread that sets `of_thread.stream` writes there instead."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self.of_thread = threading.local()

    def current(self) -> Any:
        return getattr(self.of_thread, "stream", self._stream)

    def write(self, text: str) -> int:
        return int(self.current().write(text))


class _LocalRunner(Local):
    """A command of c.local, on the host. Invoke's threads write its output to the streams of this thread."""

    def start(self, command: str, shell: str, env: dict[str, str]) -> None:
        # An `out_stream` in the configuration would show what `hide` hides.
        for name, stream in self.streams.items():
            self.streams[name] = stream.current() if isinstance(stream, _ThreadOutput) else stream
        super().start(command, shell, env)


class _NodeExecutor(Executor):
    """Invoke's executor, whose calls get the connection to one node as their context."""

    def __init__(self, tasks: Collection, connection: Context) -> None:
        super().__init__(tasks, connection.config)
        self._connection = connection

    def expand_calls(self, calls: list[Call]) -> list[Call]:
        # Clones: the threads of all nodes share the calls of `pre` and `post`.
        clones: list[Any] = [call.clone() for call in super().expand_calls(calls)]
        for call in clones:
            call.make_context = lambda *_, **__: self._connection
        return clones


def load_task(spec: str, words: Sequence[str], directory: Path) -> Callable[[Context], object]:
    """Return what runs the task `FILE.py:NAME`, with its `pre` and `post`, on a connection.

    `words` are its arguments as for `fab`. Raises InputError.
    """
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise InputError(f"--task {spec!r} is not FILE.py:TASK", remedy="such as --task tasks.py:restart")
    path = (directory / file).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise InputError(f"--task: {path} is not a Python file", remedy="use --task FILE.py:TASK")
    try:
        tasks = Collection.from_module(FilesystemLoader(str(path.parent)).load(path.stem)[0])
    except (Exception, SystemExit) as error:
        remedy = "run it with Python by itself, in the environment of csdctl"
        if isinstance(error, ImportError) and "fabric." in str(error):
            remedy = "this is how Fabric 1 was imported: csdctl runs tasks of Fabric 2 and 3"
        problem = f"{path} cannot be loaded: {type(error).__name__}: {error}"
        raise InputError(problem, remedy=remedy) from error
    name = name.replace("_", "-")
    if name not in tasks.task_names:
        listed = ", ".join(sorted(tasks.task_names)) or "none: a task is a function with @task"
        raise InputError(f"{path} has no task {name!r}", remedy=f"its tasks: {listed}")
    try:
        calls = Parser(tasks.to_contexts()).parse_argv([name, *words])
    except (ParseError, ValueError) as error:
        options = ", ".join(option.name.replace("_", "-") for option in tasks[name].get_arguments())
        raise InputError(
            f"arguments of task {name}: {error}",
            remedy=f"pass them as to `fab`, after --, such as --NAME VALUE; it has: {options or 'none'}",
        ) from None
    return lambda connection: _NodeExecutor(tasks, connection).execute(*calls)
