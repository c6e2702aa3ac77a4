"""`csdctl discover`."""

from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.options import DEFAULT_FLEET, ExcludeOption, FleetOption, JsonOption, LimitOption
from csdctl.cli.streams import Streams
from csdctl.errors import InputError


def discover(
    fleet: FleetOption = DEFAULT_FLEET,
    cidr: Annotated[
        str,
        typer.Option("--cidr", help="Find machines in this address range first, and write the fleet file."),
    ] = "",
    interface: Annotated[
        str,
        typer.Option("--interface", help="Scan through this network interface; needs root or CAP_NET_RAW."),
    ] = "",
    user: Annotated[str, typer.Option("--user", help="User on the machines found.")] = "root",
    key: Annotated[
        Path | None, typer.Option("--key", help="Private key for the machines found.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="SSH port to look for.")] = 22,
    force: Annotated[bool, typer.Option("--force", help="Let --cidr overwrite the fleet file.")] = False,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    json: JsonOption = False,
    verbose: Annotated[int, typer.Option("--verbose", count=True, help="More columns.")] = 0,
) -> None:
    """Find the machines, learn what they are, and keep it beside the fleet file."""
    from csdctl.cli.render.fleet import discover_document, render_fleet
    from csdctl.fleet.model import load_fleet
    from csdctl.fleet.select import select_nodes
    from csdctl.workflows.discover import check_may_write, discover, scan, write_fleet

    streams = Streams(is_json=json)
    if cidr:
        check_may_write(fleet, force=force)
        found = scan(cidr, user=user, key=key and key.absolute(), port=port, interface=interface)
        write_fleet(fleet, found, network=cidr, force=force)
        streams.say(f"{len(found)} machines found in {cidr}: {fleet} written")
    elif interface:
        raise InputError("--interface says where to scan, so it needs --cidr", remedy="add --cidr RANGE")
    result = discover(
        select_nodes(load_fleet(fleet), limit or (), exclude or ()), directory=streams.directory
    )
    render_fleet(streams.people, result, verbose=verbose > 0)
    streams.result(discover_document(result))
    result.check()
