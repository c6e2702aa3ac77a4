"""`csdctl report`."""

from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.streams import Streams

RunArgument = Annotated[
    str | None, typer.Argument(help="Id of the run; default: the latest.", show_default=False)
]
PrivacyOption = Annotated[
    bool,
    typer.Option(
        "--privacy",
        help="Show the bytes sent instead, by link and traffic class; with noise, also ε.",
    ),
]


def report(run: RunArgument = None, privacy: PrivacyOption = False, json: options.JsonOption = False) -> None:
    """Show the results of a run."""
    from csdctl.cli.render.privacy import show_privacy
    from csdctl.cli.render.report import show_report
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.workflows.reporting import report as reporting

    streams = Streams(is_json=json)
    project = ProjectDirectory(streams.directory)
    if privacy:
        show_privacy(streams, reporting.privacy(project, run))
    else:
        show_report(streams, *reporting.report(project, run))
