"""`csdctl measurements`."""

from typing import Annotated

import typer

from csdctl.cli.options import JsonOption, YesOption
from csdctl.terminal.streams import Streams


def measurements(
    forget: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|all",
            help="Delete the measurements of a model (its name or hash), or all measurements.",
        ),
    ] = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Show earlier measurements and how well they predicted each trial, or delete them."""
    from csdctl.terminal.measurements import (
        forgotten_document,
        measurements_document,
        render_forgotten,
        render_measurements,
    )
    from csdctl.workflows.reporting.measurements import forget_measurements, load_measurements

    streams = Streams(is_json=json)
    if forget is not None:
        forgotten = forget_measurements(
            streams.project, forget, lambda question: streams.confirm(question, yes=yes), streams.say
        )
        render_forgotten(streams.console, forgotten)
        streams.result(forgotten_document(forgotten))
        return
    overview = load_measurements(streams.project, streams.say)
    path = str(streams.project.measurements.relative_to(streams.directory))
    if json:
        streams.result(measurements_document(overview, path))
    else:
        render_measurements(streams.console, overview, path)
