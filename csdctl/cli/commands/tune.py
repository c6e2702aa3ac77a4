"""`csdctl tune`."""

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
from csdctl.errors import InputError
from csdctl.tuning.stannis import DEFAULT_BATCH_SIZES, DEFAULT_MARGIN_SCALE, DEFAULT_STEP_DIVISOR

STANNIS_PANEL = "Algorithm 1 (--method stannis)"


def tune(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    method: Annotated[
        str,
        typer.Option("--method", help="fit: few probes and a model; stannis: the paper's Algorithm 1."),
    ] = "fit",
    max_global_batch: Annotated[
        int | None,
        typer.Option(
            "--max-global-batch",
            min=1,
            help="fit: the global batch size stays within this; default: 4 × recipe.reference_batch, and a "
            "tenth of an epoch's samples.",
            show_default=False,
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, help="fit: the global batch size, exactly.")
    ] = None,
    max_step_seconds: Annotated[
        float | None, typer.Option("--max-step-seconds", help="fit: a step stays within this time.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="fit: use nothing that was measured before.")
    ] = False,
    explore: Annotated[
        bool,
        typer.Option(
            "--explore/--no-explore", help="fit: probe threads and oneDNN too, and take what gains."
        ),
    ] = True,
    host: Annotated[
        bool,
        typer.Option(
            "--host/--no-host",
            help="--no-host: it only adds up. Else it trains, unless the fleet is 5% faster without it.",
        ),
    ] = True,
    probe_seconds: Annotated[float, typer.Option("--probe-seconds", help="Least time of a probe.")] = 1.0,
    batch_sizes: Annotated[
        str,
        typer.Option(
            "--batch-sizes", help="stannis: the list of batch sizes.", rich_help_panel=STANNIS_PANEL
        ),
    ] = ",".join(map(str, DEFAULT_BATCH_SIZES)),
    step_divisor: Annotated[
        float,
        typer.Option(
            "-C",
            "--step-divisor",
            help="stannis: C, larger is more fine-grained.",
            rich_help_panel=STANNIS_PANEL,
        ),
    ] = DEFAULT_STEP_DIVISOR,
    margin_scale: Annotated[
        float,
        typer.Option(
            "-E",
            "--margin-scale",
            help="stannis: E, 20 leaves a margin of 5%, the paper's 5 one of 20%.",
            rich_help_panel=STANNIS_PANEL,
        ),
    ] = DEFAULT_MARGIN_SCALE,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Measure the machines, and write the plan that trains the most samples/s."""
    from csdctl.cli.render.preparing import PreparingView
    from csdctl.cli.render.tuning import render_plan, render_probes
    from csdctl.job.model import load_job
    from csdctl.launch.tools import check_tools
    from csdctl.tuning.plan import save_plan
    from csdctl.tuning.search import Limits
    from csdctl.workflows.data.deploy import common_files, deploy_files
    from csdctl.workflows.data.prepare import prepare_job
    from csdctl.workflows.tune.tune import FIT, TuneOptions, tune
    from csdctl.workflows.workspace.partial_failure import choose_fleet
    from csdctl.workflows.workspace.workspace import open_workspace

    streams = Streams(is_json=json)
    loaded = load_job(job)
    options = TuneOptions(
        method,
        Limits(max_global_batch, global_batch, max_step_seconds),
        fresh,
        explore,
        host,
        _sizes(batch_sizes),
        step_divisor,
        margin_scale,
        probe_seconds,
    )
    if method == FIT:
        check_tools()  # the plan is tried with MPI
    chosen_fleet = choose_fleet(fleet, limit, exclude)
    with open_workspace(streams.directory, chosen_fleet, "tune", is_locking=True, say=streams.say) as space:
        with PreparingView(streams.console) as view:
            prepared = prepare_job(loaded, space.fleet, space.sessions, space.project, streams.say, view.show)
        files = {node.name: common_files(prepared) for node in space.fleet.nodes}
        deploy_files(files, space.fleet, space.sessions, lambda *_: None)
        plan = tune(
            loaded,
            prepared,
            space,
            options,
            streams.say,
            lambda results: render_probes(streams.console, results),
        )
        path = space.project.plan(loaded.name)
        save_plan(path, plan)
    render_plan(streams.console, plan, str(path.relative_to(streams.directory)))
    streams.result(
        {
            "schema": "csdctl.tune/1",
            "path": str(path),
            "global_batch": plan.global_batch,
            "predicted_samples_per_s": plan.predicted_samples_per_s,
            **plan.model_dump(),
        }
    )


def _sizes(written: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in written.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(
            f"--batch-sizes {written!r} cannot be used",
            remedy="give whole numbers of at least 1, such as 4,8,16,32",
        )
    return sizes
