"""`csdctl trust`."""

from typing import Annotated

import typer

from csdctl.cli import options


def trust(
    fleet: options.FleetOption = options.DEFAULT_FLEET,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="Delete the accepted keys of these nodes, after they were reinstalled."
        ),
    ] = False,
    limit: options.LimitOption = None,
    exclude: options.ExcludeOption = None,
    failed_from: options.FailedFromOption = None,
    dry_run: options.DryRunOption = False,
    yes: options.YesOption = False,
    json: options.JsonOption = False,
) -> None:
    """Show the nodes' SSH host keys, and accept all new ones at once."""
    from csdctl.cli.invocation import Invocation
    from csdctl.terminal.fleet import TrustScreen
    from csdctl.workflows.discovery.trust import check_forgotten, forget_keys, review_keys

    call = Invocation.start("trust", fleet, limit, exclude, failed_from, json=json)
    screen = TrustScreen(call.streams, call.fleet, yes=yes, is_dry_run=dry_run)
    if forget:
        screen.show_forgotten(forget_keys(call.fleet.nodes, call.project, is_dry_run=dry_run))
        if not dry_run:
            check_forgotten(call.fleet, call.streams.directory)
        return
    review_keys(call.fleet, call.project, screen, is_dry_run=dry_run)
    if dry_run:
        call.streams.say("dry run: no key was accepted")
    call.conclude(screen.document(), screen.machines, screen.failed, is_dry=dry_run)
