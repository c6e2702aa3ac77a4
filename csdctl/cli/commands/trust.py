"""`csdctl trust`."""

from typing import Annotated

import typer

from csdctl.cli.options import (
    DEFAULT_FLEET,
    ExcludeOption,
    FailedFromOption,
    FleetOption,
    JsonOption,
    LimitOption,
    YesOption,
)
from csdctl.cli.streams import Streams


def trust(
    fleet: FleetOption = DEFAULT_FLEET,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget the keys of these nodes: they were set up anew.")
    ] = False,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    failed_from: FailedFromOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Show the nodes' host keys, and accept the new ones for all of them at once."""
    from csdctl.cli.render.trust import TrustScreen
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.workflows.discovery.trust import (
        accept_keys,
        check_forgotten,
        fetch_keys,
        forget_keys,
        list_layers,
    )
    from csdctl.workflows.workspace.partial_failure import choose_fleet, conclude

    streams = Streams(is_json=json)
    project = ProjectDirectory(streams.directory)
    chosen = choose_fleet(fleet, limit, exclude, failed_from)
    screen = TrustScreen(streams, chosen)
    if forget:
        screen.show_forgotten(forget_keys(chosen.nodes, project))
        check_forgotten(chosen, streams.directory)
        return
    for machines in list_layers(chosen):
        new = screen.show_keys(fetch_keys(chosen, machines, directory=streams.directory))
        if new:
            streams.confirm(f"Accept {len(new)} new keys?", yes=yes)
            accept_keys(new, project)
            streams.say(f"{len(new)} keys accepted: {project.known_hosts}")
    streams.result(screen.document())
    conclude(project, "trust", screen.machines, screen.failed)
