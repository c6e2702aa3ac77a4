"""`csdctl extract`."""

from csdctl.cli import options
from csdctl.terminal.streams import Streams


def extract(
    job: options.JobArgument = options.DEFAULT_JOB,
    fleet: options.FleetOption = options.DEFAULT_FLEET,
    plan: options.PlanOption = None,
    batch_size: options.BatchSizeOption = None,
    feature_precision: options.FeaturePrecisionOption = "float32",
    feature_engine: options.FeatureEngineOption = "keras",
    limit: options.LimitOption = None,
    exclude: options.ExcludeOption = None,
    json: options.JsonOption = False,
) -> None:
    """Compute the output of the model's frozen layers for all samples, where they are stored."""
    from csdctl.job.model import load_job
    from csdctl.terminal.prepare import PreparationScreen
    from csdctl.worker.protocol.features import FeatureOptions
    from csdctl.workflows.train.extract import extract as run_extraction
    from csdctl.workflows.train.options import TrainOptions
    from csdctl.workflows.train.train import TrainRequest
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    wanted = TrainOptions(features=FeatureOptions(feature_precision, feature_engine))
    loaded, chosen = load_job(job), choose_fleet(fleet, limit, exclude)
    request = TrainRequest(loaded, chosen, streams.directory, wanted, plan, batch_size)
    screen = PreparationScreen(streams)
    found = run_extraction(request, screen)
    screen.say(found.describe())
    names = "layer", "shape", "precision", "num_samples", "num_computed", "elapsed_s"
    streams.result({"schema": "csdctl.extract/1", **{name: getattr(found, name) for name in names}})
