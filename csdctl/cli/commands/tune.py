"""`csdctl tune`."""

from csdctl.cli import tune_options as options
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
from csdctl.errors import InputError
from csdctl.tuning.stannis import DEFAULT_MARGIN_SCALE, DEFAULT_STEP_DIVISOR


def tune(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    method: options.MethodOption = "fit",
    max_global_batch: options.MaxGlobalBatchOption = None,
    global_batch: options.GlobalBatchOption = None,
    max_step_seconds: options.MaxStepOption = None,
    fresh: options.FreshOption = False,
    explore: options.ExploreOption = True,
    host: options.HostOption = True,
    strategy: options.StrategyOption = "auto",
    cut: options.CutOption = "",
    probe_seconds: options.ProbeSecondsOption = 1.0,
    batch_sizes: options.BatchSizesOption = options.DEFAULT_BATCH_SIZE_LIST,
    step_divisor: options.StepDivisorOption = DEFAULT_STEP_DIVISOR,
    margin_scale: options.MarginScaleOption = DEFAULT_MARGIN_SCALE,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Measure the machines and write the plan with the highest throughput."""
    from csdctl.cli.render.tuning import TuningScreen, plan_document, render_plan
    from csdctl.job.model import load_job
    from csdctl.tuning.search import Limits
    from csdctl.workflows.tune.options import TuneOptions
    from csdctl.workflows.tune.tune import tune_job
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    tune_options = TuneOptions(
        method=method,
        limits=Limits(max_global_batch, global_batch, max_step_seconds),
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
    chosen = choose_fleet(fleet, limit, exclude)
    saved = tune_job(load_job(job), chosen, streams.directory, tune_options, TuningScreen(streams))
    render_plan(streams.console, saved.plan, str(saved.path.relative_to(streams.directory)))
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
