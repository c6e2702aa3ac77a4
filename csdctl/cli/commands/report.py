"""`csdctl report`."""

from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.cli.options import JsonOption
from csdctl.cli.streams import Streams

if TYPE_CHECKING:
    from csdctl.runs.directory import ProjectDirectory


def report(
    run: Annotated[
        str | None, typer.Argument(help="The run's id; default: the latest.", show_default=False)
    ] = None,
    privacy: Annotated[
        bool,
        typer.Option(
            "--privacy", help="Instead: every byte that was sent, by link and by what it was; with noise, ε."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what a run came to."""
    from csdctl.cli.render.report import render_report, report_document
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.workflows.reporting.report import report as load_report

    streams = Streams(is_json=json)
    if privacy:
        _show_privacy(streams, ProjectDirectory(streams.directory), run)
        return
    directory, summary = load_report(ProjectDirectory(streams.directory), run)
    if json:
        streams.result(report_document(summary, str(directory.path)))
        return
    render_report(streams.people, summary)
    streams.say(f"run directory: {directory.path}")


def _show_privacy(streams: Streams, project: "ProjectDirectory", run_id: str | None) -> None:
    from csdctl.cli.render.privacy import privacy_document, render_privacy
    from csdctl.workflows.reporting.report import privacy

    found = privacy(project, run_id)
    if streams.is_json:
        streams.result(privacy_document(found))
    else:
        render_privacy(streams.people, found)
