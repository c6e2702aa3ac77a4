"""`csdctl deploy`."""

from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_fleet


@on_fleet
def deploy(
    call: Call,
    job: options.JobArgument = options.DEFAULT_JOB,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE[:DESTINATION]",
            help="Copy a directory instead of a job's files; DESTINATION is relative to each node's home.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Exclude matching files from trees; same syntax as .gitignore.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also copy .git, __pycache__ and .csdctl of trees.")
    ] = False,
    dry_run: options.DryRunOption = False,
) -> None:
    """Copy a job's files, or directory trees, to every node; send only what is missing there."""
    from csdctl.terminal.nodes import TransferView, render_deliveries
    from csdctl.workflows.data.deploy import DeployRequest, deploy_request

    request = DeployRequest(job, tuple(tree or ()), tuple(ignore or ()), everything, dry_run)
    console = call.streams.console
    with TransferView(console, len(call.fleet.nodes), is_dry_run=dry_run) as view:
        outcomes = deploy_request(
            request, call.fleet, directory=call.directory, say=call.streams.say, observer=view
        )
    if console.is_terminal:
        render_deliveries(console, outcomes, dry_run=dry_run)
    call.finish(outcomes, schema="csdctl.deploy/1", is_dry=dry_run)
