"""`exec --task`: a Fabric task of the user on all nodes at once, unchanged.

The task runs in csdctl's process, a thread for each node. What it prints, and what its commands print, is the
answer of its node.
"""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csdctl.errors import CsdctlError, InputError, NodeError
from csdctl.fleet.model import Fleet
from csdctl.runs.ledger import record_traffic
from csdctl.transport.many import Outcome
from csdctl.transport.meter import add_up
from csdctl.transport.session import MAX_OUTPUT_BYTES, bounded
from csdctl.workflows.exec.answers import Answer, ExecResult, build_answer, build_result
from csdctl.workflows.exec.run_command import ExecOptions

if TYPE_CHECKING:
    from csdctl.transport.fabric_connection import FleetConnection
    from csdctl.workflows.exec.task_file import LoadedTask

INSTALL = "pip install 'csdctl[fabric]'"


def check_fabric() -> None:
    """Raise InputError when Fabric is not installed."""
    if find_spec("fabric") is None:
        raise InputError("Fabric, which runs tasks, is not installed", remedy=INSTALL)


def run_task(
    fleet: Fleet, spec: str, words: Sequence[str], *, directory: Path, options: ExecOptions
) -> ExecResult:
    """Run task `FILE.py:NAME` on all nodes of `fleet`; errors of nodes are in the result.

    Each command of the task has the deadline of `options`. Raises InputError.
    """
    check_fabric()
    if options.has_host:
        raise InputError("--host applies to commands only", remedy="a task has c.local for the host")
    from csdctl.transport.fabric_group import open_group
    from csdctl.transport.fabric_policy import known_hosts_only
    from csdctl.workflows.exec.task_file import load_task

    task = load_task(spec, words, directory)
    printed = {node.name: {"out": Printed(), "err": Printed()} for node in fleet.nodes}
    durations_s: dict[str, float] = {}
    # What threads of the task's own print goes to standard error: with --json, standard output is a document.
    out, err = ThreadOutput(sys.stderr), ThreadOutput(sys.stderr)

    def call(connection: "FleetConnection") -> Any:
        name, started_s = connection.node.name, time.monotonic()
        with out.directed_to(printed[name]["out"]), err.directed_to(printed[name]["err"]):
            try:
                return task.run(connection)
            finally:
                durations_s[name] = time.monotonic() - started_s

    group = open_group(
        fleet,
        directory=directory,
        connect_deadline_s=options.connect_deadline_s,
        command_deadline_s=options.timeout_s,
        folder=task.path.parent,
        printed=printed,
    )
    assert group.link
    try:
        with (
            group,
            known_hosts_only(group.link.known_hosts),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            results = group.each(call)
    finally:
        record_traffic(directory, "exec")(add_up(group.link.jumps.opened))
    outcomes = {
        connection.node.name: _judge(connection, result, printed, durations_s, task)
        for connection, result in results.items()
    }
    return build_result(fleet, fleet.machines[1:], outcomes)


def _judge(
    connection: "FleetConnection",
    result: Any,
    printed: "dict[str, dict[str, Printed]]",
    durations_s: dict[str, float],
    task: "LoadedTask",
) -> Outcome[tuple[Answer, float]]:
    """Return the answer of a node, or why there is none."""
    from invoke.exceptions import CommandTimedOut, Exit, UnexpectedExit

    from csdctl.transport.fabric_connection import timed_out_error

    name = connection.node.name
    code, error = 0, ""
    match result:
        case CsdctlError():
            return Outcome(name, error=result)
        case CommandTimedOut():
            failed = timed_out_error(name, result.result.command, result.timeout)
            return Outcome(name, error=failed)
        case UnexpectedExit():
            code = result.result.exited
            error = f"`{bounded(result.result.command)}` ended with exit code {code}"
        case Exit() | SystemExit():
            code = result.code if isinstance(result.code, int) else int(bool(result.code))
            error = f"the task ended with exit code {code}" if code else ""
        case BaseException():
            failed_task = NodeError(
                bounded(f"task {task.task.name} raised {type(result).__name__}: {result}"), node=name
            )
            failed_task.__cause__ = result
            return Outcome(name, error=failed_task)
    answer = build_answer(code, printed[name]["out"].data, printed[name]["err"].data, error)
    return Outcome(name, (answer, durations_s[name]))


class Printed(io.StringIO):
    """What was printed, up to a limit."""

    def write(self, text: str) -> int:
        """Keep `text` while there is room."""
        if self.tell() < MAX_OUTPUT_BYTES:
            super().write(text)
        return len(text)

    @property
    def data(self) -> bytes:
        """All that was kept, as bytes."""
        text = self.getvalue()
        try:
            return text.encode(errors="surrogateescape")
        except UnicodeEncodeError:  # half of a surrogate pair, as json.loads makes it of what a node wrote
            return text.encode(errors="backslashreplace")


class ThreadOutput(io.TextIOBase):
    """A standard stream that each thread can direct to a buffer of its own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._own = threading.local()

    @contextlib.contextmanager
    def directed_to(self, buffer: io.StringIO) -> Iterator[None]:
        """Direct what this thread writes to `buffer`."""
        self._own.buffer = buffer
        try:
            yield
        finally:
            del self._own.buffer

    def write(self, text: str) -> int:
        """Write to the buffer of this thread, or to the stream."""
        return int(getattr(self._own, "buffer", self._stream).write(text))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return str(self._stream.encoding)
