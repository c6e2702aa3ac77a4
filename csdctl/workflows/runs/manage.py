"""List, compare, stop and remove runs, each with the csdctl process that trains it."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from csdctl.documents import load_json
from csdctl.errors import CsdctlError, DeadlineError, InputError
from csdctl.launch.leftovers import describe_holder, is_gone, read_holder, show_holder
from csdctl.notify import Say
from csdctl.reporting.results import RUNNING, RunStatus, load_run_status, read_results
from csdctl.runs.directory import LATEST, ProjectDirectory, RunDirectory

SETTINGS = (
    "csdctl",
    "python",
    "versions",
    "job",
    "recipe",
    "noise",
    "data",
    "strategy",
    "cut",
    "features",
    "plan",
)
"""Keys of manifest.json that are compared; what follows from them is left out."""
NO_SETTINGS = ("plan.made_for", "plan.strategies", "plan.predicted", "plan.measuring_s", "plan.num_probes")
RESULTS = (
    "state",
    "epochs",
    "steps",
    "samples",
    "training_s",
    "samples_per_s",
    "efficiency",
    "loss",
    "accuracy",
    "validation_loss",
    "validation_accuracy",
    "lost_nodes",
    "num_rebalanced",
)


@dataclass(frozen=True)
class Difference:
    """One value in which two runs differ; None where a run has none."""

    name: str
    first: object
    second: object
    is_result: bool


def compare_runs(
    project: ProjectDirectory, first: str, second: str
) -> tuple[RunDirectory, RunDirectory, list[Difference]]:
    """Return two runs and the values in which they differ, settings before results; raises InputError."""
    runs = project.find_run(first), project.find_run(second)
    found = []
    for read in (_settings, _results):
        one, other = (read(run) for run in runs)
        found += [
            Difference(name, one.get(name), other.get(name), read is _results)
            for name in dict.fromkeys([*one, *other])
            if one.get(name) != other.get(name)
        ]
    return *runs, found


def _settings(run: RunDirectory) -> dict[str, object]:
    manifest: Mapping[str, Any] = run.load_manifest()
    values = _flatten({key: manifest.get(key) for key in SETTINGS})
    return {name: value for name, value in values if not name.startswith(NO_SETTINGS)}


def _results(run: RunDirectory) -> dict[str, object]:
    summary = read_results(run).summary if run.events.exists() else None
    return {name: getattr(summary, name) for name in RESULTS} if summary else {}


def _flatten(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield nested values by a name such as plan.host.batch_size; ranks by their node."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and all(isinstance(inner, Mapping) and "node" in inner for inner in value):
        for inner in value:
            yield from _flatten(inner, f"{name}.{inner['node']}")
    else:
        yield name, value


POLL_S = 0.2


@dataclass(frozen=True)
class RunProcess:
    """The csdctl that trains a run, or the last one that did."""

    holder: Mapping[str, object]

    @property
    def is_alive(self) -> bool:
        """Whether it may exist: a process of another machine cannot be seen from here."""
        return bool(self.holder) and not is_gone(self.holder)

    @property
    def is_running(self) -> bool:
        """Whether it may be at work on the run: a notebook or a demo outlives its runs."""
        return self.is_alive and "ended" not in self.holder

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this machine."""
        mine = describe_holder("", Path())
        return self.holder.get("machine") == mine["machine"]

    @property
    def pid(self) -> int | None:
        """Its process id."""
        pid = self.holder.get("pid")
        return pid if isinstance(pid, int) else None

    def describe(self) -> str:
        """Return the process as one line of text."""
        return show_holder(self.holder)


def process_of(run: RunDirectory) -> RunProcess:
    """Return the process that trains `run`; one without a description is not running."""
    try:
        return RunProcess(read_holder(load_json(run.process)))
    except InputError:
        return RunProcess({})


def interrupt(run: RunDirectory) -> None:
    """Ask the csdctl that trains `run` to stop, as the first Ctrl-C does; raises InputError, CsdctlError."""
    process = process_of(run)
    if not process.is_running or process.pid is None:
        raise InputError(f"run {run.run_id} is not running", remedy="csdctl runs list shows the runs' states")
    if not process.is_here:
        raise InputError(
            f"run {run.run_id} is trained by {process.describe()}", remedy="stop it on that machine"
        )
    try:
        # Whatever gets the process id next cannot be signalled through the handle.
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise InputError(f"run {run.run_id} has ended") from None
    try:
        if process_of(run).is_running:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise CsdctlError(
            f"process {process.pid} belongs to another user", remedy="stop the run as that user"
        ) from None
    finally:
        os.close(handle)


def wait_until_over(run: RunDirectory, deadline_s: float) -> None:
    """Wait until the csdctl that trains `run` has ended; raises DeadlineError."""
    end = time.monotonic() + deadline_s
    while process_of(run).is_running:
        if time.monotonic() > end:
            raise DeadlineError(
                f"run {run.run_id} has not ended after {deadline_s:g} s",
                remedy="repeat the command to end its ranks at once",
            )
        time.sleep(POLL_S)


def list_runs(project: ProjectDirectory, say: Say) -> list[RunStatus]:
    """Return all runs of the project, the oldest first; `say` names directories that are no run."""
    found = []
    for run_id in project.run_ids():
        with _skipping(run_id, say):
            run = project.find_run(run_id)
            status = look_at(run)
            if not status.num_ranks:
                run.load_manifest()  # says what is wrong with it
            found.append(status)
    return found


def find_run(project: ProjectDirectory, run_id: str | None, say: Say) -> RunDirectory:
    """Return the run `run_id`; None and LATEST: the latest one, and `say` names directories that are no run.

    Where all are skipped, the latest directory is returned. Raises InputError when there is none.
    """
    for name in reversed(project.run_ids()) if run_id in (None, LATEST) else ():
        with _skipping(name, say):
            run = project.find_run(name)
            run.load_manifest()
            return run
    return project.find_run(run_id)


@contextmanager
def _skipping(run_id: str, say: Say) -> Iterator[None]:
    """Warn instead of raising InputError: a foreign, empty or damaged directory must not hide the runs."""
    try:
        yield
    except InputError as error:
        say(f"warning: {run_id} is skipped: {error.message}")


def look_at(run: RunDirectory) -> RunStatus:
    """Return what `run` has come to; its state is RUNNING while its csdctl is at work."""
    status = load_run_status(run)
    return replace(status, state=RUNNING) if process_of(run).is_running else status


def stop_run(project: ProjectDirectory, run_id: str | None, deadline_s: float) -> RunStatus:
    """Stop a run as the first Ctrl-C does, and wait for its end.

    Raises InputError for a run that is not running, DeadlineError when it goes on for longer.
    """
    run = _only_running(project) if run_id is None else project.find_run(run_id)
    interrupt(run)
    wait_until_over(run, deadline_s)
    return load_run_status(run)


def _only_running(project: ProjectDirectory) -> RunDirectory:
    running = [run for name in project.run_ids() if process_of(run := project.find_run(name)).is_running]
    if len(running) != 1:
        raise InputError(
            f"{len(running)} runs are running" if running else f"no run in {project.runs} is running",
            remedy="csdctl runs list shows the runs' states",
        )
    return running[0]


def remove_runs(
    project: ProjectDirectory, run_ids: Sequence[str], confirm: Callable[[str], None]
) -> list[RunDirectory]:
    """Remove runs with their models and checkpoints; `confirm` raises to refuse.

    Raises InputError for a run that does not exist or is running; nothing is removed then.
    """
    runs = list(dict.fromkeys(project.find_run(run_id) for run_id in run_ids))
    for run in runs:
        process = process_of(run)
        if process.is_running:
            raise InputError(
                f"run {run.run_id} is running: {process.describe()}", remedy=f"csdctl runs stop {run.run_id}"
            )
    described = (f"{run.run_id}{' with its model' if run.model.exists() else ''}" for run in runs)
    confirm(f"Remove run{'s' if len(runs) > 1 else ''} {', '.join(described)}?")
    for run in runs:
        project.step_file(run).unlink(missing_ok=True)
        shutil.rmtree(run.path)
    return runs
