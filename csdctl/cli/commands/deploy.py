"""`csdctl deploy`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.cli.options import (
    DEFAULT_FLEET,
    DEFAULT_JOB,
    DryRunOption,
    ExcludeOption,
    FailedFromOption,
    FleetOption,
    JobArgument,
    JsonOption,
    LimitOption,
)
from csdctl.cli.streams import Streams

if TYPE_CHECKING:
    from csdctl.shipping.chunks import SharedChunks
    from csdctl.shipping.parcel import Parcel


def deploy(
    job: JobArgument = DEFAULT_JOB,
    fleet: FleetOption = DEFAULT_FLEET,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            metavar="SOURCE[:DESTINATION]",
            help="A directory instead of a job's files; DESTINATION starts at each node's home.",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Leave out of trees what fits; like .gitignore.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Send .git, __pycache__ and .csdctl of trees, too.")
    ] = False,
    dry_run: DryRunOption = False,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    failed_from: FailedFromOption = None,
    json: JsonOption = False,
) -> None:
    """Bring a job's files, or whole trees, to every node; what is there is not sent again."""
    from csdctl.cli.render.deploy import DeployView, deploy_document, render_deliveries
    from csdctl.cli.render.problems import render_failed
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.shipping.chunks import SharedChunks
    from csdctl.shipping.tree import DEFAULT_IGNORED
    from csdctl.transport.many import errors_of
    from csdctl.workflows.data.deploy import deploy_parcel
    from csdctl.workflows.workspace.partial_failure import choose_fleet, conclude

    streams = Streams(is_json=json)
    chosen = choose_fleet(fleet, limit, exclude, failed_from)
    chunks = SharedChunks()
    ignored = [*(ignore or ()), *(() if everything else DEFAULT_IGNORED)]
    parcel = _pack_trees(streams, tree, ignored, chunks) if tree else _pack_job(streams, job)
    with DeployView(streams.people, num_nodes=len(chosen.nodes), dry_run=dry_run) as view:
        outcomes = deploy_parcel(
            parcel,
            chunks,
            chosen,
            directory=streams.directory,
            dry_run=dry_run,
            on_progress=view.advance,
            on_done=view.finish,
        )
    if streams.people.is_terminal:
        render_deliveries(streams.people, outcomes, dry_run=dry_run)
    failed = errors_of(outcomes)
    render_failed(streams.people, failed, chosen)
    streams.result(deploy_document(outcomes, failed, dry_run=dry_run))
    conclude(ProjectDirectory(streams.directory), "deploy", list(outcomes), failed)


def _pack_trees(streams: Streams, written: list[str], ignored: list[str], chunks: "SharedChunks") -> "Parcel":
    from csdctl.cli.render.numbers import format_bytes
    from csdctl.shipping.chunks import printable
    from csdctl.shipping.tree import parse_tree
    from csdctl.workflows.data.deploy import pack_trees

    requests = [parse_tree(one) for one in written]
    parcel = pack_trees(requests, chunks, ignored)
    for request, tree in zip(requests, parcel.trees, strict=True):
        size = f"{len(tree.files):,} files ({format_bytes(tree.num_bytes)})"
        streams.say(f"{printable(str(request.source))}: {size} for {printable(tree.destination)}")
    return parcel


def _pack_job(streams: Streams, job: Path) -> "Parcel":
    from csdctl.job.model import load_job
    from csdctl.shipping.parcel import pack_parcel
    from csdctl.workflows.data.prepare import prepare_code

    files = prepare_code(load_job(job), streams.directory, streams.say)
    return pack_parcel([file.as_object() for file in files])
