"""`csdctl forecast`."""

from typing import Annotated

import typer

from csdctl.cli.call import Call, on_job
from csdctl.perfmodel.published import Network


@on_job
def forecast(
    call: Call,
    published: Annotated[
        Network | None,
        typer.Option(help="Forecast this network from the STANNIS paper, on Newport CSDs, instead of a job."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS", help="Numbers of nodes: 24, 1..36, or 4,8,16; default: 0 to all nodes."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; default: the job's.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per epoch, public and private, for time and energy.")
    ] = None,
    max_global_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest global batch size; default: the limit that the plan was tuned with."
        ),
    ] = None,
    host_watts: Annotated[
        float | None,
        typer.Option(help="Power in watts that does not depend on the number of training nodes."),
    ] = None,
    node_watts: Annotated[
        float | None, typer.Option(help="Power in watts that each training node adds.")
    ] = None,
    alone_watts: Annotated[
        float | None,
        typer.Option(help="Power in watts of the host alone, with ordinary drives; default: --host-watts."),
    ] = None,
    sum_seconds: Annotated[
        float | None, typer.Option(min=0, help="Seconds that each node adds to the sum over the ranks.")
    ] = None,
) -> None:
    """Forecast throughput, time and energy for any number of nodes."""
    from csdctl.terminal.forecast import forecast_document, render_forecast
    from csdctl.workflows.forecast.forecast import (
        ForecastRequest,
        JobOnFleet,
        forecast_subject,
        given_power,
        parse_node_counts,
    )

    streams = call.streams
    request = ForecastRequest(
        parse_node_counts(nodes) if nodes is not None else None,
        epochs,
        samples,
        given_power(host_watts, node_watts, alone_watts),
        sum_seconds,
    )
    subject = published or JobOnFleet(call.job_path, call.fleet_path, call.limit, call.exclude)
    result = forecast_subject(subject, request, call.directory, streams.say, max_global_batch)
    if streams.is_json:
        streams.result(forecast_document(result))
    else:
        render_forecast(streams.console, result)
