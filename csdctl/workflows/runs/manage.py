"""List, stop and remove runs."""

import shutil
from collections.abc import Callable
from dataclasses import replace

from csdctl.errors import InputError
from csdctl.reporting.run_status import RunStatus, load_run_status
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.workflows.runs.processes import interrupt, process_of, wait_until_over

RUNNING = "running"
UNREADABLE = "unreadable"
"""A directory that no csdctl has written."""


def list_runs(project: ProjectDirectory) -> list[RunStatus]:
    """Return all runs of the project, the oldest first."""
    found = []
    for run_id in project.run_ids():
        try:
            found.append(look_at(project.find_run(run_id)))
        except InputError:
            found.append(RunStatus(run_id, UNREADABLE))
    return found


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
