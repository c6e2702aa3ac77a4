"""`csdctl verify`."""

from dataclasses import asdict
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
from csdctl.cli.train_options import (
    BatchSizeOption,
    CutOption,
    FeatureEngineOption,
    FeaturePrecisionOption,
    MicroBatchesOption,
    StrategyOption,
)


def verify(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="Plan to use; default: the one `tune` wrote, or batch size 16 on all ranks."
        ),
    ] = None,
    batch_size: BatchSizeOption = None,
    strategy: StrategyOption = "auto",
    cut: CutOption = "",
    micro_batches: MicroBatchesOption = 4,
    feature_precision: FeaturePrecisionOption = "float32",
    feature_engine: FeatureEngineOption = "keras",
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
) -> None:
    """Check that your fleet computes the same gradient of your model as one process."""
    from csdctl.cli.render.preparing import PreparationScreen
    from csdctl.cli.render.verify import describe_features, render_verified, verify_document
    from csdctl.errors import RunError
    from csdctl.job.model import load_job
    from csdctl.worker.protocol.features import FeatureOptions
    from csdctl.workflows.train.options import TrainOptions
    from csdctl.workflows.train.verify import VerifyRequest, judge, run_verification
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    loaded, chosen = load_job(job), choose_fleet(fleet, limit, exclude)
    features = FeatureOptions(feature_precision, feature_engine)
    options = TrainOptions(strategy=strategy, cut=cut, num_micro_batches=micro_batches, features=features)
    request = VerifyRequest(loaded, chosen, streams.directory, plan, batch_size, options)
    found = run_verification(request, PreparationScreen(streams))
    verdict = judge(found.result, found.nodes)
    shown = found.result, verdict, found.nodes
    render_verified(streams.console, *shown, emulated=chosen.emulated)
    document = verify_document(*shown, emulated=chosen.emulated)
    if found.features:
        streams.console.print(f"stored features: {describe_features(found.features)}", soft_wrap=True)
        document["features"] = {node: asdict(one) for node, one in found.features.items()}
    streams.result(document)
    found.check_features()
    if not verdict.is_equal:
        raise RunError(verdict.text, remedy=verdict.remedy)
