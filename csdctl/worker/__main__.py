"""The worker's commands, such as build, prepare, look, probe, rank and link. `main` runs one of them.

A command of `REQUESTED` or `ANSWERS` reads one request from standard input. It answers with a frame: its
result, or its error. An error of a rank is a `Failed` event, and an error of any other command is a frame.
The exit code is the error's. A command imports only what it needs, because most processes are small.
"""

import argparse
import atexit
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.output import GuardedOutput, end_without_reader, exit_with_failure, print_line
from csdctl.worker.protocol.disk_errors import describe_os_error
from csdctl.worker.protocol.json_codec import (
    DATA,
    ERROR,
    FRAME_PREFIX,
    PROGRESS,
    RESULT,
    ProtocolError,
    from_json,
    to_frame,
)

REQUESTED = {
    "prepare": ("preparing", "ingest.prepare:prepare", "protocol.datasets:PrepareSpec"),
    "extract": ("running the model", "ingest.extract:extract", "protocol.features:ExtractSpec"),
    "gather": ("gathering features", "ingest.extract:gather", "protocol.features:GatherSpec"),
    "parts": ("timing the model's parts", "compute.parts:time_parts", "protocol.model_info:PartsSpec"),
    "look": ("inspecting the data", "ingest.prepare:look", "protocol.datasets:LookSpec"),
}
"""Commands that read samples, which may be private: what they do, the function, the type of the request."""
ANSWERS = {
    "build": ("compute.model:build", "protocol.model_info:BuildRequest"),
    "compile": ("compute.compile:compile_all", "protocol.model_info:CompileRequests"),
    "augment": ("compute.user_code:try_augment", "protocol.model_info:AugmentTrial"),
    "record": ("compute.script:record", "protocol.model_info:ScriptRequest"),
}
"""Commands that need no samples: the function, the type of the request."""
MPI_COMMANDS = {
    "link": "group.link:serve_link",
    "hub": "group.hub:run_hub",
    "sandbox": "sandbox.program:run_sandbox",
}
"""Commands that end in order with MPI or their input, and their functions, which take numbers. All others end
with the reader of their output."""
USER_COMMANDS = ("prepare", "look", "augment", "record")
"""Commands that may spend their time in a user's functions."""
TENSORFLOW_MODULES = ("tensorflow", "csdctl.worker.engine.tensorflow_c")
"""Modules that load TensorFlow's libraries."""


def main(arguments: list[str]) -> int:
    """Run one command. Return the exit code."""
    parser = argparse.ArgumentParser(prog="csdctl.worker")
    parser.add_argument("command", choices=(*REQUESTED, *ANSWERS, *MPI_COMMANDS, "send", "rank"))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="--NAME VALUE …")
    parsed = parser.parse_args(arguments)
    command, names = parsed.command, [option.removeprefix("--") for option in parsed.options[::2]]
    options = dict(zip(names, parsed.options[1::2], strict=True))
    marker = options.pop("marker", "")  # csdctl finds the processes of a run by it
    if command in REQUESTED:
        return _answer_guarded(*REQUESTED[command])
    if command in ANSWERS:
        return _answer(*ANSWERS[command])
    if command in MPI_COMMANDS:
        return int(_import(MPI_COMMANDS[command])(*map(int, options.values())))
    if command == "send":
        return _send()
    return _rank(options["spec"], int(options["rank"]), marker)


def _import(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"csdctl.worker.{module}"), name)


def _read_request() -> str:
    request = sys.stdin.readline()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a user's code that asks for input does not wait for it
    return request


def _answer(function: str, request_type: str) -> int:
    if function == "compute.compile:compile_all":  # it needs Keras whatever the request
        _import("compute.backend:load_backend")()
    request = _read_request()
    try:
        result = _import(function)(from_json(_import(request_type), request))
    except OSError as error:  # of csdctl's own files: a user's code raises a WorkerError
        raise WorkerError(*describe_os_error(error)) from error
    print(f"\n{to_frame(RESULT, result or {})}", flush=True)  # a user's model may print too
    return 0


def _answer_guarded(action: str, function: str, request_type: str) -> int:
    """Answer the request. Print frames only: progress, then the result."""
    from csdctl.worker.protocol.datasets import PrepareProgress

    answer, kind = _import(function), _import(request_type)
    request, latest = _read_request(), deque([PrepareProgress()], maxlen=1)

    def run_answer(output: GuardedOutput) -> object:
        with output.heartbeat(lambda: to_frame(PROGRESS, latest[0])):
            result: object = answer(from_json(kind, request), on_progress=latest.append)
        output.write_line(to_frame(PROGRESS, latest[0]))
        return result

    return _guard(action, run_answer)


def _guard(action: str, answer: Callable[[GuardedOutput], object]) -> int:
    """Print the frame of what `answer` returns, or of its error, and nothing that other code prints."""
    output = GuardedOutput()
    try:
        output.write_line(to_frame(RESULT, answer(output) or {}))
        return 0
    except (WorkerError, ProtocolError) as error:
        frame, code = _as_frame(error)
    except Exception as error:
        # The text of an unforeseen error may name a private file, and this line goes to the host.
        why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        frame, code = _as_frame(WorkerError(f"{action} failed: {why}"))
    output.write_line(frame)
    return code


def _send() -> int:
    from csdctl.worker.ingest.extract import send
    from csdctl.worker.protocol.features import SendSpec

    def send_lines(output: GuardedOutput) -> None:
        spec = from_json(SendSpec, sys.stdin.readline())
        send(spec, lambda text: output.write_line(f"{FRAME_PREFIX}{DATA} {text}"))

    return _guard("sending", send_lines)


def _rank(spec_path: str, rank: int, marker: str) -> int:
    from csdctl.worker.protocol.durable_files import make_directory
    from csdctl.worker.protocol.events import UNKNOWN_NODE
    from csdctl.worker.protocol.run_spec import RunSpec

    # A hub is started like this process, with another command of the worker.
    start = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    hub_command = [*start, "hub", *(["--marker", marker] if marker else []), "--descriptor"]
    node, log, write_line = UNKNOWN_NODE, "", print_line
    try:
        spec = from_json(RunSpec, Path(spec_path).read_text())
        node = spec.ranks[rank].node
        if spec.ranks[rank].private:
            # Only events leave a rank that reads private data. All other output goes to its log, because
            # libraries may print samples: TensorFlow lists the labels of a batch that it cannot use.
            own_log = f".csdctl/logs/{spec.run_id}-rank-{rank}.log"
            try:
                make_directory(Path(own_log).parent)
                write_line = GuardedOutput(own_log).write_line
            except OSError as error:
                raise WorkerError(*describe_os_error(error)) from None
            log = own_log
        from csdctl.worker.tasks.session import RankSession

        RankSession(spec, rank, hub_command, write_line).run()
    except BaseException as error:
        exit_with_failure(rank, node, error, log=log, write_line=write_line)
    return 0


def _as_frame(error: WorkerError | ProtocolError) -> tuple[str, int]:
    """Return the frame of an error, and its exit code."""
    if isinstance(error, ProtocolError):
        error = WorkerError(str(error), remedy="run `csdctl deploy` so that both sides have one version")
    content = {"message": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
    return to_frame(ERROR, content), error.exit_code


def run() -> None:
    """Run the command of sys.argv and exit with its code."""
    os.umask(0o077)  # whatever a worker writes may hold data: for only this user
    command = "".join(sys.argv[1:2])
    if command not in MPI_COMMANDS:
        end_without_reader()
    if command not in USER_COMMANDS:  # numpy's own threads spin: 0.1 s of CPU when it is imported
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = 1

    def leave() -> None:
        """Skip the teardown of TensorFlow's libraries, which takes up to a second. MPI needs its own."""
        if {*TENSORFLOW_MODULES} & {*sys.modules} and "mpi4py" not in sys.modules:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)  # registered first, called last
    try:
        code = main(sys.argv[1:])
    except (WorkerError, ProtocolError) as error:
        frame, code = _as_frame(error)
        print(f"\n{frame}", flush=True)
    except BrokenPipeError:
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    run()
