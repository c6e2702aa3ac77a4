"""The worker's commands, such as build, prepare, look, probe, rank and link; `main` has them all.

A command of `REQUESTED` or `ANSWERS` reads one request from standard input, and answers with a frame: its
result, or its error. Errors of the others are a `Failed` event (rank, mpi-check) or an error's frame. The
exit code is that of the error. A command imports what it needs alone: most processes are small ones.
"""

import argparse
import atexit
import contextlib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.output import GuardedOutput, exit_with_failure, set_event_sink
from csdctl.worker.protocol.events import UNKNOWN_NODE
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
    "parts": ("timing the model's parts", "compute.split:time_parts", "protocol.probe:PartsSpec"),
    "look": ("looking at the data", "ingest.prepare:look", "protocol.datasets:LookSpec"),
}
"""Commands that read samples, which may be private: what they do, the function, the type of the request."""
OF_MPI = ("link", "mpi-check", "sandbox")
"""Commands that end in order with MPI or their input; all others end with the reader of their output."""
TYPES = {"rank": int, "generation": int, "size": int}
"""Types of options that are no text."""
OPTIONAL = ("marker", "sums", "peers")


def main(arguments: list[str]) -> int:
    """Run one command; return the exit code."""
    parser = argparse.ArgumentParser(prog="csdctl.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in (*REQUESTED, *ANSWERS):
        commands.add_parser(name)
    for name, (_, *options) in COMMANDS.items():
        command = commands.add_parser(name)
        for option in options:
            command.add_argument(
                f"--{option}", type=TYPES.get(option, str), required=option not in OPTIONAL, default=""
            )
    given = parser.parse_args(arguments)
    if given.command in REQUESTED:
        return _answer_guarded(*REQUESTED[given.command])
    if given.command in ANSWERS:
        return _answer(ANSWERS[given.command])
    return int(COMMANDS[given.command][0](given))


def _build(request: str) -> object:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.compute.model import build
    from csdctl.worker.protocol.model_info import BuildRequest

    wanted = from_json(BuildRequest, request)
    _, keras = load_backend()
    return build(wanted.spec, Path(wanted.output), keras)


def _augment(request: str) -> object:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.compute.user_code import try_augment
    from csdctl.worker.protocol.model_info import AugmentTrial

    spec = from_json(AugmentTrial, request)
    load_backend()  # whose threads cannot be set any more once the user's code has imported it
    return try_augment(spec)


def _convert(request: str) -> object:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.compute.forward import convert
    from csdctl.worker.protocol.features import Converted, ConvertSpec

    spec = from_json(ConvertSpec, request)
    return Converted(convert(spec.part, Path(spec.output), *load_backend()))


def _check_sandbox(request: str) -> object:
    from csdctl.worker.protocol.sandbox import SandboxRequest
    from csdctl.worker.sandbox.program import check_sandbox

    return check_sandbox(from_json(SandboxRequest, request).peers)


ANSWERS = {
    "build": _build,
    "augment": _augment,
    "convert": _convert,
    "sandbox-check": _check_sandbox,
}
"""The functions that answer a request that needs no samples."""


def _read_request() -> str:
    request = sys.stdin.readline()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a user's code that asks for input does not wait for it
    return request


def _answer(answer: Any) -> int:
    found = answer(_read_request())
    print(f"\n{to_frame(RESULT, found)}", flush=True)  # a user's model may print too
    return 0


def _answer_guarded(doing: str, *places: str) -> int:
    """Answer the request; print frames only: progress, then the result."""
    from csdctl.worker.protocol.datasets import PrepareProgress

    answer, kind = (
        getattr(import_module(f"csdctl.worker.{module}"), name)
        for module, name in (place.split(":") for place in places)
    )
    request, output, latest = _read_request(), GuardedOutput(), PrepareProgress()

    def note(progress: PrepareProgress) -> None:
        nonlocal latest
        latest = progress

    def working() -> str:
        return to_frame(PROGRESS, latest)

    try:
        with output.heartbeat(working):
            found = answer(from_json(kind, request), on_progress=note)
        output.write_line(working())
        output.write_line(to_frame(RESULT, found))
        return 0
    except (WorkerError, ProtocolError) as error:
        failed = _as_worker_error(error)
    except Exception as error:
        # The text of an unforeseen error may name a private file, and this line goes to the host.
        failed = WorkerError(f"{doing} failed: {type(error).__name__}")
    output.write_line(_error_frame(failed))
    return failed.exit_code


def _send(_: argparse.Namespace) -> int:
    from csdctl.worker.ingest.extract import send
    from csdctl.worker.protocol.features import SendSpec

    output = GuardedOutput()
    try:
        spec = from_json(SendSpec, sys.stdin.readline())
        sent = send(spec, lambda text: output.write_line(f"{FRAME_PREFIX}{DATA} {text}"))
        output.write_line(to_frame(RESULT, sent))
        return 0
    except (WorkerError, ProtocolError) as error:
        failed = _as_worker_error(error)
        output.write_line(_error_frame(failed))
        return failed.exit_code


def _probe(options: argparse.Namespace) -> int:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.protocol.probe import ProbeSpec
    from csdctl.worker.tasks.probe import serve_probes

    spec = from_json(ProbeSpec, options.spec)
    serve_probes(spec, *load_backend(spec.runtime))
    return 0


def _rank(options: argparse.Namespace) -> int:
    from csdctl.worker.protocol.run_spec import RunSpec

    node, private_log = UNKNOWN_NODE, ""
    try:
        spec = from_json(RunSpec, Path(options.spec).read_text())
        me = spec.ranks[options.rank]
        node = me.node
        if me.private:
            private_log = _redirect_output(spec.run_id, me.rank)
        from csdctl.worker.tasks.session import RankSession

        RankSession(spec, me.rank).run()
    except BaseException as error:
        exit_with_failure(options.rank, node, error, private_log)
    return 0


def _redirect_output(run_id: str, rank: int) -> str:
    """Let only events leave a rank that reads private data; return the log file with all other output.

    Libraries may print samples: TensorFlow lists the labels of a batch that it cannot use.
    """
    path = f".csdctl/logs/{run_id}-rank-{rank}.log"
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    set_event_sink(GuardedOutput(path).write_line)
    return path


def _link(options: argparse.Namespace) -> int:
    from csdctl.worker.group.link import serve_link

    return serve_link(options.run, options.rank, options.generation)


def _check_mpi(options: argparse.Namespace) -> int:
    from csdctl.worker.tasks.mpi_check import check_mpi

    code = check_mpi(options.rank, options.size, options.node, options.sums)
    if code:  # a rank that fails must not wait for the others in MPI_Finalize
        os._exit(code)
    return code


def _run_sandbox(_: argparse.Namespace) -> int:
    from csdctl.worker.sandbox.program import run_sandbox

    return run_sandbox()


def _error_frame(error: WorkerError) -> str:
    content = {"message": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
    return to_frame(ERROR, content)


def _as_worker_error(error: WorkerError | ProtocolError) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    return WorkerError(str(error), remedy="run `csdctl deploy` so that both sides have one version")


COMMANDS: dict[str, tuple[Any, *tuple[str, ...]]] = {
    "send": (_send,),
    "probe": (_probe, "spec"),
    "rank": (_rank, "spec", "rank", "marker"),
    "link": (_link, "run", "rank", "generation", "marker"),
    "mpi-check": (_check_mpi, "rank", "size", "node", "sums", "marker"),
    "sandbox": (_run_sandbox, "marker"),
}
"""The function of each other command, and its options."""


def run() -> None:
    """Run the command of sys.argv and exit with its code."""
    os.umask(0o077)  # whatever a worker writes may hold data: for this user alone
    if not {*sys.argv[1:2]} & {*OF_MPI}:
        from csdctl.worker.process.output import end_without_reader

        end_without_reader()
    code = 1

    def leave() -> None:
        """Skip the teardown of TensorFlow, which takes a second; MPI needs its own."""
        if "tensorflow" in sys.modules and "mpi4py" not in sys.modules:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)  # registered first, called last
    try:
        code = main(sys.argv[1:])
    except (WorkerError, ProtocolError) as error:
        failed = _as_worker_error(error)
        print(f"\n{_error_frame(failed)}", flush=True)
        code = failed.exit_code
    except BrokenPipeError:
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    run()
