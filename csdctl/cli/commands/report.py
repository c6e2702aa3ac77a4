"""`csdctl report`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.completion import complete_runs
from csdctl.terminal.streams import Streams

HtmlOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write charts and tables as one HTML file, which loads nothing."),
]
CsvOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a row for each run and epoch.")]


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids of runs, shown side by side; default: the latest.",
            metavar="[RUN]...",
            autocompletion=complete_runs,
        ),
    ] = None,
    privacy: Annotated[
        bool,
        typer.Option(
            "--privacy",
            help="Show the bytes sent instead, by link and traffic class; with noise, also ε.",
        ),
    ] = False,
    html: HtmlOption = None,
    csv: CsvOption = None,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="Compare runs with 0, 1, 2 … nodes: speed-up, efficiency, energy."),
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Show the results of a run, or of several side by side."""
    from csdctl.terminal import report as render
    from csdctl.workflows.reporting import report as reporting

    streams, ids = Streams(is_json=json), runs or []
    render.check_options(ids, is_privacy=privacy, is_scaling=scaling, has_files=bool(html or csv))
    if scaling:
        series = reporting.scaling(streams.project, ids)
        render.show_scaling(streams, series, reporting.write_scaling(series, html, csv))
    elif privacy:
        render.show_privacy(streams, reporting.privacy(streams.project, ids[0] if ids else None))
    elif html or csv:
        render.show_files(streams, reporting.write_files(streams.project, ids, html, csv))
    else:
        render.show_reports(streams, [reporting.report(streams.project, run_id) for run_id in ids or (None,)])
