"""`csdctl clean`."""

from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_fleet


@on_fleet
def clean(
    call: Call,
    everything: Annotated[
        bool,
        typer.Option(
            "--everything", help="Remove everything csdctl wrote on the nodes, prepared data included."
        ),
    ] = False,
    unused: Annotated[
        bool,
        typer.Option(
            "--unused",
            help="Remove stored files that no deployed tree uses; they are sent again when needed.",
        ),
    ] = False,
    computed: Annotated[
        bool,
        typer.Option(
            "--computed",
            help="Remove features and predictions on host and nodes; they are computed again when needed.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also stop a csdctl that is running there now, from any host.")
    ] = False,
    dry_run: options.DryRunOption = False,
    yes: options.YesOption = False,
) -> None:
    """Stop processes and remove files that earlier csdctl commands left on the machines."""
    from csdctl.launch.leftovers import CleanupOptions
    from csdctl.terminal.fleet import render_cleaned
    from csdctl.workflows.maintenance.clean import clean

    if everything and not dry_run:
        num_nodes = len(call.fleet.nodes)
        call.streams.confirm(f"Remove everything csdctl wrote on {num_nodes} nodes?", yes=yes)
    outcomes = clean(
        call.fleet,
        CleanupOptions(
            is_ending=not dry_run,
            is_removing=not dry_run,
            is_removing_all=everything,
            is_removing_computed=computed,
            is_pruning=unused and not dry_run,
            is_forced=force,
        ),
        directory=call.directory,
        on_done=lambda outcome: render_cleaned(call.streams.console, outcome, is_dry=dry_run),
    )
    call.finish(outcomes, schema="csdctl.clean/1", is_dry=dry_run)
