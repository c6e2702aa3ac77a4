"""`csdctl train`."""

from typing import TYPE_CHECKING

from csdctl.cli import train_options as options
from csdctl.cli.options import (
    DEFAULT_FLEET,
    DEFAULT_JOB,
    DryRunOption,
    ExcludeOption,
    FleetOption,
    JobArgument,
    JsonOption,
    LimitOption,
)
from csdctl.cli.streams import Streams

if TYPE_CHECKING:
    from csdctl.workflows.train.train import TrainRequest


def train(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    plan: options.PlanOption = None,
    batch_size: options.BatchSizeOption = None,
    max_steps: options.MaxStepsOption = None,
    dry_run: DryRunOption = False,
    resume: options.ResumeOption = None,
    min_nodes: options.MinNodesOption = 1,
    rebalance: options.RebalanceOption = True,
    collective: options.CollectiveOption = "auto",
    strategy: options.StrategyOption = "auto",
    feature_precision: options.FeaturePrecisionOption = "float32",
    feature_engine: options.FeatureEngineOption = "keras",
    cut: options.CutOption = "",
    micro_batches: options.MicroBatchesOption = 4,
    checkpoint_seconds: options.CheckpointSecondsOption = 600.0,
    keep: options.KeepOption = 3,
    start_deadline: options.StartDeadlineOption = 300.0,
    silence_deadline: options.SilenceDeadlineOption = 300.0,
    callback: options.CallbackOption = None,
    skip_doctor: options.SkipDoctorOption = False,
    detach: options.DetachOption = False,
    notify: options.NotifyOption = None,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Train synchronously on the host and all nodes, each with its own batch size."""
    from csdctl.cli.callback_files import load_callback
    from csdctl.cli.render.runs import start_detached
    from csdctl.job.model import load_job
    from csdctl.launch.mpi_job import Deadlines
    from csdctl.worker.protocol.features import FeatureOptions
    from csdctl.workflows.train.options import TrainOptions
    from csdctl.workflows.train.train import TrainRequest
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    if detach and not dry_run:
        start_detached(streams)
        return
    wanted = TrainOptions(
        Deadlines(start_deadline, silence_deadline),
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
    loaded, chosen = load_job(job), choose_fleet(fleet, limit, exclude, may_be_empty=True)
    request = TrainRequest(loaded, chosen, streams.directory, wanted, plan, batch_size, resume, skip_doctor)
    _train(streams, request, notify, is_dry_run=dry_run)


def _train(streams: Streams, request: "TrainRequest", notify: str | None, *, is_dry_run: bool) -> None:
    """Train, and tell another program of the end; or show what would be trained."""
    from csdctl.cli.render.rehearsal import show_training_rehearsal
    from csdctl.cli.render.training import TrainingScreen
    from csdctl.workflows.runs.notification import notifying, parse_command
    from csdctl.workflows.train.run import RunStopped
    from csdctl.workflows.train.train import run_training

    if is_dry_run:
        show_training_rehearsal(streams, request)
        return
    screen = TrainingScreen(streams, emulated=request.fleet.emulated)
    with notifying(parse_command(notify), lambda: screen.run, streams.say), screen:
        try:
            screen.finish(run_training(request, screen))
        except RunStopped as stopped:
            screen.stopped(stopped)
            raise
