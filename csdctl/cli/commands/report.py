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
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row for each run and epoch.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Show the results of a run, or of several side by side."""
    from csdctl.terminal import report as render
    from csdctl.workflows.reporting import report as reporting
    from csdctl.workflows.runs.manage import find_latest

    streams = Streams(is_json=json)
    ids = runs or [find_latest(streams.project, streams.say).run_id]
    if privacy:
        render.check_privacy_options(ids, has_files=bool(html or csv))
        render.show_privacy(streams, reporting.privacy(streams.project, ids[0]))
    elif html or csv:
        render.show_files(streams, reporting.write_files(streams.project, ids, html, csv))
    else:
        render.show_reports(streams, [reporting.report(streams.project, run_id) for run_id in ids])
