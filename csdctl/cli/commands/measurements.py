"""`csdctl measurements`."""

from csdctl.cli.options import JsonOption
from csdctl.terminal.streams import Streams


def measurements(json: JsonOption = False) -> None:
    """Show earlier measurements and how well they predicted each trial."""
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.terminal.measurements import measurements_document, render_measurements
    from csdctl.workflows.reporting.measurements import load_measurements

    streams = Streams(is_json=json)
    project = ProjectDirectory(streams.directory)
    overview = load_measurements(project, streams.say)
    path = str(project.measurements.relative_to(streams.directory))
    if json:
        streams.result(measurements_document(overview, path))
    else:
        render_measurements(streams.console, overview, path)
