"""`csdctl forecast`."""

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
from csdctl.perfmodel.published import Network


def forecast(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    published: Annotated[
        Network | None,
        typer.Option(
            "--published",
            help="Instead of a job: this network with the figures of the STANNIS paper, on Newport CSDs.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="NUMBERS",
            help="For so many nodes: 24, 1..36, or 4,8,16; default: 0 to all of them.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Instead of the job's.", show_default=False)
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=1,
            help="Samples of an epoch, public and private: for the time to finish.",
            show_default=False,
        ),
    ] = None,
    max_global_batch: Annotated[
        int | None,
        typer.Option(
            "--max-global-batch",
            min=1,
            help="Instead of the limit that the plan was tuned with.",
            show_default=False,
        ),
    ] = None,
    host_watts: Annotated[
        float | None,
        typer.Option(
            "--host-watts", help="Power whatever the number of nodes that train.", show_default=False
        ),
    ] = None,
    node_watts: Annotated[
        float | None,
        typer.Option("--node-watts", help="Power that each node that trains adds.", show_default=False),
    ] = None,
    alone_watts: Annotated[
        float | None,
        typer.Option(
            "--alone-watts",
            help="Power of the host alone, with ordinary drives; default: --host-watts.",
            show_default=False,
        ),
    ] = None,
    sum_seconds: Annotated[
        float | None,
        typer.Option(
            "--sum-seconds",
            min=0,
            help="Seconds that each node adds to the sum over the ranks.",
            show_default=False,
        ),
    ] = None,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Forecast throughput, time and energy for any number of nodes."""
    from csdctl.cli.render.forecast import forecast_document, render_forecast
    from csdctl.errors import InputError
    from csdctl.job.model import load_job
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.workflows.forecast.basis import published_basis
    from csdctl.workflows.forecast.forecast import ForecastRequest, forecast, given_power, parse_node_counts
    from csdctl.workflows.forecast.tuned_basis import tuned_basis
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    question = ForecastRequest(
        parse_node_counts(nodes) if nodes is not None else None,
        epochs,
        samples,
        given_power(host_watts, node_watts, alone_watts),
        sum_seconds,
    )
    if published and max_global_batch:
        raise InputError("the paper's batch sizes are what they are", remedy="leave out --max-global-batch")
    if published:
        basis = published_basis(published)
    elif not job.exists():
        raise InputError(
            f"{job} does not exist",
            remedy=f"name a job that was tuned, or ask without one: --published {Network.MOBILENETV2}",
        )
    else:
        chosen = choose_fleet(fleet, limit, exclude) if fleet.exists() or limit or exclude else None
        project = ProjectDirectory(streams.directory)
        basis = tuned_basis(load_job(job), project, chosen, streams.say, samples, max_global_batch)
    answer = forecast(basis, question)
    if json:
        streams.result(forecast_document(answer))
    else:
        render_forecast(streams.console, answer)
