"""`csdctl report`."""

from typing import Annotated

import typer

from csdctl.cli.options import JsonOption
from csdctl.cli.streams import Streams


def report(
    run: Annotated[
        str | None, typer.Argument(help="The run's id; default: the latest.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what a run came to."""
    from csdctl.cli.render.report import render_report, report_document
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.workflows.report import report as load_report

    streams = Streams(is_json=json)
    directory, summary = load_report(ProjectDirectory(streams.directory), run)
    if json:
        streams.result(report_document(summary, str(directory.path)))
        return
    render_report(streams.people, summary)
    streams.say(f"run directory: {directory.path}")
