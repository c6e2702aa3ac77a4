"""`csdctl trust`."""

from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_fleet


@on_fleet
def trust(
    call: Call,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="Delete the accepted keys of these nodes, after they were reinstalled."
        ),
    ] = False,
    dry_run: options.DryRunOption = False,
    yes: options.YesOption = False,
) -> None:
    """Show the nodes' SSH host keys, and accept all new ones at once."""
    from csdctl.terminal.fleet import TrustScreen
    from csdctl.workflows.discovery.trust import check_forgotten, forget_keys, review_keys

    screen = TrustScreen(call.streams, call.fleet, yes=yes, is_dry_run=dry_run)
    if forget:
        screen.show_forgotten(forget_keys(call.fleet.nodes, call.streams.project, is_dry_run=dry_run))
        if not dry_run:
            check_forgotten(call.fleet, call.directory)
        return
    num_accepted = review_keys(call.fleet, call.streams.project, screen.show, is_dry_run=dry_run)
    if dry_run:
        call.streams.say("dry run: no key was accepted")
    elif num_accepted:
        call.streams.say(f"{num_accepted} keys accepted: {call.streams.project.known_hosts}")
    call.conclude(screen.document(), screen.machines, screen.failed, is_dry=dry_run)
