"""Call commands of the worker on a machine: parse responses, fetch results."""

import hashlib
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import BinaryIO, TypeVar

from csdctl.errors import CsdctlError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.requirements import build_repair_command, find_package
from csdctl.transport.commands import build_worker_command
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import AnswerLimits, Nothing, Program, ProgramEndedError
from csdctl.transport.session import OUT_OF_MEMORY_CODE, Completed, Session
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.features import SendSpec
from csdctl.worker.protocol.json_codec import DATA, RESULT, to_json

ResponseT = TypeVar("ResponseT")

PATIENCE = AnswerLimits()
CHECK_LOAD = "check the load of that machine, then retry"
MIN_BLOCK_BYTES = 1000
"""The least size of the blocks of a file that a worker sends, on average."""

_NOISE = re.compile(rb"[IW]\d{4} |WARNING: All log messages before absl")
"""Lines that TensorFlow always prints. They are never the cause of an error."""


class WorkerProgram(Program):
    """A command of the worker. Its end may be explained by packages that it lacks."""

    def explain_end(self, done: Completed) -> CsdctlError:
        """Return why the worker has ended without a result."""
        lines = [line for line in done.stderr.splitlines() if not _NOISE.match(line)]
        error = super().explain_end(replace(done, stderr=b"\n".join(lines)))
        error.remedy = _remedy(done.stderr, self.node)
        return error


def call_worker(
    session: Session,
    python: str,
    worker_path: str,
    command: str,
    request: object,
    response: type[ResponseT],
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
    *,
    doing: str,
    patience: AnswerLimits = PATIENCE,
) -> ResponseT:
    """Send `request` to a command of the worker. Return its response. Raises the errors of `Program.read`."""
    argv = build_worker_command(python, worker_path, [command])
    try:
        return WorkerProgram(session, argv, doing, patience).call(request, response, on_progress)
    except ProgramEndedError as error:
        # The user's function that the command calls, if it calls one.
        function = re.search(r'"(?:function|reference)":"[^"]*\.py:(\w+)"', to_json(request))
        if function and error.remedy == CHECK_LOAD and error.done.exit_code != OUT_OF_MEMORY_CODE:
            error.message += (
                f"; most likely your function {function[1]}, or a library of it, ended the process"
            )
            error.remedy = f"call {function[1]} by itself, and fix what crashes or calls os._exit"
        raise


def _remedy(stderr: bytes, node: str) -> str:
    """Return what to do about a worker that ended without an answer: it may not have found its packages."""
    text = stderr.decode(errors="replace")
    if "ImportError" not in text and "ModuleNotFoundError" not in text:
        return CHECK_LOAD
    package = find_package(text)
    if node == HOST_NAME and package:
        return f"run: {build_repair_command(package)}"
    return f"reinstall {package or 'what is missing'} in the Python of that machine"


def fetch_results(
    session: Session,
    python: str,
    worker_path: str,
    spec: SendSpec,
    target: BinaryIO,
    traffic_class: TrafficClass,
    *,
    doing: str,
) -> None:
    """Write the file that `spec` describes to `target`. Raises the errors of `Program.read`.

    Content that `spec` does not describe is an error, too.
    """
    digest, num_bytes = hashlib.sha256(), 0
    argv = build_worker_command(python, worker_path, ["send"])
    patience = AnswerLimits(spare_lines=1000 + spec.num_bytes // MIN_BLOCK_BYTES)
    with closing(WorkerProgram(session, argv, doing, patience)) as program:
        program.send(spec)
        while (frame := program.read({DATA: bytes, RESULT: Nothing}))[0] == DATA:
            block = frame[1]
            session.meter.record(traffic_class, received=len(program.last_line) + 1)
            num_bytes += len(block)
            if num_bytes > spec.num_bytes:
                raise program.error(f"received more than {spec.num_bytes:,} bytes")
            digest.update(block)
            target.write(block)
        program.finish()
    if digest.hexdigest() != spec.sha256:
        problem = f"received a file with SHA-256 {digest.hexdigest()}, expected {spec.sha256}"
        remedy = "if the file is damaged there, `csdctl clean --computed`, then repeat this"
        raise RemoteCommandError(f"{doing}: {problem}", node=session.name, remedy=remedy)
