"""`csdctl predict`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options as common
from csdctl.cli import train_options as options
from csdctl.cli.streams import Streams

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL.keras",
        help="A run, by its id or how that begins (`latest` works), or a .keras file.",
    ),
]
JobOption = Annotated[
    Path | None,
    typer.Option(
        "--job", help="The job whose data is used; default: the run's, else job.yaml.", show_default=False
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="DATA",
        help="private, public, validation or all; default: private if the job has it, else public.",
        show_default=False,
    ),
]
WantOption = Annotated[
    str,
    typer.Option(
        "--want",
        metavar="WHAT",
        help="classes (with probability; of a regression its value), scores (all outputs), or embeddings: "
        "sent with the sample's node and row, without a file name.",
    ),
]
LayerOption = Annotated[
    str,
    typer.Option(
        "--layer", metavar="NAME", help="The layer whose output the embeddings are.", show_default=False
    ),
]
OutputOption = Annotated[
    Path, typer.Option("--output", metavar="FILE", help="Write to this file: .csv, .parquet or .npz.")
]


def predict(
    model: ModelArgument,
    job: JobOption = None,
    fleet: common.FleetOption = common.DEFAULT_FLEET,
    on: OnOption = None,
    want: WantOption = "classes",
    layer: LayerOption = "",
    output: OutputOption = Path("predictions.csv"),
    plan: options.PlanOption = None,
    batch_size: options.BatchSizeOption = None,
    limit: common.LimitOption = None,
    exclude: common.ExcludeOption = None,
    json: common.JsonOption = False,
) -> None:
    """Run a trained model over samples where they are stored; only its answers are sent."""
    from csdctl.cli.render.predict import PredictScreen, describe_result, predict_document
    from csdctl.workflows.predict.predict import predict as run_prediction
    from csdctl.workflows.predict.request import check_request
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams(is_json=json)
    request = check_request(
        model,
        job,
        choose_fleet(fleet, limit, exclude),
        streams.directory,
        on=on,
        want=want,
        layer=layer,
        output=output,
        plan_path=plan,
        batch_size=batch_size,
    )
    screen = PredictScreen(streams)
    found = run_prediction(request, screen)
    screen.say(describe_result(found))
    streams.result(predict_document(request, found))
    found.check()
