"""`csdctl tune`."""

from typing import Annotated

import typer

from csdctl.cli.call import Call, on_job
from csdctl.errors import InputError
from csdctl.tuning.stannis import DEFAULT_BATCH_SIZES, DEFAULT_MARGIN_SCALE, DEFAULT_STEP_DIVISOR

DEFAULT_BATCH_SIZE_LIST = ",".join(map(str, DEFAULT_BATCH_SIZES))


@on_job
def tune(
    call: Call,
    method: Annotated[
        str, typer.Option(help="fit: a model fitted to few probes; stannis: the paper's Algorithm 1.")
    ] = "fit",
    max_global_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="fit: the largest global batch size; default: 4 × recipe.reference_batch, and at most a "
            "tenth of an epoch's samples.",
        ),
    ] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="fit: the exact global batch size.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="fit: ignore earlier measurements.")] = False,
    explore: Annotated[
        bool,
        typer.Option(
            "--explore/--no-explore", help="fit: also probe threads and oneDNN, and use the faster settings."
        ),
    ] = True,
    host: Annotated[
        bool,
        typer.Option(
            "--host/--no-host",
            help="Whether the host trains, or only sums gradients; by default it trains, unless the fleet is "
            "5% faster without it.",
        ),
    ] = True,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="STRATEGY",
            help="fit: compare the strategies (auto), or plan for one: data-parallel, features or split.",
        ),
    ] = "auto",
    cut: Annotated[
        str, typer.Option(metavar="LAYER", help="fit: the last layer of the nodes, for --strategy split.")
    ] = "",
    probe_seconds: Annotated[float, typer.Option(help="Minimum duration of a probe.")] = 1.0,
    batch_sizes: Annotated[
        str, typer.Option(help="stannis: the batch sizes to probe.")
    ] = DEFAULT_BATCH_SIZE_LIST,
    step_divisor: Annotated[
        float,
        typer.Option(
            "-C",
            "--step-divisor",
            help="stannis: C; a larger value takes smaller steps.",
        ),
    ] = DEFAULT_STEP_DIVISOR,
    margin_scale: Annotated[
        float,
        typer.Option(
            "-E",
            "--margin-scale",
            help="stannis: E; 20 leaves a margin of 5%, the paper's value 5 leaves 20%.",
        ),
    ] = DEFAULT_MARGIN_SCALE,
) -> None:
    """Measure the machines and write the plan with the highest throughput."""
    from csdctl.terminal.tune import TuningScreen, plan_document, render_plan
    from csdctl.tuning.search import Limits
    from csdctl.workflows.tune.options import TuneOptions
    from csdctl.workflows.tune.tune import tune_job

    streams = call.streams
    tune_options = TuneOptions(
        method=method,
        limits=Limits(max_global_batch, global_batch),
        is_fresh=fresh,
        is_exploring=explore,
        is_host_training=host,
        batch_sizes=_parse_sizes(batch_sizes),
        step_divisor=step_divisor,
        margin_scale=margin_scale,
        probe_duration_s=probe_seconds,
        strategy=strategy,
        cut=cut,
    )
    saved = tune_job(call.job, call.fleet, call.directory, tune_options, TuningScreen(streams))
    render_plan(streams.console, saved.plan, str(saved.path.relative_to(call.directory)))
    streams.result(plan_document(saved.plan, str(saved.path)))


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(
            f"invalid --batch-sizes {text!r}",
            remedy="give whole numbers of at least 1, such as 4,8,16,32",
        )
    return sizes
