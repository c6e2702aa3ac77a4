"""`export`: a run in the formats of other tools."""

from collections.abc import Callable
from pathlib import Path

from csdctl.documents import save_text
from csdctl.errors import InputError
from csdctl.reporting.export import render_csv, render_prometheus, write_mlflow, write_tensorboard
from csdctl.reporting.results import RunResults
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.reporting.report import results

TENSORBOARD, MLFLOW, PROMETHEUS, CSV = FORMATS = ("tensorboard", "mlflow", "prometheus", "csv")
Write = Callable[[RunResults, Path], None]


def export(
    project: ProjectDirectory, run_id: str | None, to: str, output: Path | None, tracking_uri: str | None
) -> str:
    """Write run `run_id`, or the latest; returns where it is.

    Raises InputError for an unknown format, a run that does not exist, or a package that is missing.
    """
    if to not in FORMATS:
        raise InputError(f"--to is {to!r}, expected {', '.join(FORMATS)}")
    if (tracking_uri and to != MLFLOW) or (output and to == MLFLOW):
        raise InputError("--tracking-uri is for mlflow, --output for the other formats")
    (run,) = results(project, [run_id] if run_id else [])
    if to == MLFLOW:
        return f"run {write_mlflow(run, tracking_uri)} of MLflow"
    suffix, write = WRITERS[to]
    path = output or Path(f"{run.summary.run_id}{suffix}")
    write(run, path)
    return str(path)


def _write_prometheus(run: RunResults, path: Path) -> None:
    save_text(path, render_prometheus(run))
    path.chmod(0o644)  # node_exporter runs as another user


def _write_csv(run: RunResults, path: Path) -> None:
    save_text(path, render_csv([run]))


WRITERS: dict[str, tuple[str, Write]] = {
    TENSORBOARD: ("-tensorboard", write_tensorboard),
    PROMETHEUS: (".prom", _write_prometheus),
    CSV: (".csv", _write_csv),
}
"""By format: what follows the run's id in the name of the file, and what writes it."""
