"""Start `csdctl train` in a session of its own, which outlives its terminal and its login."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from csdctl.errors import ExitCode, RunError
from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.workflows.runs.follow import GrowingLog
from csdctl.workflows.runs.manage import POLL_S, process_of


def start_detached(project: ProjectDirectory, arguments: Sequence[str], say: Say) -> RunDirectory | None:
    """Run csdctl with `arguments` in the background; return its run once that trains.

    Until then what it prints is passed to `say`, and Ctrl-C ends it. None: it had nothing to train. Raises
    RunError when it fails before.
    """
    project.state.mkdir(mode=0o700, exist_ok=True)
    log = project.state / f"detached-{os.getpid()}.log"
    with log.open("wb") as output, _ignoring(signal.SIGHUP):  # what is ignored, a new program ignores too
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "csdctl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=project.root,
            start_new_session=True,
        )
    try:
        run = _wait_for_run(project, process, GrowingLog(log), say)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    finally:
        if process.poll() is not None:
            log.unlink(missing_ok=True)
    if run and log.exists():
        log.rename(run.own_log)
    return run


def _wait_for_run(
    project: ProjectDirectory, process: "subprocess.Popen[bytes]", log: GrowingLog, say: Say
) -> RunDirectory | None:
    before = set(project.run_ids())
    while True:
        code = process.poll()
        for line in log.read_lines() if code is None else [*log.read_lines(), *log.read_rest()]:
            say(line)
        for name in project.run_ids():
            run = RunDirectory(project.runs / name)
            holder = process_of(run)
            # A run that is resumed has its events from before.
            if holder.pid == process.pid and holder.is_running and (name in before or run.events.exists()):
                return run
        if code == 0:
            return None
        if code is not None:
            error = RunError(f"csdctl ended with exit code {code} before it trained; its output is above")
            error.exit_code = ExitCode(code) if code in list(ExitCode) else ExitCode.FAILED
            raise error
        time.sleep(POLL_S)


@contextmanager
def _ignoring(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
