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


def tune(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Algorithm 1's list of batch sizes.")
    ] = ",".join(map(str, DEFAULT_BATCH_SIZES)),
    step_divisor: Annotated[
        float, typer.Option("-C", "--step-divisor", help="Algorithm 1's C: larger is more fine-grained.")
    ] = DEFAULT_STEP_DIVISOR,
    margin_scale: Annotated[
        float,
        typer.Option(
            "-E",
            "--margin-scale",
            help="Algorithm 1's E: 20 leaves a margin of 5%, the paper's 5 one of 20%.",
        ),
    ] = DEFAULT_MARGIN_SCALE,
    probe_seconds: Annotated[float, typer.Option("--probe-seconds", help="Least time of a probe.")] = 1.0,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Measure every machine and write a plan (the paper's Algorithm 1 and equation 1)."""
    from csdctl.cli.render.preparing import PreparingView
    from csdctl.cli.render.tuning import render_plan, render_probes
    from csdctl.job.model import load_job
    from csdctl.tuning.plan import save_plan
    from csdctl.workflows.deploy import common_files, deploy_files
    from csdctl.workflows.partial import choose_fleet
    from csdctl.workflows.prepare import prepare_job
    from csdctl.workflows.tune import TuneOptions, tune
    from csdctl.workflows.workspace import open_workspace

    streams = Streams(is_json=json)
    loaded = load_job(job)
    options = TuneOptions(_sizes(batch_sizes), step_divisor, margin_scale, probe_seconds)
    chosen_fleet = choose_fleet(fleet, limit, exclude)
    with open_workspace(streams.directory, chosen_fleet, "tune", is_holding=True, say=streams.say) as space:
        with PreparingView(streams.people) as view:
            prepared = prepare_job(loaded, space.fleet, space.sessions, space.project, streams.say, view.show)
        files = {node.name: common_files(prepared) for node in space.fleet.nodes}
        deploy_files(files, space.fleet, space.sessions, lambda *_: None)
        plan = tune(
            loaded,
            space.fleet,
            space.facts,
            prepared,
            space.sessions,
            options,
            streams.say,
            lambda results: render_probes(streams.people, results),
        )
        path = space.project.plan(loaded.name)
        save_plan(path, plan)
    render_plan(streams.people, plan, str(path.relative_to(streams.directory)))
    streams.result(
        {
            "schema": "csdctl.tune/1",
            "path": str(path),
            "global_batch": plan.global_batch,
            "predicted_images_per_s": plan.predicted_images_per_s,
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
