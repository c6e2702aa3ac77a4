"""The worker's commands, such as build, prepare, look, probe, rank and link; `main` has them all.

Errors are reported as a `Failed` event (rank, mpi-check) or as a line of JSON on standard error (the others);
the exit code is that of the error. A command imports what it needs alone: most processes are small ones.
"""

import argparse
import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.output import exit_with_failure, set_event_sink
from csdctl.worker.protocol.events import UNKNOWN_NODE
from csdctl.worker.protocol.json_codec import (
    ANSWER_PREFIX,
    DATA_PREFIX,
    PROGRESS_PREFIX,
    WORKER_ERROR_PREFIX,
    ProtocolError,
    from_json,
    to_json,
)

if TYPE_CHECKING:
    from csdctl.worker.protocol.datasets import PrepareProgress
REQUESTED = ("prepare", "extract", "gather", "send", "parts", "look")
"""Commands whose request is on standard input."""
OF_MPI = ("link", "mpi-check", "sandbox")
"""Commands that end in order with MPI or their input; all others end with the reader of their output."""


def main(arguments: list[str]) -> int:
    """Run one command; return the exit code."""
    parser = argparse.ArgumentParser(prog="csdctl.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build")
    build.add_argument("--spec", required=True)
    build.add_argument("--output", type=Path, required=True)
    for name in REQUESTED:
        commands.add_parser(name)
    convert = commands.add_parser("convert")
    convert.add_argument("--spec", required=True)
    augment = commands.add_parser("augment")
    augment.add_argument("--spec", required=True)
    digest = commands.add_parser("digest")
    digest.add_argument("--directory", required=True)
    probe = commands.add_parser("probe")
    probe.add_argument("--spec", required=True)
    rank = commands.add_parser("rank")
    rank.add_argument("--spec", type=Path, required=True)
    rank.add_argument("--rank", type=int, required=True)
    rank.add_argument("--marker", default="")
    link = commands.add_parser("link")
    link.add_argument("--run", required=True)
    link.add_argument("--rank", type=int, required=True)
    link.add_argument("--generation", type=int, required=True)
    link.add_argument("--marker", default="")
    mpi_check = commands.add_parser("mpi-check")
    mpi_check.add_argument("--rank", type=int, required=True)
    mpi_check.add_argument("--size", type=int, required=True)
    mpi_check.add_argument("--node", required=True)
    mpi_check.add_argument("--sums", default="", help="sums to time, as RANKS:BYTES,…")
    mpi_check.add_argument("--marker", default="")
    sandbox_check = commands.add_parser("sandbox-check")
    sandbox_check.add_argument("--peers", default="", help="the networks of the other machines, as CIDR,…")
    sandbox = commands.add_parser("sandbox")
    sandbox.add_argument("--marker", default="")
    options = parser.parse_args(arguments)
    chosen = {
        "build": _build,
        "prepare": _prepare,
        "extract": _extract,
        "gather": _gather,
        "send": _send,
        "convert": _convert,
        "parts": _time_parts,
        "augment": _augment,
        "look": _look,
        "digest": _digest,
        "probe": _probe,
        "rank": _rank,
        "link": _link,
        "mpi-check": _check_mpi,
        "sandbox-check": _check_sandbox,
        "sandbox": _run_sandbox,
    }
    return chosen[options.command](options)


def _build(options: argparse.Namespace) -> int:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.compute.model import build
    from csdctl.worker.protocol.model_info import BuildSpec

    _, keras = load_backend()
    print_answer(build(from_json(BuildSpec, options.spec), options.output, keras))
    return 0


def print_answer(value: object) -> None:
    """Print the answer of a command, on a line of its own: a user's model code may print too."""
    print(f"\n{ANSWER_PREFIX}{to_json(value)}", flush=True)


def _prepare(_: argparse.Namespace) -> int:
    from csdctl.worker.ingest.prepare import prepare
    from csdctl.worker.protocol.datasets import PrepareSpec

    return _report_progress(
        "preparing", lambda request, note: prepare(from_json(PrepareSpec, request), on_progress=note)
    )


def _extract(_: argparse.Namespace) -> int:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.ingest.extract import extract, recompute
    from csdctl.worker.protocol.features import ExtractSpec

    def run(request: str, note: "Callable[[PrepareProgress], None]") -> object:
        spec = from_json(ExtractSpec, request)
        if spec.num_checked:
            return recompute(spec, lambda: load_backend(spec.runtime))
        return extract(spec, lambda: load_backend(spec.runtime), on_progress=note)

    return _report_progress("running the model", run)


def _gather(_: argparse.Namespace) -> int:
    from csdctl.worker.ingest.gather import gather
    from csdctl.worker.protocol.features import GatherSpec

    return _report_progress(
        "gathering features",
        lambda request, note: gather(from_json(GatherSpec, request), on_progress=note),
    )


def _convert(options: argparse.Namespace) -> int:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.compute.forward import convert
    from csdctl.worker.protocol.features import Converted, ConvertSpec

    spec = from_json(ConvertSpec, options.spec)
    print_answer(Converted(convert(spec.part, Path(spec.output), *load_backend())))
    return 0


def _time_parts(_: argparse.Namespace) -> int:
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.compute.split import time_parts
    from csdctl.worker.protocol.probe import PartsSpec

    def run(request: str, _: "Callable[[PrepareProgress], None]") -> object:
        spec = from_json(PartsSpec, request)
        return time_parts(spec, *load_backend(spec.runtime))

    return _report_progress("timing the model's parts", run)


def _send(_: argparse.Namespace) -> int:
    from csdctl.worker.ingest.gather import send
    from csdctl.worker.process.output import GuardedOutput
    from csdctl.worker.protocol.features import SendSpec

    output = GuardedOutput()
    try:
        spec = from_json(SendSpec, sys.stdin.readline())
        sent = send(spec, lambda line: output.write_line(DATA_PREFIX + line))
        output.write_line(ANSWER_PREFIX + to_json(sent))
        return 0
    except (WorkerError, ProtocolError) as error:
        failed = _as_worker_error(error)
        output.write_error(_error_line(failed))
        return failed.exit_code


def _look(_: argparse.Namespace) -> int:
    from csdctl.worker.ingest.look import look
    from csdctl.worker.protocol.datasets import LookSpec

    return _report_progress(
        "looking at the data", lambda request, note: look(from_json(LookSpec, request), on_progress=note)
    )


def _report_progress(doing: str, run: "Callable[[str, Callable[[PrepareProgress], None]], object]") -> int:
    """Run what answers the request on standard input; print progress, then its answer."""
    from csdctl.worker.process.output import GuardedOutput
    from csdctl.worker.protocol.datasets import PrepareProgress

    output = GuardedOutput()
    latest = PrepareProgress()

    def note(progress: PrepareProgress) -> None:
        nonlocal latest
        latest = progress

    def working() -> str:
        return PROGRESS_PREFIX + to_json(latest)

    try:
        request = sys.stdin.readline()
        with output.heartbeat(working):
            info = run(request, note)
        output.write_line(working())
        output.write_line(ANSWER_PREFIX + to_json(info))
        return 0
    except (WorkerError, ProtocolError) as error:
        failed = _as_worker_error(error)
    except Exception as error:
        # The text of an unforeseen error may name a private file, and this line goes to the host.
        failed = WorkerError(f"{doing} failed: {type(error).__name__}")
    output.write_error(_error_line(failed))
    return failed.exit_code


def _augment(options: argparse.Namespace) -> int:
    from csdctl.worker.compute.augment import try_augment
    from csdctl.worker.compute.backend import load_backend
    from csdctl.worker.protocol.model_info import AugmentTrial

    spec = from_json(AugmentTrial, options.spec)
    load_backend()  # whose threads cannot be set any more once the user's code has imported it
    print_answer(try_augment(spec))
    return 0


def _digest(options: argparse.Namespace) -> int:
    from csdctl.worker.data.element_spec import compute_digest

    print_answer(compute_digest(options.directory))
    return 0


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
        spec = from_json(RunSpec, options.spec.read_text())
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
    from csdctl.worker.process.output import GuardedOutput

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


def _check_sandbox(options: argparse.Namespace) -> int:
    from csdctl.worker.sandbox.program import check_sandbox

    print_answer(check_sandbox(options.peers.split(",") if options.peers else []))
    return 0


def _run_sandbox(_: argparse.Namespace) -> int:
    from csdctl.worker.sandbox.program import run_sandbox

    return run_sandbox()


def _error_line(error: WorkerError) -> str:
    content = {"message": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
    return WORKER_ERROR_PREFIX + json.dumps(content)


def _as_worker_error(error: WorkerError | ProtocolError) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    return WorkerError(str(error), remedy="run `csdctl deploy` so that both sides have one version")


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
        print(_error_line(failed), file=sys.stderr)
        code = failed.exit_code
    except BrokenPipeError:
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    run()
