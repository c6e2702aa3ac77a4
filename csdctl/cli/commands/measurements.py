"""`csdctl measurements`."""

from csdctl.cli.options import JsonOption
from csdctl.terminal.streams import Streams


def measurements(json: JsonOption = False) -> None:
    """Show earlier measurements and how well they predicted each trial."""
    from csdctl.terminal.measurements import measurements_document, render_measurements
    from csdctl.workflows.reporting.report import load_measurements

    streams = Streams(is_json=json)
    overview = load_measurements(streams.project, streams.say)
    path = str(streams.project.measurements.relative_to(streams.directory))
    if json:
        streams.result(measurements_document(overview, path))
    else:
        render_measurements(streams.console, overview, path)
