"""`csdctl verify`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_job


@on_job
def verify(
    call: Call,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan to use; default: the one `tune` wrote, or batch size 16 on all ranks."),
    ] = None,
    batch_size: options.BatchSizeOption = None,
    strategy: options.StrategyOption = "auto",
    cut: options.CutOption = "",
    micro_batches: options.MicroBatchesOption = 4,
    feature_precision: options.FeaturePrecisionOption = "float32",
    feature_engine: options.FeatureEngineOption = "keras",
) -> None:
    """Check that your fleet computes the same gradient of your model as one process."""
    from csdctl.errors import RunError
    from csdctl.terminal.prepare import PreparationScreen
    from csdctl.terminal.verify import describe_features, render_verified, verify_document
    from csdctl.worker.protocol.features import FeatureOptions
    from csdctl.workflows.train.options import TrainOptions
    from csdctl.workflows.train.train import TrainRequest
    from csdctl.workflows.train.verify import judge, run_verification

    streams = call.streams
    features = FeatureOptions(feature_precision, feature_engine)
    options = TrainOptions(strategy=strategy, cut=cut, num_micro_batches=micro_batches, features=features)
    request = TrainRequest(call.job, call.fleet, call.directory, options, plan, batch_size)
    found = run_verification(request, PreparationScreen(streams))
    verdict = judge(found.result, found.nodes)
    shown = found.result, verdict, found.nodes
    render_verified(streams.console, *shown, emulated=call.fleet.emulated)
    document = verify_document(*shown, emulated=call.fleet.emulated)
    if found.features:
        streams.console.print(f"stored features: {describe_features(found.features)}", soft_wrap=True)
        document["features"] = found.features
    streams.result(document)
    found.check_features()
    if not verdict.is_equal:
        raise RunError(verdict.text, remedy=verdict.remedy)
