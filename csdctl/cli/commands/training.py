"""Commands that use a model: tune, forecast, verify, train, predict, scale."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from csdctl.cli import options, parameters
from csdctl.cli.call import Call, on_job
from csdctl.cli.parameters import argument, complete_models, complete_runs, option
from csdctl.errors import InputError
from csdctl.terminal.streams import Streams
from csdctl.tuning.stannis import DEFAULT_BATCH_SIZES, DEFAULT_MARGIN_SCALE, DEFAULT_STEP_DIVISOR
from csdctl.worker.protocol.run_spec import CHECKPOINT_INTERVAL_S, NUM_CHECKPOINTS

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
    strategy: parameters.Strategy = of_fit("auto", "Plan for this strategy; auto compares them."),
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
    strategy: parameters.Strategy = options.STRATEGY,
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


@on_job
def train(
    call: Call,
    plan: Path | None = options.PLAN,
    batch_size: int | None = options.BATCH_SIZE,
    max_steps: int | None = options.MAX_STEPS,
    dry_run: bool = options.DRY_RUN,
    resume: str | None = option(
        None,
        "Resume this run from its last completed step: a run ID, a unique prefix or `latest`.",
        metavar="RUN",
        autocompletion=complete_runs,
    ),
    min_nodes: int | None = parameters.resuming(
        None,
        "Start with at least this many nodes; others join when they become reachable. End when "
        "fewer are left. Default: start with all, end when none is left.",
        min=0,
    ),
    rebalance: bool | None = parameters.resuming(
        None,
        "Adjust batch sizes when a node's speed changes; default: do, or as the resumed run.",
        "--rebalance/--no-rebalance",
    ),
    strategy: parameters.Strategy = options.STRATEGY,
    feature_precision: parameters.Precision = options.FEATURE_PRECISION,
    cut: str = options.CUT,
    micro_batches: int = options.MICRO_BATCHES,
    checkpoint_seconds: float | None = parameters.resuming(
        None,
        f"Seconds between checkpoints in an epoch; default: {CHECKPOINT_INTERVAL_S:g}, or as a resumed run.",
    ),
    keep: int | None = parameters.resuming(
        None, f"Checkpoints to keep; default: {NUM_CHECKPOINTS}, or as the resumed run.", min=1
    ),
    start_timeout: float = parameters.resuming(300.0, "Timeout in seconds until every rank is ready."),
    silence_timeout: float = parameters.resuming(
        300.0, "Seconds without a step: the ranks reconnect; after as many again, the run stops."
    ),
    metrics: str = parameters.background(
        "", "Serve metrics of the run over HTTP, for Prometheus.", metavar="[HOST:]PORT"
    ),
    skip_doctor: bool = options.SKIP_DOCTOR,
    detach: bool = parameters.background(
        False, "Train in the background; `csdctl runs watch` shows the run."
    ),
) -> None:
    """Train synchronously on the host and all nodes, each with its own batch size."""
    from csdctl.reporting.live_metrics import serve_metrics
    from csdctl.supervision.run_setup import Patience
    from csdctl.terminal.train import TrainingScreen, show_training_rehearsal
    from csdctl.workflows.train.request import TrainOptions
    from csdctl.workflows.train.resume import find_started

    streams = call.streams
    if detach and not dry_run:
        start_detached(streams)
        return
    if resume and call.job_path == parameters.DEFAULT_JOB:
        with suppress(InputError):  # a run of another server is not here yet
            job = find_started(streams.project, resume, lambda line: None).read_manifest().job
            call.job_path = Path(str(job.get("path", call.job_path)))
    train_options = TrainOptions(
        deadlines=Patience(start_s=start_timeout, silence_s=silence_timeout),
        max_steps=max_steps,
        min_nodes=min_nodes,
        is_balanced=rebalance,
        checkpoint_interval_s=checkpoint_seconds,
        num_checkpoints=keep,
        callbacks=(serve_metrics(metrics),) if metrics else (),
        strategy=strategy,
        feature_precision=feature_precision,
        cut=cut,
        num_micro_batches=micro_batches,
    )
    request = call.training(
        train_options, plan_path=plan, batch_size=batch_size, resume=resume, is_preflight_skipped=skip_doctor
    )
    if dry_run:
        show_training_rehearsal(streams, request)
    else:
        TrainingScreen(streams).train(request)


def start_detached(streams: Streams) -> None:
    """Start this command line again in the background. Return once its run trains."""
    from csdctl.workflows.runs import manage

    arguments = [word for word in sys.argv[1:] if word not in ("--detach", "--json")]
    run = manage.start_detached(streams.project, arguments, streams.say)
    if run is None:
        streams.say("nothing is left to train: no run was started")
        streams.result({"schema": "csdctl.train/1", "detached": False})
        return
    streams.say(f"run {run.run_id} continues in the background, process {manage.process_of(run).pid}")
    streams.say(f"to see it: csdctl runs watch {run.run_id}; to stop it: csdctl runs stop {run.run_id}")
    streams.result({"schema": "csdctl.train/1", "run": run.run_id, "path": str(run.path), "detached": True})


@on_job
def predict(
    call: Call,
    model: str = argument(
        ...,
        "Run ID, unique prefix or `latest`, or a .keras file.",
        metavar="RUN|MODEL.keras",
        autocompletion=complete_models,
    ),
    job: Path | None = argument(None, "Job whose data is used; default: the run's, else job.yaml."),
    on: Literal["private", "public", "validation", "all"] | None = option(
        None, "Data set; default: private if the job has it, else public."
    ),
    want: Literal["classes", "scores", "embeddings"] = option(
        "classes",
        "classes with probabilities (values of a regression), scores: all outputs, or embeddings: "
        "the output of --layer.",
    ),
    layer: str = option("", "Layer whose output is returned as embeddings.", metavar="NAME"),
    output: Path = option(
        Path("predictions.csv"), "Write to this .csv or .npz file.", "--output", "-o", metavar="FILE"
    ),
    force: bool = options.FORCE,
) -> None:
    """Run a trained model on samples where they are stored. Only the results are sent."""
    from csdctl.terminal.prepare import PreparationScreen
    from csdctl.workflows.predict.predict import check_request
    from csdctl.workflows.predict.predict import predict as run_prediction

    streams = call.streams
    request = check_request(
        model,
        job,
        lambda: call.fleet,
        call.directory,
        on=on,
        want=want,
        layer=layer,
        output=output,
        force=force,
    )
    screen = PreparationScreen(streams)
    result = run_prediction(request, screen.events)
    by_machine = ", ".join(f"{name} {count:,}" for name, count in result.num_rows_of.items())
    screen.say(
        f"{result.output}: {result.num_rows:,} rows ({by_machine}); {result.num_computed:,} computed, "
        f"{result.num_rows - result.num_computed:,} found, in {result.elapsed_s:.1f} s"
    )
    question = {"model": request.model, "on": request.on, "want": request.want, "layer": request.layer}
    answers = {name: value for name, value in vars(result).items() if name != "missing"}
    streams.result({"schema": "csdctl.predict/1", **question, **answers, "failed": result.missing})
    result.check()


@on_job
def scale(
    call: Call,
    nodes: str | None = option(
        None,
        "Numbers of nodes: 0,1,2 or 0..36; 0 is the host alone. Default: 0, 1, 2, 4 … and all.",
        metavar="NUMBERS",
    ),
    weak: bool = option(False, "Weak scaling only: every rank keeps its batch size."),
    strong: bool = option(False, "Strong scaling only: the global batch size stays the same."),
    plan: Path | None = options.PLAN,
    batch_size: int | None = options.BATCH_SIZE,
    max_steps: int | None = options.MAX_STEPS,
    skip_doctor: bool = options.SKIP_DOCTOR,
    dry_run: bool = options.DRY_RUN,
) -> None:
    """Train with 0, 1, 2 … nodes, and show speed-up, efficiency and energy."""
    from csdctl.reporting.tables import STRONG, WEAK
    from csdctl.terminal.report import show_points, show_series
    from csdctl.terminal.train import train_point
    from csdctl.workflows.forecast.forecast import parse_node_counts
    from csdctl.workflows.train.request import TrainOptions
    from csdctl.workflows.train.scale import plan_points, run_series

    streams = call.streams
    kinds = [kind for kind, is_asked in ((WEAK, weak), (STRONG, strong)) if is_asked] or [WEAK, STRONG]
    # Batch sizes that moved during a run would be another plan than that of its point.
    training = call.training(
        TrainOptions(max_steps=max_steps, is_balanced=False),
        plan_path=plan,
        batch_size=batch_size,
        is_preflight_skipped=skip_doctor,
    )
    points = plan_points(training, kinds, parse_node_counts(nodes) if nodes is not None else ())
    if dry_run:
        show_points(streams, points)
        return
    for kind, series in run_series(
        training, points, lambda point, of: train_point(streams, point, of)
    ).items():
        show_series(streams, kind, series)
