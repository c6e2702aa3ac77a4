"""`csdctl extract`."""

from csdctl.cli import options
from csdctl.cli.call import Call, on_job


@on_job
def extract(
    call: Call,
    plan: options.PlanOption = None,
    batch_size: options.BatchSizeOption = None,
    feature_precision: options.FeaturePrecisionOption = "float32",
    feature_engine: options.FeatureEngineOption = "keras",
) -> None:
    """Compute the output of the model's frozen layers for all samples, where they are stored."""
    from csdctl.terminal.prepare import PreparationScreen
    from csdctl.worker.protocol.features import FeatureOptions
    from csdctl.workflows.train.options import TrainOptions
    from csdctl.workflows.train.train import TrainRequest
    from csdctl.workflows.train.train import extract as run_extraction

    streams = call.streams
    wanted = TrainOptions(features=FeatureOptions(feature_precision, feature_engine))
    request = TrainRequest(call.job, call.fleet, call.directory, wanted, plan, batch_size)
    screen = PreparationScreen(streams)
    found = run_extraction(request, screen)
    screen.say(found.describe())
    names = "layer", "shape", "precision", "num_samples", "num_computed", "elapsed_s"
    streams.result({"schema": "csdctl.extract/1", **{name: getattr(found, name) for name in names}})
