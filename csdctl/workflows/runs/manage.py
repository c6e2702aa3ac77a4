"""List, stop, remove and follow runs, each with the csdctl process that trains it.

A run is followed only from its files: nothing of it waits for who watches. A run in the background is
`csdctl train` in a separate session, which outlives its terminal and its login.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, TypeVar

from csdctl.documents import load_kept, load_text, save_json
from csdctl.errors import CsdctlError, DeadlineError, ExitCode, InputError, RunError
from csdctl.launch.leftovers import is_elsewhere, is_gone, is_held, read_holder, show_holder
from csdctl.notify import DATED, DETACHED, Say, shorten, warn
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.reporting import results
from csdctl.reporting.results import COMPLETED, RUNNING, RunStatus, Statuses, load_run_status
from csdctl.runs.directory import (
    LATEST,
    ProjectDirectory,
    RunDirectory,
    began_s,
    check_links,
    find_run,
    skipping,
)
from csdctl.runs.private import check_directory
from csdctl.runs.stored_events import EVENTS_LOST
from csdctl.worker.protocol.durable_files import make_directory
from csdctl.worker.protocol.events import STOPPED, Event
from csdctl.workflows.workspace.event_stream import RunStarted

StatusT = TypeVar("StatusT", RunStatus, results.RunSummary)
POLL_S = 0.2
"""Seconds between two looks at a run's process."""
OWN = "csdctl"
"""Name of the log of csdctl itself, of a run that was detached."""
NUM_REPEATED_LINES = 5
"""Last lines of a csdctl in the background that its error repeats."""


@dataclass(frozen=True)
class RunProcess:
    """The csdctl that trains a run, or the last one that did. Without a description `holder` is {}."""

    holder: Mapping[str, object]
    pid: int | None
    is_alive: bool
    """Whether it may exist: a process of another machine cannot be seen from here."""
    is_running: bool
    """Whether it may be at work on the run: a notebook or a demo outlives its runs."""


def process_of(run: RunDirectory) -> RunProcess:
    """Return the process that trains `run`. One without a description is not running."""
    holder = read_holder(run.load_process())
    pid = holder.get("pid")
    if not isinstance(pid, int) or is_gone(holder):
        return RunProcess(holder, None, is_alive=False, is_running=False)
    # The directory may be a copy, or come from others: another process may have this id here.
    is_at_work = "ended" not in holder and (is_elsewhere(holder) or is_held(run.path, pid))
    return RunProcess(holder, pid, is_alive=True, is_running=is_at_work)


def interrupt(run: RunDirectory) -> None:
    """Ask the csdctl that trains `run` to stop, as the first Ctrl-C does. Raises InputError, CsdctlError."""
    process = process_of(run)
    if not process.is_running or process.pid is None:
        raise InputError(f"run {run.run_id} is not running", remedy="csdctl runs list shows the runs' states")
    if is_elsewhere(process.holder):
        problem = f"run {run.run_id} is trained by {show_holder(process.holder)}"
        remedy = f"stop it on that machine; if it has ended there, remove {run.process}"
        raise InputError(problem, remedy=remedy)
    try:
        # Whatever gets the process id next cannot be signalled through the handle.
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise InputError(f"run {run.run_id} has ended") from None
    try:
        if process_of(run).is_running:
            signal.pidfd_send_signal(handle, _stopping_signal(process.pid))
    except ProcessLookupError:
        pass
    except PermissionError:
        problem = f"process {process.pid} belongs to another user"
        raise CsdctlError(problem, remedy="stop the run as that user") from None
    finally:
        os.close(handle)


def _stopping_signal(pid: int) -> signal.Signals:
    """Return SIGTERM, or SIGINT for a program of the user's, which SIGTERM would end at once."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        handled = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        if handled and not int(handled[1], 16) >> (signal.SIGTERM - 1) & 1:
            return signal.SIGINT
    return signal.SIGTERM


def list_runs(project: ProjectDirectory, say: Say) -> list[RunStatus]:
    """Return all runs of the project, the oldest first. `say` names directories that are no run."""
    kept, now = load_kept(project.statuses, Statuses) or {}, Statuses()
    statuses = []
    for run_id in project.run_ids():
        with skipping(run_id, say):
            run = RunDirectory(project.runs / run_id)
            check_links(run.path)
            current = load_run_status(run, kept.get(run_id))
            if not current.status.num_ranks:
                run.read_manifest()  # says what is wrong with it
            now[run_id] = current
            is_certain = current.has_ended and current.status.state == COMPLETED
            statuses.append(current.status if is_certain else as_process_says(run, current.status))
    if now != kept:
        with suppress(OSError, UnicodeError):  # of names that are not UTF-8
            save_json(project.statuses, now, indent=None)
    return statuses


def look_at(run: RunDirectory) -> RunStatus:
    """Return what `run` has come to. Its state is RUNNING while its csdctl is at work."""
    return as_process_says(run, load_run_status(run).status)


def as_process_says(run: RunDirectory, status: StatusT) -> StatusT:
    """Return the status of `run` by its events, corrected by what its csdctl has recorded about itself."""
    process = process_of(run)
    if process.is_running:
        return replace(status, state=RUNNING)
    is_unfinished, end = status.state in (results.INTERRUPTED, results.FAILED), run.load_process()
    if is_unfinished and "ended" in end and not end.get("state"):  # without an error
        state = results.STOPPED if status.reason == STOPPED else results.COMPLETED
        return replace(status, state=state, reason=status.reason or EVENTS_LOST)
    return status


def stop_run(project: ProjectDirectory, run_id: str | None, deadline_s: float, say: Say) -> RunStatus:
    """Stop a run as the first Ctrl-C does, and wait for its end. `say` names runs that cannot be read.

    Raises InputError for a run that is not running, DeadlineError when it goes on for longer.
    """
    run = _only_running(project, say) if run_id is None else find_run(project, run_id, say)
    interrupt(run)
    end = time.monotonic() + deadline_s
    while process_of(run).is_running:
        if time.monotonic() > end:
            problem = f"run {run.run_id} has not ended after {deadline_s:g} s"
            raise DeadlineError(problem, remedy="repeat the command to end its ranks at once")
        time.sleep(POLL_S)
    return load_run_status(run).status


def _only_running(project: ProjectDirectory, say: Say) -> RunDirectory:
    running = []
    for name in project.run_ids():
        with skipping(name, say):
            running += [run] if process_of(run := project.find_run(name)).is_running else []
    if len(running) != 1:
        problem = f"{len(running)} runs are running" if running else f"no run in {project.runs} is running"
        raise InputError(problem, remedy="csdctl runs list shows the runs' states")
    return running[0]


def remove_runs(
    project: ProjectDirectory, run_ids: Sequence[str], confirm: Callable[[str], None]
) -> list[RunDirectory]:
    """Remove runs with their models and checkpoints. `confirm` raises to refuse.

    Raises InputError, before anything is removed, for a run that does not exist or is running.
    """
    runs = list(dict.fromkeys(project.find_run(run_id) for run_id in run_ids))
    complete = {LATEST, *project.run_ids()}
    if short := [name for name in run_ids if name not in complete and len(name) < len("YYYYMMDD-HHMMSS")]:
        problem = f"received {short[0]!r}, expected date and time of a run, such as 20260131-120000"
        raise InputError(problem, remedy="csdctl runs list")
    for run in runs:
        process = process_of(run)
        if process.is_running:
            problem = f"run {run.run_id} is running: {show_holder(process.holder)}"
            raise InputError(problem, remedy=f"csdctl runs stop {run.run_id}")
    described = (f"{run.run_id}{' with its model' if run.model.exists() else ''}" for run in runs)
    confirm(f"Remove run{'s' if len(runs) > 1 else ''} {shorten(', '.join(described), 500)}?")
    for run in runs:
        project.step_file(run).unlink(missing_ok=True)
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            error.filename = run.path  # without its directory
            raise
    return runs


StoredRun = tuple[RunStatus, int, str]
"""A run, its bytes on disk, and why no rule removes it: it runs, is the latest, or a YAML file names it."""


def read_stored(project: ProjectDirectory, say: Say) -> Iterator[StoredRun]:
    """Yield all runs, the oldest first. `say` names those that cannot be read."""
    texts = {}
    for path in (*project.root.glob("*.y*ml"), *project.state.glob("plans/*.yaml")):
        texts[path.name] = load_text(path, errors="replace")
    runs = list_runs(project, say)
    for run in runs:
        num_bytes = 0
        for place, _, names in os.walk(project.runs / run.run_id):
            for name in names:
                with suppress(FileNotFoundError):  # removed meanwhile
                    num_bytes += os.lstat(os.path.join(place, name)).st_blocks * 512
        needed = [f"named in {name}" for name, text in texts.items() if run.run_id in text]
        needed += [f"`{LATEST}`"] * (run is runs[-1]) + [RUNNING] * (run.state == RUNNING)
        yield run, num_bytes, ", ".join(needed)


def latest_s(run: RunStatus) -> float:
    """Return the Unix time of a run's last event. Without events, when it began by its id, or now."""
    return run.last_event_s or began_s(run.run_id) or time.time()


def choose_runs(
    runs: Sequence[StoredRun], older_than_s: float | None, max_bytes: int | None, num_kept: int | None
) -> list[StoredRun]:
    """Return the runs that the rules name, with those that stay because they are needed.

    Named is a run whose last event is older, and one that must go so that all others have at most
    `max_bytes`, except for the newest `num_kept`. Without the first two rules, all but the newest are named.
    """
    named, left_bytes = [], sum(num_bytes for _, num_bytes, _ in runs)
    for run, num_bytes, needed in runs[: max(0, len(runs) - (num_kept or 0))]:
        is_old = older_than_s is not None and time.time() - latest_s(run) > older_than_s
        is_too_much = max_bytes is not None and left_bytes > max_bytes
        if is_old or is_too_much or (older_than_s is None and max_bytes is None):
            named.append((run, num_bytes, needed))
            left_bytes -= 0 if needed else num_bytes
    return named


def follow_run(run: RunDirectory) -> tuple[RunStarted, Iterator[tuple[float, Event]]]:
    """Wait until `run` starts its ranks. Return its start and, as they come, all events with their Unix time.

    Raises InputError for a run that ended before.
    """
    from csdctl.workflows.train.resume import load_spec  # here, because it loads all of training

    while not run.spec.exists():
        if not process_of(run).is_running:
            raise InputError(
                f"run {run.run_id} ended before its ranks were started",
                remedy=f"csdctl runs logs {run.run_id} {OWN}, if it was detached, shows why",
            )
        time.sleep(POLL_S)
    spec, manifest = load_spec(run), run.read_manifest()
    events = run.read_events([rank.node for rank in spec.ranks])
    following = events.follow(lambda: not process_of(run).is_running, interval_s=0.5)
    num_steps, emulated = steps_per_epoch(manifest.placed), bool(manifest.plan.emulated)
    return RunStarted(run, spec, num_steps, manifest.predicted_range, emulated), following


def find_logs(run: RunDirectory, which: str | None) -> list[Path]:
    """Return the paths of the run's logs: all, or one by its rank, its node, or OWN. Raises InputError."""
    try:
        names = run.read_manifest().nodes
    except InputError:
        names = [f"rank-{number}" for number, _ in enumerate(run.logs.glob("rank-*.log"))]
    check_directory(run.logs)
    logs = {OWN: run.own_log, **{node: run.rank_log(number) for number, node in enumerate(names)}}
    for path in logs.values():
        if os.path.lexists(path) and not path.is_file():
            warn(f"warning: {path} is not a file")
    logs = {name: path for name, path in logs.items() if path.is_file()}
    if which is None:
        return list(logs.values())
    name = names[int(which)] if which.isdecimal() and int(which) < len(names) else which
    if name not in logs:
        raise InputError(
            f"run {run.run_id} has no log {which!r}", remedy=f"it has: {', '.join(logs) or 'none'}"
        )
    return [logs[name]]


def print_logs(run: RunDirectory, paths: Sequence[Path], num_lines: int, *, is_following: bool) -> None:
    """Print the ends of logs, which have only printable text, and what is added until the run ends."""
    process = process_of(run)
    following = ["-f", f"--pid={process.pid}"] if is_following and process.is_running else []
    with suppress(KeyboardInterrupt):
        subprocess.run(["tail", "-n", str(num_lines), *following, "--", *paths], check=False)


def start_detached(project: ProjectDirectory, arguments: Sequence[str], say: Say) -> RunDirectory | None:
    """Run csdctl with `arguments` in the background. Return its run once that trains. None: nothing to train.

    Until then what it prints is passed to `say`, and Ctrl-C ends it. Raises RunError when it fails before.
    """
    make_directory(project.state)
    log = project.state / f"detached-{os.getpid()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["nohup", sys.executable, "-P", "-m", "csdctl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=project.root,
            start_new_session=True,
            env={**os.environ, DETACHED: "1"},
        )
    try:
        with log.open(errors="replace") as lines:
            run = _wait_for_run(project, process, lines, say)
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
    project: ProjectDirectory, process: "subprocess.Popen[bytes]", log: TextIO, say: Say
) -> RunDirectory | None:
    before = set(project.run_ids())
    output: deque[str] = deque(maxlen=NUM_REPEATED_LINES)
    while True:
        code = process.poll()
        for line in log:
            output.append(DATED.sub("", line.rstrip("\n"), count=1))
            say(output[-1])
        for name in project.run_ids():
            run = RunDirectory(project.runs / name)
            holder = process_of(run)
            # A run that is resumed has its events from before.
            if holder.pid == process.pid and holder.is_alive and (name in before or run.events.exists()):
                return run
        if code == 0:
            return None
        if code is not None:
            error = RunError(f"csdctl ended with exit code {code} before it trained:\n" + "\n".join(output))
            error.exit_code = ExitCode(code) if code in list(ExitCode) else ExitCode.FAILED
            raise error
        time.sleep(POLL_S)
