"""`report`, `export` and `measurements`: what runs have shown, as numbers or for other tools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from csdctl.documents import check_output, save_text
from csdctl.errors import InputError
from csdctl.notify import Say
from csdctl.reporting.export import render_csv, write_mlflow, write_tensorboard
from csdctl.reporting.page import render_page
from csdctl.reporting.privacy import Flow, Privacy, add_flows, count_passes, measure_privacy
from csdctl.reporting.results import RunResults, read_results
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.ledger import read_ledger
from csdctl.runs.measurements import MeasurementStore, Overview

TENSORBOARD, MLFLOW = FORMATS = ("tensorboard", "mlflow")


def report(
    project: ProjectDirectory, run_id: str, is_running: Callable[[RunDirectory], bool]
) -> tuple[RunDirectory, RunResults]:
    """Add up run `run_id`; raises InputError when it does not exist."""
    run = project.find_run(run_id)
    return run, replace(read_results(run), is_running=is_running(run))


def results(
    project: ProjectDirectory, run_ids: Sequence[str], is_running: Callable[[RunDirectory], bool]
) -> list[RunResults]:
    """Read these runs; raises InputError when one does not exist."""
    return [report(project, run_id, is_running)[1] for run_id in run_ids]


def write_files(
    project: ProjectDirectory,
    run_ids: Sequence[str],
    html: Path | None,
    csv: Path | None,
    is_running: Callable[[RunDirectory], bool],
    *,
    force: bool = True,
) -> list[Path]:
    """Write the report of the runs to the files that are asked for; returns them. Raises InputError."""
    for option, path in (("--html", html), ("--csv", csv)):
        if path:
            check_output(path, option, force=force)
    found = results(project, run_ids, is_running)
    wanted = ((html, render_page), (csv, render_csv))
    texts = {path: render(found) for path, render in wanted if path}
    for path, text in texts.items():
        save_text(path, text)
    return list(texts)


@dataclass(frozen=True)
class PrivacyReport:
    """What left the machines, and what the noise guarantees."""

    run_id: str
    of_run: list[Flow]
    of_all: list[Flow]
    """What all commands so far have sent."""
    privacy: Privacy | None


def privacy(project: ProjectDirectory, run_id: str) -> PrivacyReport:
    """Report on run `run_id`; raises InputError when it does not exist."""
    run = project.find_run(run_id)
    entries = list(read_ledger(project.ledger))
    manifest: Any = run.load_manifest()
    nodes = [rank["node"] for rank in manifest["plan"]["ranks"]]
    events = run.read_events(nodes) if run.events.exists() else ()
    return PrivacyReport(
        run.run_id,
        add_flows(entries, run.run_id),
        add_flows(entries),
        measure_privacy(manifest, count_passes(events, len(nodes))),
    )


def export(
    project: ProjectDirectory,
    run_id: str,
    to: str,
    output: Path | None,
    tracking_uri: str | None,
    *,
    force: bool = False,
) -> str:
    """Write run `run_id`; returns where it is.

    Raises InputError for an unknown format, a run that does not exist, or a package that is missing.
    """
    if to not in FORMATS:
        raise InputError(f"--to is {to!r}, expected {', '.join(FORMATS)}")
    if tracking_uri and to != MLFLOW:
        raise InputError("--tracking-uri requires --to mlflow", remedy="leave it out, or change --to")
    if output and to == MLFLOW:
        raise InputError("--output requires --to tensorboard", remedy="leave it out, or give --tracking-uri")
    run = read_results(project.find_run(run_id))
    if to == MLFLOW:
        return f"run {write_mlflow(run, tracking_uri)} of MLflow"
    path = output or Path(f"{run.summary.run_id}-tensorboard")
    if not path.is_dir():
        check_output(path, "--output", force=False)
    elif any(path.iterdir()) and not force:
        raise InputError(f"{path} already exists", remedy="overwrite it with --force, or change --output")
    write_tensorboard(run, path)
    return str(path)


def load_measurements(project: ProjectDirectory, say: Say) -> Overview:
    """Load the measurements of the project; raises CsdctlError."""
    return MeasurementStore(project.measurements, say).overview()
