"""`csdctl clean`."""

from typing import Annotated

import typer

from csdctl.cli.options import (
    DEFAULT_FLEET,
    DryRunOption,
    ExcludeOption,
    FailedFromOption,
    FleetOption,
    JsonOption,
    LimitOption,
    YesOption,
)
from csdctl.cli.streams import Streams


def clean(
    fleet: FleetOption = DEFAULT_FLEET,
    everything: Annotated[
        bool,
        typer.Option("--everything", help="Remove all that csdctl wrote on the nodes, prepared data too."),
    ] = False,
    unused: Annotated[
        bool,
        typer.Option(
            "--unused",
            help="Remove stored files that no deployed tree uses; they are sent again when needed.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also end a csdctl that works there now, on whatever host.")
    ] = False,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    failed_from: FailedFromOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """End and remove what an earlier csdctl left on the machines."""
    from csdctl.cli.render.clean import clean_document, render_cleaned
    from csdctl.cli.render.problems import render_failed
    from csdctl.launch.leftovers import CleanupOptions
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.transport.many import errors_of
    from csdctl.workflows.maintenance.clean import clean
    from csdctl.workflows.workspace.partial_failure import choose_fleet, conclude

    streams = Streams(is_json=json)
    chosen = choose_fleet(fleet, limit, exclude, failed_from)
    if everything and not dry_run:
        streams.confirm(f"Remove all that csdctl wrote on {len(chosen.nodes)} nodes?", yes=yes)
    sweeping = CleanupOptions(
        is_ending=not dry_run, is_removing=not dry_run, is_removing_all=everything, is_forced=force
    )
    outcomes = clean(
        chosen,
        sweeping,
        directory=streams.directory,
        is_pruning=unused and not dry_run,
        on_done=lambda outcome: render_cleaned(streams.people, outcome, is_dry=dry_run),
    )
    failed = errors_of(outcomes)
    render_failed(streams.people, failed, chosen)
    streams.result(clean_document(outcomes, failed, is_dry=dry_run))
    conclude(ProjectDirectory(streams.directory), "clean", list(outcomes), failed)
