"""`csdctl prepare`."""

from csdctl.cli import options
from csdctl.terminal.streams import Streams


def prepare(
    job: options.JobArgument = options.DEFAULT_JOB,
    fleet: options.FleetOption = options.DEFAULT_FLEET,
    limit: options.LimitOption = None,
    exclude: options.ExcludeOption = None,
    json: options.JsonOption = False,
) -> None:
    """Convert data and model to the format that training reads; data stays where it is."""
    from csdctl.job.model import load_job
    from csdctl.terminal.prepare import PreparingView, prepare_document, render_prepared
    from csdctl.workflows.data.prepare import prepare_fleet
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    loaded, chosen = load_job(job), choose_fleet(fleet, limit, exclude)
    with PreparingView(streams.views) as view:
        prepared = prepare_fleet(
            loaded, chosen, directory=streams.directory, say=streams.say, on_progress=view.show
        )
    render_prepared(streams.console, prepared)
    streams.result(prepare_document(prepared))
