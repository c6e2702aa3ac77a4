"""`csdctl init`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from csdctl.cli import options
from csdctl.terminal.streams import Streams

if TYPE_CHECKING:
    from csdctl.worker.protocol.datasets import DataLook
    from csdctl.workflows.init.init import Written


def init(
    model: Annotated[str, typer.Option(help="FILE.py:FUNCTION, FILE.keras or keras.applications:NAME.")],
    public: Annotated[
        str, typer.Option(help="Training data: a path, FILE.py:FUNCTION or FILE.py:FUNCTION:PATH.")
    ],
    validation: Annotated[str, typer.Option(help="The validation data, as --public.")] = "",
    private: Annotated[
        str, typer.Option(help="Path of private data on each node; it is not looked at.")
    ] = "",
    model_args: Annotated[
        str, typer.Option(help="Arguments of the function, as in job.yaml: '{width: 64}'.")
    ] = "",
    code: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or package with the model's own layers, losses and metrics; "
            "imports of --model are found."
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="The label's column of .csv files.")] = "",
    drop: Annotated[list[str] | None, typer.Option(help="A column of .csv files that is no feature.")] = None,
    output: Annotated[Path, typer.Option(help="Path of the job file to write.")] = options.DEFAULT_JOB,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing job file.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Write a commented job.yaml, after a look at your model and data."""
    from csdctl.documents import parse_document
    from csdctl.job.model import ModelArguments
    from csdctl.terminal.prepare import PreparingView
    from csdctl.workflows.init.init import InitRequest, init_job

    streams = Streams(is_json=json)
    arguments = parse_document(f"model_args: {model_args or '{}'}", ModelArguments, name="--model-args")
    files, dropped = tuple(code or ()), tuple(drop or ())
    request = InitRequest(
        output, model, public, validation, private, arguments.model_args, files, label, dropped, force
    )
    with PreparingView(streams.views) as view:
        written = init_job(request, streams.directory, streams.say, view.show)
    _show(streams, written)
    if written.misfit:
        raise written.misfit


def _show(streams: Streams, written: "Written") -> None:
    """Print what was seen, and the commands that come next."""
    from csdctl.workflows.init.init import describe_data, describe_model

    looks, misfit = written.looks, written.misfit
    streams.say(f"model: {describe_model(looks.model)}")
    streams.say(f"public data: {describe_data(looks.public)}")
    if looks.validation:
        streams.say(f"validation data: {describe_data(looks.validation)}")
    streams.say(f"{written.path} written: read its comments, which name placeholders and guesses")
    named = "" if written.path == options.DEFAULT_JOB else f" {written.path}"
    commands = ["csdctl doctor", *(f"csdctl {command}{named}" for command in ("prepare", "tune", "train"))]
    if not misfit:
        streams.say("next: " + ", ".join(f"`{command}`" for command in commands))
    document = {
        "schema": "csdctl.init/1",
        "path": written.path,
        "model": looks.model,
        "public": _look_document(looks.public),
        "validation": _look_document(looks.validation) if looks.validation else None,
        "fits": misfit is None,
        "next": commands,
        "problem": misfit,
    }
    streams.result(document)


def _look_document(look: "DataLook") -> dict[str, Any]:
    """Return a look without the path and hashes of what was not kept."""
    left_out = ("path", "fingerprint", "images_sha256", "labels_sha256")
    return {
        **vars(look),
        "info": {name: one for name, one in vars(look.info).items() if name not in left_out},
    }
