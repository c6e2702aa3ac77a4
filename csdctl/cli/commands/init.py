"""`csdctl init`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from csdctl.cli import options
from csdctl.cli.streams import Streams


def init(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="FILE.py:FUNCTION, FILE.keras or keras.applications:NAME; default: the only model here.",
        ),
    ] = "",
    public: Annotated[
        str,
        typer.Option(
            "--public",
            help="Training data: a path, FILE.py:FUNCTION or FILE.py:FUNCTION:PATH; "
            "default: the only data here.",
        ),
    ] = "",
    validation: Annotated[str, typer.Option("--validation", help="The validation data, as --public.")] = "",
    private: Annotated[
        str, typer.Option("--private", help="Path of private data on each node; it is not looked at.")
    ] = "",
    model_args: Annotated[
        str, typer.Option("--model-args", help="Arguments of the function, as in job.yaml: '{width: 64}'.")
    ] = "",
    code: Annotated[
        list[Path] | None,
        typer.Option(
            "--code",
            help="File or package with the model's own layers, losses and metrics; "
            "imports of --model are found.",
            show_default=False,
        ),
    ] = None,
    label: Annotated[
        str, typer.Option("--label", help="The label's column of .csv files, or feature of TFRecord files.")
    ] = "",
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", help="A column of .csv files that is no feature.", show_default=False),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", help="Path of the job file to write.")
    ] = options.DEFAULT_JOB,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing job file.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Write a commented job.yaml, after a look at your model and data."""
    from csdctl.cli.render.init import init_document, render_written
    from csdctl.cli.render.prepare import PreparingView
    from csdctl.workflows.data.init import InitRequest, init_job

    streams = Streams(is_json=json)
    arguments = _parse_arguments(model_args)
    request = InitRequest(
        output,
        model,
        public,
        validation,
        private,
        arguments,
        tuple(code or ()),
        label,
        tuple(drop or ()),
        force,
    )
    with PreparingView(streams.views) as view:
        written = init_job(request, streams.directory, streams.say, view.show)
    render_written(streams, written)
    streams.result(init_document(written))
    if written.misfit:
        raise written.misfit


def _parse_arguments(text: str) -> dict[str, Any]:
    from csdctl.documents import parse_document
    from csdctl.job.model import ModelArguments

    return parse_document(f"model_args: {text or '{}'}", ModelArguments, name="--model-args").model_args
