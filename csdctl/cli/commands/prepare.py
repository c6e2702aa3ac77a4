"""`csdctl prepare`."""

from typing import Annotated

import typer

from csdctl.cli.options import (
    DEFAULT_FLEET,
    DEFAULT_JOB,
    ExcludeOption,
    FleetOption,
    JobArgument,
    JsonOption,
    LimitOption,
)
from csdctl.cli.streams import Streams


def prepare(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    sample: Annotated[
        str, typer.Option("--sample", help="First fill the job's data paths with a sample: fashion-mnist.")
    ] = "",
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Put data into a form that is read fast, where it lies, the model into one that travels."""
    from csdctl.cli.render.preparing import PreparingView, prepare_document, render_prepared
    from csdctl.job.model import load_job
    from csdctl.workflows.data.prepare import prepare_job
    from csdctl.workflows.data.sample_placement import place_sample
    from csdctl.workflows.workspace.partial_failure import choose_fleet
    from csdctl.workflows.workspace.workspace import open_workspace

    streams = Streams(is_json=json)
    loaded = load_job(job)
    chosen_fleet = choose_fleet(fleet, limit, exclude)
    with open_workspace(streams.directory, chosen_fleet, "prepare") as space:
        if sample:
            place_sample(sample, loaded, space.fleet, space.sessions, space.project, streams.say)
        with PreparingView(streams.people) as view:
            prepared = prepare_job(loaded, space.fleet, space.sessions, space.project, streams.say, view.show)
    private = sum(info.num_samples for info in prepared.private.values())
    render_prepared(streams.people, prepared)
    streams.say(
        f"ready: {prepared.public.num_samples:,} public samples on the host, "
        f"{private:,} private ones on {len(prepared.private)} nodes, "
        f"model with {prepared.model.info.num_parameters:,} parameters"
    )
    streams.result(prepare_document(prepared))
