"""Commands for a job's data and code: init, prepare, deploy."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from csdctl.cli import options, parameters
from csdctl.cli.call import Call, on_fleet, on_job, open_streams
from csdctl.cli.parameters import argument, option
from csdctl.errors import InputError
from csdctl.terminal.streams import Streams

if TYPE_CHECKING:
    from csdctl.worker.protocol.datasets import DataLook
    from csdctl.workflows.init.init import Looks


def init(
    script: Path | None = argument(
        None, "Keras training script, or use --model and --public.", metavar="[SCRIPT]"
    ),
    arguments: list[str] | None = argument(
        None, "The script's own options, after --.", metavar="[-- OPTIONS]"
    ),
    model: str = option("", "FILE.py:FUNCTION, FILE.keras or keras.applications:NAME."),
    public: str = option("", "Training data: a path, FILE.py:FUNCTION or FILE.py:FUNCTION:PATH."),
    validation: str = option("", "Validation data; same syntax as --public."),
    private: str = option("", "Path of private data on each node; not inspected."),
    model_args: str = option("", "Arguments of the function, as in job.yaml: '{width: 64}'."),
    code: list[Path] | None = option(
        None,
        "File or package with the model's own layers, losses and metrics; "
        "imports of --model are found automatically.",
    ),
    label: str = option("", "Label column of .csv files."),
    drop: list[str] | None = option(None, "Column of .csv files to ignore."),
    output: Path = option(parameters.DEFAULT_JOB, "Path of the job file to write.", "--output", "-o"),
    force: bool = options.FORCE,
    json: bool = options.JSON,
) -> None:
    """Write a commented job.yaml from a training script, or from a model and its data."""
    from csdctl.documents import parse_document
    from csdctl.job.model import ModelArguments
    from csdctl.terminal.prepare import PreparingView
    from csdctl.workflows.init.init import InitRequest, init_job

    if script and (model or public or validation or private):
        raise InputError(
            "SCRIPT excludes --model, --public, --validation and --private",
            remedy="pass only the script, or leave it out",
        )
    if not script and not (model and public):
        missing = (
            "--public" if model else "--model" if public else "a training SCRIPT, or --model and --public"
        )
        raise InputError(f"missing {missing}", remedy="for example: csdctl init train.py")
    streams = open_streams(is_json=json)
    parsed = parse_document(f"model_args: {model_args or '{}'}", ModelArguments, name="--model-args")
    request = InitRequest(
        output=output,
        model=model,
        public=public,
        validation=validation,
        private=private,
        model_args=parsed.model_args,
        code=tuple(code or ()),
        label=label,
        dropped=tuple(drop or ()),
        is_overwriting=force,
        script=script,
        options=tuple(arguments or ()),
    )
    with PreparingView(streams.views) as view:
        looks = init_job(request, streams.directory, streams.say, view.show)
    _show_looks(streams, output, looks)
    if looks.misfit:
        raise looks.misfit


def _show_looks(streams: Streams, output: Path, looks: "Looks") -> None:
    from csdctl.workflows.init.init import describe_data, describe_model

    streams.say(f"model: {describe_model(looks.model)}")
    streams.say(f"public data: {describe_data(looks.public)}")
    if looks.validation:
        streams.say(f"validation data: {describe_data(looks.validation)}")
    for line, text in looks.notes:
        streams.say(f"not converted, line {line}: {text}")
    streams.say(f"{output} written: check its comments, which mark placeholders and guesses")
    job = "" if output == parameters.DEFAULT_JOB else f" {output}"
    commands = ["csdctl doctor", *(f"csdctl {command}{job}" for command in ("prepare", "tune", "train"))]
    if not looks.misfit:
        streams.say("next: " + ", ".join(f"`{command}`" for command in commands))
    streams.result(
        {
            "schema": "csdctl.init/1",
            "path": output,
            "model": looks.model,
            "public": _look_document(looks.public),
            "validation": _look_document(looks.validation) if looks.validation else None,
            "notes": [{"line": line, "text": text} for line, text in looks.notes],
            "fits": looks.misfit is None,
            "next": commands,
            "problem": looks.misfit,
        }
    )


def _look_document(look: "DataLook") -> dict[str, Any]:
    """Return a look without the path and hashes of what was not kept."""
    left_out = ("path", "fingerprint", "images_sha256", "labels_sha256")
    return {
        **vars(look),
        "info": {name: value for name, value in vars(look.info).items() if name not in left_out},
    }


@on_job
def prepare(call: Call) -> None:
    """Convert data and model for training. Data stays where it is stored."""
    from csdctl.terminal.prepare import PreparationScreen, prepare_document, render_prepared
    from csdctl.workflows.data.prepare import prepare_fleet

    streams = call.streams
    prepared = prepare_fleet(call.job, call.fleet, call.directory, PreparationScreen(streams).events)
    render_prepared(streams.console, prepared)
    streams.result(prepare_document(prepared))


@on_fleet
def deploy(
    call: Call,
    job: Path = options.JOB,
    tree: list[str] | None = option(
        None,
        "Copy a directory instead of a job's files; DESTINATION: absolute, or relative to the home.",
        metavar="SOURCE[:DESTINATION]",
    ),
    ignore: list[str] | None = option(
        None, "Exclude matching files from trees; patterns as in .gitignore, without `!`."
    ),
    everything: bool = option(False, "Also copy .git, __pycache__ and .csdctl of trees."),
    dry_run: bool = options.DRY_RUN,
) -> None:
    """Copy a job's files, or directory trees, to every node. Only missing content is sent."""
    from csdctl.shipping.deliver import DEFAULT_IGNORED
    from csdctl.terminal.nodes import TransferView
    from csdctl.workflows.data.deploy import deploy as deploy_files

    with TransferView(call.streams.console, len(call.fleet.nodes), is_dry_run=dry_run) as view:
        outcomes = deploy_files(
            job,
            call.fleet,
            call.directory,
            call.streams.say,
            trees=tree or (),
            ignored=[*(ignore or ()), *(() if everything else DEFAULT_IGNORED)],
            is_dry_run=dry_run,
            on_tree=view.packed,
            on_progress=view.advance,
            on_done=view.finish,
        )
    call.finish(outcomes, schema="csdctl.deploy/1", is_dry=dry_run)
