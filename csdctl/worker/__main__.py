"""The worker's commands, such as build, prepare, look, probe, rank and link. `main` has them all.

A command of `REQUESTED` or `ANSWERS` reads one request from standard input, and answers with a frame: its
result, or its error. Errors of the others are a `Failed` event (rank) or an error's frame. The
exit code is that of the error. A command imports what it needs alone: most processes are small ones.
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
from csdctl.worker.process.output import GuardedOutput, end_without_reader, event_sinks, exit_with_failure
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
    "probe": ("measuring", "tasks.probe:probe", "protocol.probe:ProbeSpec"),
    "parts": ("timing the model's parts", "compute.parts:time_parts", "protocol.probe:PartsSpec"),
    "look": ("inspecting the data", "ingest.prepare:look", "protocol.datasets:LookSpec"),
}
"""Commands that read samples, which may be private: what they do, the function, the type of the request."""
ANSWERS = {
    "build": ("compute.model:build", "protocol.model_info:BuildRequest"),
    "compile": ("compute.keras_forward:compile_all", "protocol.model_info:CompileRequests"),
    "augment": ("compute.user_code:try_augment", "protocol.model_info:AugmentTrial"),
    "record": ("compute.script:record", "protocol.model_info:ScriptRequest"),
}
"""Commands that need no samples: the function, the type of the request."""
OF_MPI = ("link", "hub", "sandbox")
"""Commands that end in order with MPI or their input; all others end with the reader of their output."""
LOADING = ("tensorflow", "csdctl.worker.engine.tensorflow_c")
"""Modules that load TensorFlow's libraries."""
OF_USERS = ("prepare", "look", "augment", "record")
"""Commands that may spend their time in a user's functions."""


def main(arguments: list[str]) -> int:
    """Run one command. Return the exit code."""
    parser = argparse.ArgumentParser(prog="csdctl.worker")
    parser.add_argument("command", choices=(*REQUESTED, *ANSWERS, *COMMANDS))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="--NAME VALUE …")
    given = parser.parse_args(arguments)
    if given.command in REQUESTED:
        return _answer_guarded(*REQUESTED[given.command])
    if given.command in ANSWERS:
        return _answer(*ANSWERS[given.command])
    names = (option.removeprefix("--") for option in given.options[::2])
    return COMMANDS[given.command](**dict(zip(names, given.options[1::2], strict=True)))


def _import(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(f"csdctl.worker.{module}"), name)


def _read_request() -> str:
    request = sys.stdin.readline()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a user's code that asks for input does not wait for it
    return request


def _answer(function: str, kind: str) -> int:
    if function == "compute.keras_forward:compile_all":  # it needs Keras whatever the request
        _import("compute.backend:load_backend")()
    request = _read_request()
    found = _import(function)(from_json(_import(kind), request))
    print(f"\n{to_frame(RESULT, found or {})}", flush=True)  # a user's model may print too
    return 0


def _answer_guarded(doing: str, function: str, kind: str) -> int:
    """Answer the request. Print frames only: progress, then the result."""
    from csdctl.worker.protocol.datasets import PrepareProgress

    answer, request_type = _import(function), _import(kind)
    request, latest = _read_request(), deque([PrepareProgress()], maxlen=1)

    def run_answer(output: GuardedOutput) -> object:
        with output.heartbeat(lambda: to_frame(PROGRESS, latest[0])):
            found: object = answer(from_json(request_type, request), on_progress=latest.append)
        output.write_line(to_frame(PROGRESS, latest[0]))
        return found

    return _guard(doing, run_answer)


def _guard(doing: str, answer: Callable[[GuardedOutput], object]) -> int:
    """Print the frame of what `answer` returns, or of its error, and nothing that other code prints."""
    output = GuardedOutput()
    try:
        output.write_line(to_frame(RESULT, answer(output) or {}))
        return 0
    except (WorkerError, ProtocolError) as error:
        frame, code = _as_frame(error)
    except Exception as error:
        # The text of an unforeseen error may name a private file, and this line goes to the host.
        frame, code = _as_frame(WorkerError(f"{doing} failed: {type(error).__name__}"))
    output.write_line(frame)
    return code


def _send() -> int:
    from csdctl.worker.ingest.extract import send
    from csdctl.worker.protocol.features import SendSpec

    def send_lines(output: GuardedOutput) -> None:
        spec = from_json(SendSpec, sys.stdin.readline())
        send(spec, lambda text: output.write_line(f"{FRAME_PREFIX}{DATA} {text}"))

    return _guard("sending", send_lines)


def _rank(spec: str, rank: str, marker: str = "") -> int:
    from csdctl.worker.protocol.events import UNKNOWN_NODE
    from csdctl.worker.protocol.run_spec import RunSpec

    node, private_log = UNKNOWN_NODE, ""
    try:
        run_spec = from_json(RunSpec, Path(spec).read_text())
        me = run_spec.ranks[int(rank)]
        node = me.node
        if me.private:
            private_log = _redirect_output(run_spec.run_id, me.rank)
        from csdctl.worker.tasks.session import RankSession

        RankSession(run_spec, me.rank).run()
    except BaseException as error:
        exit_with_failure(int(rank), node, error, private_log)
    return 0


def _redirect_output(run_id: str, rank: int) -> str:
    """Let only events leave a rank that reads private data. Return the log file with all other output.

    Libraries may print samples: TensorFlow lists the labels of a batch that it cannot use.
    """
    path = f".csdctl/logs/{run_id}-rank-{rank}.log"
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    event_sinks.append(GuardedOutput(path).write_line)
    return path


def _link(rank: str, marker: str = "") -> int:
    from csdctl.worker.group.link import serve_link

    return serve_link(int(rank))


def _hub(descriptor: str, marker: str = "") -> int:
    from csdctl.worker.group.hub import run_hub

    return run_hub(int(descriptor))


def _as_frame(error: WorkerError | ProtocolError) -> tuple[str, int]:
    """Return the frame of an error, and its exit code."""
    if isinstance(error, ProtocolError):
        error = WorkerError(str(error), remedy="run `csdctl deploy` so that both sides have one version")
    content = {"message": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
    return to_frame(ERROR, content), error.exit_code


COMMANDS: dict[str, Callable[..., int]] = {
    "send": _send,
    "rank": _rank,
    "link": _link,
    "hub": _hub,
    "sandbox": lambda marker="": int(_import("sandbox.program:run_sandbox")()),
}
"""The function of each other command, which takes its options; only a search for processes reads `marker`."""


def run() -> None:
    """Run the command of sys.argv and exit with its code."""
    os.umask(0o077)  # whatever a worker writes may hold data: for this user alone
    if not {*sys.argv[1:2]} & {*OF_MPI}:
        end_without_reader()
    if not {*sys.argv[1:2]} & {*OF_USERS}:  # numpy's own threads spin: 0.1 s of CPU when it is imported
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = 1

    def leave() -> None:
        """Skip the teardown of TensorFlow's libraries, which takes up to a second. MPI needs its own."""
        if {*LOADING} & {*sys.modules} and "mpi4py" not in sys.modules:
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
