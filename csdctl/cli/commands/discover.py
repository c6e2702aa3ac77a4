"""`csdctl discover`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.cli.call import Call, on_fleet
from csdctl.errors import InputError

if TYPE_CHECKING:
    from csdctl.workflows.discovery.inventory import NodeSource


@on_fleet
def discover(
    call: Call,
    cidr: Annotated[
        list[str] | None,
        typer.Option(help="First scan this address range for machines, and write the fleet file."),
    ] = None,
    user: Annotated[str, typer.Option(help="User on the machines that --cidr finds; default: root.")] = "",
    key: Annotated[Path | None, typer.Option(help="Private key for the machines that --cidr finds.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="SSH port that --cidr scans; default: 22.")
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(help="First write the fleet file from this output of `ansible-inventory --list`."),
    ] = None,
    ssh_config: Annotated[
        Path | None,
        typer.Option(help="First write the fleet file from the aliases in this file, such as ~/.ssh/config."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing fleet file.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the fleet file that would be written, and stop.")
    ] = False,
) -> None:
    """Find the machines of a fleet, and record their hardware and software."""
    from csdctl.terminal.fleet import DiscoverView, discover_document, render_fleet, show_imported
    from csdctl.workflows.discovery.discover import discover
    from csdctl.workflows.discovery.inventory import import_fleet

    source = _parse_source(cidr or [], user, key, port, inventory, ssh_config)
    if source:
        found = import_fleet(
            source,
            call.fleet_path,
            directory=call.directory,
            limit=call.limit or (),
            exclude=call.exclude or (),
            force=force,
            is_dry_run=dry_run,
        )
        show_imported(call.streams, found, source.name, is_dry_run=dry_run)
        if dry_run:
            return
        call.limit = call.exclude = None  # the file lists only the nodes that they select
    elif dry_run or force:
        raise InputError(
            "--dry-run and --force apply only when the fleet file is written",
            remedy="add the source to write it from: --cidr, --inventory or --ssh-config",
        )
    with DiscoverView(call.streams.console, len(call.fleet.machines)) as view:
        result = discover(call.fleet, directory=call.directory, on_done=view.take)
    render_fleet(call.streams.console, result, verbose=call.streams.is_verbose)
    call.conclude(discover_document(result), list(result.facts), result.failed)


def _parse_source(
    cidrs: list[str],
    user: str,
    key: Path | None,
    port: int | None,
    inventory: Path | None,
    ssh_config: Path | None,
) -> "NodeSource | None":
    """Return the source that the options name, if any; raises InputError for more than one."""
    from csdctl.workflows.discovery.inventory import address_ranges, ansible_inventory
    from csdctl.workflows.discovery.inventory import ssh_config as of_ssh_config

    of_cidr = {"--user": user, "--key": key, "--port": port}
    given = [name for name, value in of_cidr.items() if value]
    if given and not cidrs:
        raise InputError(f"{given[0]} applies only to machines that --cidr finds", remedy="add --cidr RANGE")
    path = Path(os.path.abspath(key.expanduser())) if key else None
    sources: list[NodeSource] = []
    sources += [address_ranges(cidrs, user or "root", path, port or 22)] if cidrs else []
    sources += [ansible_inventory(inventory.expanduser())] if inventory else []
    sources += [of_ssh_config(ssh_config.expanduser())] if ssh_config else []
    if len(sources) > 1:
        raise InputError(
            f"a fleet file is written from one source, received {len(sources)}",
            remedy="choose one of --cidr, --inventory and --ssh-config",
        )
    return sources[0] if sources else None
