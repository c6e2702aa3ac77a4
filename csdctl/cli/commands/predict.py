"""`csdctl predict`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.call import Call, on_job


@on_job
def predict(
    call: Call,
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL.keras",
            help="A run, by its id or how that begins (`latest` works), or a .keras file.",
        ),
    ],
    job: Annotated[
        Path | None, typer.Option(help="The job whose data is used; default: the run's, else job.yaml.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="private, public, validation or all; default: private if the job has it, else public.",
        ),
    ] = None,
    want: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="classes (with probability; of a regression its value), scores (all outputs), or "
            "embeddings: sent with the sample's node and row, without a file name.",
        ),
    ] = "classes",
    layer: Annotated[
        str, typer.Option(metavar="NAME", help="The layer whose output the embeddings are.")
    ] = "",
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Write to this file: .csv, .parquet or .npz.")
    ] = Path("predictions.csv"),
) -> None:
    """Run a trained model over samples where they are stored; only its answers are sent."""
    from csdctl.terminal.prepare import PreparationScreen
    from csdctl.workflows.predict.predict import predict as run_prediction
    from csdctl.workflows.predict.request import check_request

    streams = call.streams
    request = check_request(
        model,
        job,
        call.fleet,
        call.directory,
        on=on,
        want=want,
        layer=layer,
        output=output,
    )
    screen = PreparationScreen(streams)
    found = run_prediction(request, screen)
    by_machine = ", ".join(f"{name} {count:,}" for name, count in found.num_rows_of.items())
    earlier = found.num_rows - found.num_computed
    screen.say(
        f"{found.output}: {found.num_rows:,} rows ({by_machine}); {found.num_computed:,} computed, "
        f"{earlier:,} found, in {found.elapsed_s:.1f} s"
    )
    asked = {"model": request.model, "on": request.on, "want": request.want, "layer": request.layer}
    answers = {name: value for name, value in vars(found).items() if name != "missing"}
    streams.result({"schema": "csdctl.predict/1", **asked, **answers, "failed": found.missing})
    found.check()
