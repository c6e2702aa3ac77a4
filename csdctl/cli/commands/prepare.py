"""`csdctl prepare`."""

from csdctl.cli.call import Call, on_job


@on_job
def prepare(call: Call) -> None:
    """Convert data and model to the format that training reads; data stays where it is."""
    from csdctl.terminal.prepare import PreparingView, prepare_document, render_prepared
    from csdctl.workflows.data.prepare import prepare_fleet

    streams = call.streams
    with PreparingView(streams.views) as view:
        prepared = prepare_fleet(
            call.job, call.fleet, directory=call.directory, say=streams.say, on_progress=view.show
        )
    render_prepared(streams.console, prepared)
    streams.result(prepare_document(prepared))
