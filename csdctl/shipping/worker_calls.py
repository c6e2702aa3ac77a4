"""Call commands of the worker on a machine: build argument lists, parse responses, fetch results."""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import BinaryIO, TypeVar

from csdctl.errors import CsdctlError, DeadlineError, ExitCode, InputError, RemoteCommandError
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.requirements import build_repair_command, find_package
from csdctl.transport.answer import Answer
from csdctl.transport.meter import TrafficClass
from csdctl.transport.process import Deadline
from csdctl.transport.session import Completed, Session
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.features import SendSpec
from csdctl.worker.protocol.json_codec import (
    ANSWER_PREFIX,
    DATA_PREFIX,
    PROGRESS_PREFIX,
    WORKER_ERROR_PREFIX,
    ProtocolError,
    from_json,
    to_json,
)

ResponseT = TypeVar("ResponseT")

END_DEADLINE_S = 30.0
"""Time between a worker's response and its end."""

MAX_LINES_PER_S = 10.0
"""A worker prints about one line per second."""

SPARE_LINES = 1000
"""Lines that the worker or a slow network may deliver together."""


@dataclass(frozen=True)
class WorkPatience:
    """How long a worker may prepare data; whatever it prints, it is then ended."""

    silence_s: float = 120.0
    """Without a line: a worker that prepares data sends a heartbeat every second."""
    standstill_s: float = 7200.0
    """Without one more sample: what a listing of millions of files, the sync of a large disk, or a user's
    function before its first sample may take."""
    whole_s: float = 7 * 86_400.0
    """For the whole data set."""


PATIENCE = WorkPatience()

# The file that was read is the file that runs, whatever its path leads to when more modules are imported.
_RUN_CHECKED = (
    "import hashlib,os,runpy,sys;"
    "sys.argv.pop(0);"
    "path=sys.argv[0];"
    "file=open(path,'rb');"
    "is_same=os.path.basename(path).startswith(hashlib.sha256(file.read()).hexdigest());"
    "is_same or sys.exit(path+' has been changed since csdctl sent it: deploy again');"
    "runpy.run_path('/proc/self/fd/%d'%file.fileno(),run_name='__main__')"
)

_NOISE = re.compile(rb"[IW]\d{4} |WARNING: All log messages before absl")
"""Lines that TensorFlow always prints; never the cause of an error."""


def build_worker_command(python: str, worker_path: str, arguments: Sequence[str]) -> list[str]:
    """Return the argument list that runs the worker's command `arguments[0]`.

    `worker_path` is a file of the store. It is run only with the content that its name states.
    """
    return [python, "-P", "-u", "-c", _RUN_CHECKED, worker_path, *arguments]


def run_worker(
    session: Session,
    python: str,
    worker_path: str,
    arguments: Sequence[str],
    response: type[ResponseT],
    *,
    doing: str,
    deadline_s: float,
) -> ResponseT:
    """Run a command of the worker and parse its response; raises the error that the worker reports."""
    done = session.run(build_worker_command(python, worker_path, arguments), deadline_s=deadline_s)
    if done.exit_code != 0:
        raise worker_error(done, session.name, doing)
    responses = [line for line in done.output.splitlines() if line.startswith(ANSWER_PREFIX)]
    return _parse(
        response, responses[-1].removeprefix(ANSWER_PREFIX) if responses else "", session.name, doing
    )


def watch_worker(
    session: Session,
    python: str,
    worker_path: str,
    command: str,
    request: object,
    response: type[ResponseT],
    on_working: Callable[[PrepareProgress], None],
    *,
    doing: str,
    patience: WorkPatience = PATIENCE,
) -> ResponseT:
    """Run a command of the worker that may take days: send `request`, report progress, parse its response.

    Raises the error that the worker reports, and DeadlineError after `patience`.
    """
    argv = build_worker_command(python, worker_path, [command])
    received = ""
    watch = _ProgressWatch(session.name, doing, patience)
    with closing(session.converse(argv)) as conversation:
        with suppress(EOFError):
            conversation.send_line(to_json(request))
        with suppress(EOFError):
            while True:
                line = conversation.read_line(deadline_s=watch.next_deadline_s())
                if line.startswith(PROGRESS_PREFIX):
                    progress = _parse_progress(line.removeprefix(PROGRESS_PREFIX), session.name, doing)
                    watch.take(progress)
                    on_working(progress)
                elif line.startswith(ANSWER_PREFIX):
                    received = line.removeprefix(ANSWER_PREFIX)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
    if done.exit_code != 0:
        raise worker_error(done, session.name, doing)
    return _parse(response, received, session.name, doing)


class _ProgressWatch:
    """Ends the wait for a worker that stands still, never ends, or prints without pause."""

    def __init__(self, node: str, doing: str, patience: WorkPatience) -> None:
        self._node = node
        self._doing = doing
        self._patience = patience
        self._whole = Deadline(patience.whole_s)
        self._standstill = Deadline(patience.standstill_s)
        self._num_done = 0
        self._num_lines = 0

    def next_deadline_s(self) -> float:
        """Return how long to wait for the next line; raises CsdctlError."""
        for clock, words in ((self._standstill, "no sample was prepared for"), (self._whole, "it took")):
            if clock.has_passed:
                raise DeadlineError(
                    f"{self._doing}: {words} more than {clock.seconds:.0f} s",
                    node=self._node,
                    remedy="check that machine; a function in job.yaml must yield samples as it reads them",
                )
        self._num_lines += 1
        elapsed_s = self._whole.seconds - self._whole.left_s
        if self._num_lines > SPARE_LINES + MAX_LINES_PER_S * elapsed_s:
            raise RemoteCommandError(
                f"{self._doing}: {self._num_lines} lines in {elapsed_s:.1f} s, expected one each second",
                node=self._node,
                remedy="check what runs on that machine",
            )
        return min(self._patience.silence_s, self._standstill.left_s, self._whole.left_s)

    def take(self, progress: PrepareProgress) -> None:
        """Take the progress that the worker reports."""
        if progress.num_done > self._num_done:
            self._num_done = progress.num_done
            self._standstill = Deadline(self._patience.standstill_s)


def _parse_progress(text: str, node: str, doing: str) -> PrepareProgress:
    answer = Answer.parse(text, node, f"{doing}: invalid response")
    return PrepareProgress(*(answer.number(key) for key in ("num_done", "num_total", "num_skipped")))


def _parse(expected: type[ResponseT], text: str, node: str, doing: str) -> ResponseT:
    try:
        return from_json(expected, text)
    except ProtocolError as error:
        raise RemoteCommandError(f"{doing}: invalid response: {error}", node=node) from None
    except RecursionError:
        raise RemoteCommandError(f"{doing}: invalid response: nested too deeply", node=node) from None


def worker_error(done: Completed, node: str, doing: str) -> CsdctlError:
    """Return the error of a worker's command as a CsdctlError."""
    for line in reversed(done.stderr.decode(errors="replace").splitlines()):
        if line.startswith(WORKER_ERROR_PREFIX):
            try:
                reported = Answer.parse(line[len(WORKER_ERROR_PREFIX) :], node, doing)
                is_input = reported.number("exit_code") == ExitCode.BAD_INPUT
                error_type = InputError if is_input else RemoteCommandError
                return error_type(reported.text("message"), remedy=reported.text("remedy"), node=node)
            except RemoteCommandError:  # truncated when the worker died
                break
    lines = [line for line in done.stderr.splitlines() if not _NOISE.match(line)]
    try:
        remedy = _remedy(done.stderr, node)
        replace(done, stderr=b"\n".join(lines)).check(node, doing=doing, remedy=remedy)
    except CsdctlError as error:
        return error
    return RemoteCommandError(f"{doing} returned no response", node=node)


def _remedy(stderr: bytes, node: str) -> str:
    """Return what to do about a worker that ended without an answer: it may not have found its packages."""
    text = stderr.decode(errors="replace")
    if "ImportError" not in text and "ModuleNotFoundError" not in text:
        return "check the load of that machine, then retry"
    package = find_package(text)
    if node == HOST_NAME and package:
        return f"run: {build_repair_command(package)}"
    return f"reinstall {package or 'what is missing'} in the Python of that machine"


LINE_DEADLINE_S = 120.0


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
    """Write the file that `spec` describes to `target`; record its bytes as `traffic_class`.

    Raises the error that the worker reports, RemoteCommandError for another file than described, and
    DeadlineError.
    """
    digest, num_bytes, is_complete = hashlib.sha256(), 0, False
    answer = Answer({}, session.name, doing)
    with closing(session.converse(build_worker_command(python, worker_path, ["send"]))) as conversation:
        with suppress(EOFError):
            conversation.send_line(to_json(spec))
        with suppress(EOFError):
            while not is_complete:
                line = conversation.read_line(deadline_s=LINE_DEADLINE_S)
                is_complete = line.startswith(ANSWER_PREFIX)
                if not line.startswith(DATA_PREFIX):
                    continue
                session.meter.record(traffic_class, received=len(line) + 1)
                try:
                    block = base64.b64decode(line.removeprefix(DATA_PREFIX), validate=True)
                except binascii.Error:
                    raise answer.error("received a line that is not base64") from None
                num_bytes += len(block)
                if num_bytes > spec.num_bytes:
                    raise answer.error(f"received more than {spec.num_bytes:,} bytes")
                digest.update(block)
                target.write(block)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
    if done.exit_code != 0 or not is_complete:
        raise worker_error(done, session.name, doing)
    if digest.hexdigest() != spec.sha256:
        raise answer.error(f"received a file with SHA-256 {digest.hexdigest()}, expected {spec.sha256}")
