"""`csdctl prepare`."""

from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.streams import Streams


def prepare(
    job: options.JobArgument = options.DEFAULT_JOB,
    fleet: options.FleetOption = options.DEFAULT_FLEET,
    sample: Annotated[
        str,
        typer.Option(
            "--sample",
            help="First fill the job's data paths with a sample data set: fashion-mnist or openclipart. "
            "Without job.yaml, fashion-mnist also writes one.",
        ),
    ] = "",
    dry_run: options.DryRunOption = False,
    limit: options.LimitOption = None,
    exclude: options.ExcludeOption = None,
    json: options.JsonOption = False,
) -> None:
    """Convert data and model to the format that training reads; data stays where it is."""
    from csdctl.cli.render.prepare import PreparingView, prepare_document, render_prepared, show_rehearsal
    from csdctl.job.model import load_job
    from csdctl.workflows.data.demo import write_sample_job
    from csdctl.workflows.data.prepare import prepare_fleet
    from csdctl.workflows.data.rehearsal import rehearse_preparation
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    chosen = choose_fleet(fleet, limit, exclude)
    if not dry_run:
        write_sample_job(job, sample, streams.say)
    loaded = load_job(job)
    if dry_run:
        show_rehearsal(
            streams, rehearse_preparation(loaded, chosen, directory=streams.directory, sample=sample)
        )
        return
    with PreparingView(streams.views) as view:
        prepared = prepare_fleet(
            loaded,
            chosen,
            directory=streams.directory,
            sample=sample,
            say=streams.say,
            on_progress=view.show,
        )
    render_prepared(streams.console, prepared)
    streams.result(prepare_document(prepared))
