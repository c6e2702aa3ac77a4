"""List, stop and remove runs."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from csdctl.errors import InputError
from csdctl.notify import Say
from csdctl.reporting.results import RunStatus, load_run_status
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.workflows.runs.processes import interrupt, process_of, wait_until_over

RUNNING = "running"


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


def find_latest(project: ProjectDirectory, say: Say) -> RunDirectory:
    """Return the latest run; `say` names later directories that are no run.

    Where all are skipped, the latest directory is returned. Raises InputError when there is none.
    """
    for run_id in reversed(project.run_ids()):
        with _skipping(run_id, say):
            run = project.find_run(run_id)
            run.load_manifest()
            return run
    return project.find_run(None)


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


def remove_run(project: ProjectDirectory, run_id: str, confirm: Callable[[str], None]) -> RunDirectory:
    """Remove a run with its model and checkpoints; `confirm` raises to refuse.

    Raises InputError for a run that is running.
    """
    run = project.find_run(run_id)
    process = process_of(run)
    if process.is_running:
        raise InputError(
            f"run {run.run_id} is running: {process.describe()}", remedy=f"csdctl runs stop {run.run_id}"
        )
    model = " with its model" if run.model.exists() else ""
    confirm(f"Remove run {run.run_id}{model}?")
    project.step_file(run).unlink(missing_ok=True)
    shutil.rmtree(run.path)
    return run
