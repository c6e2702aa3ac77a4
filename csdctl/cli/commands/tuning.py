"""Commands before a training: tune, forecast, verify."""

from functools import partial
from pathlib import Path
from typing import Literal

from csdctl.cli import options
from csdctl.cli.call import Call, on_job
from csdctl.cli.options import option
from csdctl.errors import InputError
from csdctl.tuning.stannis import DEFAULT_BATCH_SIZES, DEFAULT_MARGIN_SCALE, DEFAULT_STEP_DIVISOR

power = partial(option, rich_help_panel="Power")
of_fit = partial(option, rich_help_panel="Method fit")
of_stannis = partial(option, rich_help_panel="Method stannis")
DEFAULT_BATCH_SIZE_LIST = ",".join(map(str, DEFAULT_BATCH_SIZES))


@on_job
def tune(
    call: Call,
    method: Literal["fit", "stannis"] = option(
        "fit", "fit: a model fitted to few probes; stannis: the paper's Algorithm 1."
    ),
    goal: Literal["throughput", "time-to-accuracy"] = of_fit(
        "throughput",
        "time-to-accuracy: choose the global batch size by the gradient noise of the latest run.",
        "--for",
    ),
    max_global_batch: int | None = of_fit(
        None,
        "Largest global batch size; default: 4 × recipe.reference_batch, and at most a tenth of an "
        "epoch's samples.",
        min=1,
    ),
    global_batch: int | None = of_fit(None, "Exact global batch size.", min=1),
    fresh: bool = of_fit(False, "Ignore earlier measurements."),
    host: bool = option(
        True,
        "--no-host: the host only sums gradients; by default it trains unless the fleet is 5% "
        "faster without it.",
        "--host/--no-host",
    ),
    strategy: options.Strategy = of_fit("auto", "Plan for this strategy; auto compares them."),
    cut: str = of_fit("", "Last layer of the nodes, for --strategy split.", metavar="LAYER"),
    probe_seconds: float = option(1.0, "Minimum duration of a probe."),
    batch_sizes: str = of_stannis(DEFAULT_BATCH_SIZE_LIST, "Batch sizes to probe.", metavar="SIZES"),
    step_divisor: float = of_stannis(
        DEFAULT_STEP_DIVISOR, "C, which divides each change of a batch size.", "-C", "--step-divisor"
    ),
    margin_scale: float = of_stannis(
        DEFAULT_MARGIN_SCALE,
        "E: step times may differ by 1/E; the paper's value is 5.",
        "-E",
        "--margin-scale",
    ),
) -> None:
    """Measure the machines and write the plan with the highest throughput."""
    from csdctl.terminal.prepare import PreparationScreen
    from csdctl.terminal.tune import plan_document, render_plan
    from csdctl.tuning.search import Limits
    from csdctl.workflows.tune.tune import TuneOptions, tune_job

    streams = call.streams
    tune_options = TuneOptions(
        method=method,
        limits=Limits(max_global_batch, global_batch),
        is_fresh=fresh,
        is_host_training=host,
        batch_sizes=_parse_sizes(batch_sizes),
        step_divisor=step_divisor,
        margin_scale=margin_scale,
        probe_duration_s=probe_seconds,
        strategy=strategy,
        cut=cut,
        goal=goal,
    )
    plan = tune_job(call.job, call.fleet, call.directory, tune_options, PreparationScreen(streams).events)
    path = streams.project.plan(call.job.name)
    render_plan(streams.console, plan, str(path.relative_to(call.directory)))
    streams.result(plan_document(plan, str(path)))


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(
            f"invalid --batch-sizes {text!r}", remedy="use whole numbers of at least 1, such as 4,8,16,32"
        )
    return sizes


@on_job
def forecast(
    call: Call,
    nodes: str | None = option(
        None, "Numbers of nodes: 24, 1..36, or 4,8,16; default: 0 to all nodes.", metavar="NUMBERS"
    ),
    epochs: int | None = option(None, "Number of epochs; default: the job's.", min=1),
    samples: int | None = option(None, "Samples per epoch, public and private, for time and energy.", min=1),
    max_global_batch: int | None = option(
        None, "Largest global batch size; default: the limit that the plan was tuned with.", min=1
    ),
    host_watts: float | None = power(None, "Watts that do not depend on the number of nodes.", min=0),
    node_watts: float | None = power(None, "Watts that each node adds.", min=0),
) -> None:
    """Forecast throughput, time and energy for any number of nodes."""
    from csdctl.terminal.tune import show_forecast
    from csdctl.workflows.forecast.forecast import (
        ForecastRequest,
        forecast_job,
        given_power,
        parse_node_counts,
    )

    streams = call.streams
    request = ForecastRequest(
        node_counts=parse_node_counts(nodes) if nodes is not None else None,
        epochs=epochs,
        num_samples=samples,
        power=given_power(host_watts, node_watts),
        max_global_batch=max_global_batch,
    )
    fleet = call.fleet if call.fleet_path.exists() or call.limit or call.exclude else None
    result = forecast_job(call.job_path, fleet, call.directory, request, streams.say)
    show_forecast(streams, result)


@on_job
def verify(
    call: Call,
    plan: Path | None = option(
        None, "Plan; default: the job's plan from `tune`, or batch size 16 on all ranks."
    ),
    batch_size: int | None = options.BATCH_SIZE,
    strategy: options.Strategy = options.STRATEGY,
    cut: str = options.CUT,
    micro_batches: int = options.MICRO_BATCHES,
) -> None:
    """Check that your fleet computes the same gradient of your model as Keras."""
    from csdctl.terminal.prepare import PreparationScreen
    from csdctl.terminal.tune import show_verified
    from csdctl.workflows.train.request import TrainOptions
    from csdctl.workflows.train.verify import run_verification

    streams = call.streams
    train_options = TrainOptions(strategy=strategy, cut=cut, num_micro_batches=micro_batches)
    request = call.training(train_options, plan_path=plan, batch_size=batch_size)
    verification = run_verification(request, PreparationScreen(streams).events)
    show_verified(streams, verification, emulated=call.fleet.emulated)
    verification.check()
