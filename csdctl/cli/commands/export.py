"""`csdctl export`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.completion import complete_runs
from csdctl.terminal.streams import Streams


def export(
    to: Annotated[str, typer.Option(metavar="FORMAT", help="tensorboard or mlflow.")],
    run: Annotated[
        str | None,
        typer.Argument(
            help="Id of the run; default: the latest.",
            metavar="[RUN]",
            autocompletion=complete_runs,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="TensorBoard's directory; default: RUN-tensorboard."),
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option(metavar="URI", help="MLflow's server or directory; default: MLflow's own.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Write a run for TensorBoard or MLflow."""
    from csdctl.workflows.reporting.report import export as export_run
    from csdctl.workflows.runs.manage import find_latest

    streams = Streams(is_json=json)
    run_id = run or find_latest(streams.project, streams.say).run_id
    written = export_run(streams.project, run_id, to, output, tracking_uri)
    if streams.is_json:
        streams.result({"schema": "csdctl.export/1", "format": to, "written": written})
    streams.say(f"wrote {written}")
