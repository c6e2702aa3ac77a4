"""`csdctl forecast`."""

from csdctl.cli import forecast_options as options
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


def forecast(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    published: options.PublishedOption = None,
    nodes: options.NodesOption = None,
    epochs: options.EpochsOption = None,
    samples: options.SamplesOption = None,
    max_global_batch: options.MaxGlobalBatchOption = None,
    host_watts: options.HostWattsOption = None,
    node_watts: options.NodeWattsOption = None,
    alone_watts: options.AloneWattsOption = None,
    sum_seconds: options.SumSecondsOption = None,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Forecast throughput, time and energy for any number of nodes."""
    from csdctl.cli.render.forecast import forecast_document, render_forecast
    from csdctl.workflows.forecast.request import ForecastRequest, given_power, parse_node_counts
    from csdctl.workflows.forecast.subject import JobOnFleet, forecast_subject

    streams = Streams(is_json=json)
    request = ForecastRequest(
        parse_node_counts(nodes) if nodes is not None else None,
        epochs,
        samples,
        given_power(host_watts, node_watts, alone_watts),
        sum_seconds,
    )
    subject = published or JobOnFleet(job, fleet, limit, exclude)
    result = forecast_subject(subject, request, streams.directory, streams.say, max_global_batch)
    if json:
        streams.result(forecast_document(result))
    else:
        render_forecast(streams.console, result)
