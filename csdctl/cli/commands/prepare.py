"""`csdctl prepare`."""

from csdctl.cli import options
from csdctl.cli.call import Call, on_job


@on_job
def prepare(
    call: Call,
    dry_run: options.DryRunOption = False,
) -> None:
    """Convert data and model to the format that training reads; data stays where it is."""
    from csdctl.terminal.prepare import PreparingView, prepare_document, render_prepared, show_rehearsal
    from csdctl.workflows.data.prepare import prepare_fleet
    from csdctl.workflows.data.rehearsal import rehearse_preparation

    streams = call.streams
    if dry_run:
        show_rehearsal(streams, rehearse_preparation(call.job, call.fleet, directory=call.directory))
        return
    with PreparingView(streams.views) as view:
        prepared = prepare_fleet(
            call.job, call.fleet, directory=call.directory, say=streams.say, on_progress=view.show
        )
    render_prepared(streams.console, prepared)
    streams.result(prepare_document(prepared))
