"""`csdctl train`."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_job
from csdctl.cli.completion import complete_runs
from csdctl.terminal.streams import Streams
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES

if TYPE_CHECKING:
    from csdctl.workflows.train.train import TrainRequest


@on_job
def train(
    call: Call,
    plan: options.PlanOption = None,
    batch_size: options.BatchSizeOption = None,
    max_steps: options.MaxStepsOption = None,
    dry_run: options.DryRunOption = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Resume this run from its last completed step (`latest` works).",
            autocompletion=complete_runs,
        ),
    ] = None,
    min_nodes: Annotated[
        int, typer.Option(help="Continue without lost nodes while at least this many are left.")
    ] = 1,
    rebalance: Annotated[
        bool,
        typer.Option("--rebalance/--no-rebalance", help="Adjust batch sizes when a node's speed changes."),
    ] = True,
    collective: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"How gradients are summed: {', '.join(COLLECTIVE_NAMES)} or auto."
        ),
    ] = "auto",
    strategy: options.StrategyOption = "auto",
    feature_precision: options.FeaturePrecisionOption = "float32",
    feature_engine: options.FeatureEngineOption = "keras",
    cut: options.CutOption = "",
    micro_batches: options.MicroBatchesOption = 4,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Write a checkpoint after each epoch, and at this interval in seconds.")
    ] = 600.0,
    keep: Annotated[int, typer.Option(help="Number of checkpoints to keep, besides the best.")] = 3,
    start_deadline: Annotated[
        float, typer.Option(help="Seconds within which every rank must be ready.")
    ] = 300.0,
    silence_deadline: Annotated[
        float, typer.Option(help="Stop the run after this many seconds without a step.")
    ] = 300.0,
    callback: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Call this function of yours with every event of the run, in a thread of its own.",
        ),
    ] = None,
    skip_doctor: options.SkipDoctorOption = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach/--no-detach",
            help="Train in the background, without this terminal; `csdctl runs watch` shows the run.",
        ),
    ] = False,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this when the run has ended; CSDCTL_RUN, CSDCTL_STATE and CSDCTL_EXIT_CODE are set.",
        ),
    ] = None,
) -> None:
    """Train synchronously on the host and all nodes, each with its own batch size."""
    from csdctl.cli.callback_files import load_callback
    from csdctl.supervision.run_setup import Patience
    from csdctl.worker.protocol.features import FeatureOptions
    from csdctl.workflows.train.options import TrainOptions
    from csdctl.workflows.train.train import TrainRequest

    streams = call.streams
    if detach and not dry_run:
        start_detached(streams)
        return
    wanted = TrainOptions(
        Patience(start_s=start_deadline, silence_s=silence_deadline),
        max_steps,
        min_nodes,
        rebalance,
        checkpoint_seconds,
        keep,
        collective,
        tuple(load_callback(reference) for reference in callback or ()),
        strategy,
        FeatureOptions(feature_precision, feature_engine),
        cut,
        micro_batches,
    )
    request = TrainRequest(
        call.job, call.fleet, call.directory, wanted, plan, batch_size, resume, skip_doctor
    )
    _train(streams, request, notify, is_dry_run=dry_run)


def _train(streams: Streams, request: "TrainRequest", notify: str | None, *, is_dry_run: bool) -> None:
    """Train, and tell another program of the end; or show what would be trained."""
    from csdctl.terminal.train import TrainingScreen, show_training_rehearsal
    from csdctl.workflows.runs.notification import notifying, parse_command

    if is_dry_run:
        show_training_rehearsal(streams, request)
        return
    screen = TrainingScreen(streams, emulated=request.fleet.emulated)
    with notifying(parse_command(notify), lambda: screen.run, streams.say):
        screen.train(request)


def start_detached(streams: Streams) -> None:
    """Start this command line again in the background; return once its run trains."""
    from csdctl.workflows.runs import follow
    from csdctl.workflows.runs.manage import process_of

    arguments = build_background_arguments(sys.argv[1:])
    run = follow.start_detached(streams.project, arguments, streams.say)
    if run is None:
        streams.say("nothing was left to train: no run goes on in the background")
        streams.result({"schema": "csdctl.train/1", "detached": False})
        return
    streams.say(f"run {run.run_id} goes on in the background, process {process_of(run).pid}")
    streams.say(f"to see it: csdctl runs watch {run.run_id}; to stop it: csdctl runs stop {run.run_id}")
    streams.result({"schema": "csdctl.train/1", "run": run.run_id, "path": str(run.path), "detached": True})


def build_background_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments of the csdctl that trains in the background, from those of this command line."""
    kept = [word for word in words if word not in ("--detach", "--json")]
    # Without it, `detach` in the user's config.yaml would make that process start another one, without end.
    behind = kept.index("train") + 1
    return [*kept[:behind], "--no-detach", *kept[behind:]]
