"""Waiting in tests.

A test waits for an event, and fails when nothing moves any more, not when a clock says so. What counts as
"nothing moves" grows with the time that this machine needs for one known piece of work, measured once at the
start of a session.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from csdctl.emulation.limits import cpu_time_s, list_descendants, list_marked

PACE_VARIABLE = "CSDCTL_TESTS_PACE"
T = TypeVar("T")
KNOWN_WORK = (sys.executable, "-c", "import asyncio, ssl, json, numpy; sum(range(3_000_000))")
KNOWN_WORK_S = 0.25
"""Seconds of `KNOWN_WORK` on an idle machine of 2024."""
STALL_S = 300.0
"""Without any progress for this long on a machine of pace 1, a command hangs."""
WAIT_S = 180.0
"""The same for a condition that shows no progress."""
BACKSTOP_S = 1200.0
"""A test that takes longer hangs in a way that looks like progress."""
BUSY_SHARE = 0.05
"""A command whose processes use less than this share of a core waits for something."""
LOOK_S = 0.5
NUM_LAST_LINES = 40


def measure_pace() -> float:
    """Return how many times slower than `KNOWN_WORK_S` this machine is now, 1 if it is faster."""
    began = time.monotonic()
    subprocess.run(KNOWN_WORK, check=True)
    return max(1.0, (time.monotonic() - began) / KNOWN_WORK_S)


def scaled(seconds: float) -> float:
    """Return `seconds` on the machine that the limits were written for, as seconds on this one."""
    return seconds * float(os.environ.get(PACE_VARIABLE, "1"))


def eventually(condition: Callable[[], object], progress: Callable[[], object] = lambda: None) -> bool:
    """Return whether `condition` becomes true before `progress()` has been the same for `WAIT_S`, scaled."""
    seen, since = progress(), time.monotonic()
    while not condition():
        if (now := progress()) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > scaled(WAIT_S):
            return False
        time.sleep(0.02)
    return True


def stays(condition: Callable[[], object], seconds: float) -> bool:
    """Return whether `condition` is still true after `seconds` of looking."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if not condition():
            return False
        time.sleep(0.02)
    return True


def list_logs(project: Path | None) -> list[Path]:
    """Return the events and logs of all runs of a project."""
    runs = project.glob(".csdctl/runs/*") if project is not None else []
    return [path for run in runs for path in (run / "events.jsonl", *run.glob("logs/*")) if path.is_file()]


def files_written(project: Path | None) -> int:
    """Return a number that changes whenever a run of the project writes an event or a line of a log."""
    try:
        return sum(path.stat().st_mtime_ns for path in list_logs(project))
    except FileNotFoundError:  # removed meanwhile, which is progress, too
        return time.monotonic_ns()


class StalledError(AssertionError):
    """A command made no progress any more; carries the last lines of what it printed and logged."""


class Activity:
    """Signs that a command and what it started still work: output, files, CPU time.

    Files are those of csdctl's state in `directory`; processes are all that these tests have started, the
    nodes of a lab too, and those of the emulated fleet of `directory`.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._seen: object = None
        self._cpu_s, self._since = self._cpu(), time.monotonic()

    def has_stalled(self, num_printed: int) -> bool:
        """Return whether there was no sign of work for `STALL_S`, scaled; `num_printed` characters so far."""
        seen, cpu_s, now = (num_printed, files_written(self._directory)), self._cpu(), time.monotonic()
        used_s = abs(cpu_s - self._cpu_s)  # less than before: processes have ended
        if seen != self._seen or used_s > BUSY_SHARE * max(LOOK_S, now - self._since):
            self._seen, self._cpu_s, self._since = seen, cpu_s, now
        return now - self._since > scaled(STALL_S)

    def _cpu(self) -> float:
        pids = set(list_descendants(os.getpid()))
        if self._directory is not None:
            with contextlib.suppress(OSError):
                fleet = (self._directory / ".csdctl/emulated/fleet.id").read_text().strip()
                pids |= set(list_marked(fleet))
        return sum(map(cpu_time_s, pids))

    def last_log_lines(self) -> str:
        """Return the last lines of the log that was written to last, with its name."""
        logs = sorted(list_logs(self._directory), key=lambda path: path.stat().st_mtime_ns)
        if not logs:
            return "(no log)"
        lines = logs[-1].read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        return "\n".join([f"{logs[-1]}:", *(line[:300] for line in lines)])


def communicate(
    process: "subprocess.Popen[str]", directory: Path | None = None, input_text: str | None = None
) -> tuple[str, str]:
    """Wait until `process` ends and return its output and errors.

    Raises StalledError, after killing it, when neither it nor what it started has made progress.
    """
    activity = Activity(directory)
    printed = 0
    while True:
        try:
            stdout, stderr = process.communicate(input_text, timeout=LOOK_S)
            return stdout or "", stderr or ""
        except subprocess.TimeoutExpired as waiting:
            input_text = None
            printed = len(waiting.output or b"") + len(waiting.stderr or b"")
        if activity.has_stalled(printed):
            raise _killed(process, activity, f"no progress for {scaled(STALL_S):.0f} s")


def wait_for(
    condition: Callable[[], T], process: "subprocess.Popen[Any]", directory: Path | None = None
) -> T:
    """Return what `condition` returns as soon as that is true.

    Raises StalledError, after killing `process`, when it has ended before or stalled as in `communicate`.
    """
    activity = Activity(directory)
    looked_s = time.monotonic()
    while not (result := condition()):
        if process.poll() is not None:
            if result := condition():  # it became true just before the end
                return result
            raise _killed(process, activity, "the command did not get there")
        if time.monotonic() - looked_s > LOOK_S:
            looked_s = time.monotonic()
            if activity.has_stalled(0):
                raise _killed(process, activity, f"no progress for {scaled(STALL_S):.0f} s")
        time.sleep(0.02)
    return result


def _killed(process: "subprocess.Popen[Any]", activity: Activity, problem: str) -> StalledError:
    """Kill `process` and what it started; return the error that says what it has printed and logged."""
    log = activity.last_log_lines()
    kill_tree(process.pid)
    printed = (
        text if isinstance(text, str) else (text or b"").decode(errors="replace")
        for text in process.communicate()
    )
    last = "\n".join("\n".join(printed).splitlines()[-NUM_LAST_LINES:])
    return StalledError(f"{problem}: {process.args}\n{last}\n{log}")


def run_command(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stderr: int | IO[bytes] = subprocess.PIPE,
) -> "subprocess.CompletedProcess[str]":
    """Run `command` to its end without input; raises StalledError like `communicate`."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
    )
    output, errors = communicate(process, cwd)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it."""
    for process in (pid, *list_descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
