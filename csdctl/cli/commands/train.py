"""`csdctl train`."""

from pathlib import Path
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


def train(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="The plan to follow; default: the one `tune` wrote for the job."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="No plan: this batch size on every rank.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, help="End after this many steps, for measuring.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Go on with this run from its last completed step (`latest` works).",
        ),
    ] = None,
    min_nodes: Annotated[
        int, typer.Option("--min-nodes", help="Go on without lost nodes as long as so many are left.")
    ] = 1,
    rebalance: Annotated[
        bool, typer.Option("--rebalance/--no-rebalance", help="Move batch sizes when a node's speed changes.")
    ] = True,
    collective: Annotated[
        str,
        typer.Option(
            "--collective", metavar="WAY", help="How gradients are summed: `star`, `allreduce`, or `auto`."
        ),
    ] = "auto",
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", help="A checkpoint after each epoch, and this often.")
    ] = 600.0,
    keep: Annotated[int, typer.Option("--keep", help="Checkpoints to keep, besides the best one.")] = 3,
    start_deadline: Annotated[
        float, typer.Option("--start-deadline", help="Seconds until every rank must be ready.")
    ] = 300.0,
    silence_deadline: Annotated[
        float, typer.Option("--silence-deadline", help="Seconds without a step after which a run is ended.")
    ] = 300.0,
    skip_doctor: Annotated[
        bool, typer.Option("--skip-doctor", help="Begin without examining the machines first.")
    ] = False,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Train on the host and all nodes in step, each with its own batch size."""
    from csdctl.cli.render.preparing import PreparingView
    from csdctl.cli.render.report import report_document
    from csdctl.cli.render.training import TrainingScreen, show_preflight
    from csdctl.job.model import load_job
    from csdctl.launch.mpi_job import Deadlines
    from csdctl.launch.tools import check_tools
    from csdctl.reporting.differential_privacy import check_accountant
    from csdctl.tuning.plan import load_plan
    from csdctl.workflows.data.prepare import prepare_job
    from csdctl.workflows.preflight.doctor import DoctorOptions, examine_open
    from csdctl.workflows.reporting.report import report
    from csdctl.workflows.train.plan_validation import check_plan, find_left_out
    from csdctl.workflows.train.train import RunStopped, TrainOptions, find_resumable, is_complete
    from csdctl.workflows.train.train import resume as resume_run
    from csdctl.workflows.train.train import train as train_run
    from csdctl.workflows.tune.tune import equal_plan
    from csdctl.workflows.workspace.partial_failure import choose_fleet
    from csdctl.workflows.workspace.workspace import open_workspace

    streams = Streams(is_json=json)
    loaded = load_job(job)
    check_tools()
    if loaded.noise:
        check_accountant()
    options = TrainOptions(
        Deadlines(start_deadline, silence_deadline),
        max_steps,
        min_nodes,
        rebalance,
        checkpoint_seconds,
        keep,
        collective,
    )
    chosen_fleet = choose_fleet(fleet, limit, exclude)
    with open_workspace(streams.directory, chosen_fleet, "train", is_holding=True, say=streams.say) as space:
        names = [node.name for node in space.fleet.nodes]
        run = None
        if resume:
            run = find_resumable(space.project, resume, loaded, space.fleet, streams.say)
            if is_complete(run, loaded):
                streams.say(f"run {run.run_id} is complete: nothing is left to do")
                _, summary = report(space.project, run.run_id)
                streams.result_line(report_document(summary, str(run.path)))
                return
        elif batch_size:
            chosen = equal_plan(loaded, space.fleet, space.facts, names, batch_size)
        else:
            chosen = load_plan(plan or space.project.plan(loaded.name))
            check_plan(chosen, loaded, space.fleet, space.facts)
            if left_out := find_left_out(chosen, space.fleet):
                streams.say(f"without {', '.join(left_out)}, as planned: more time than they would bring")
        if not skip_doctor:
            doctor = examine_open(space.fleet, space.sessions, space.project.root, DoctorOptions())
            show_preflight(streams, doctor)
        with PreparingView(streams.console) as view:
            prepared = prepare_job(loaded, space.fleet, space.sessions, space.project, streams.say, view.show)
        with TrainingScreen(streams, emulated=space.fleet.emulated) as screen:
            try:
                if run:
                    summary = resume_run(run, loaded, prepared, space, options, screen.watcher())
                else:
                    summary = train_run(loaded, chosen, prepared, space, options, screen.watcher())
            except RunStopped as stopped:
                screen.stopped(stopped)
                raise
        screen.finish(summary)
