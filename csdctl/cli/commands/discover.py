"""`csdctl discover`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.cli.options import (
    DEFAULT_FLEET,
    ExcludeOption,
    FailedFromOption,
    FleetOption,
    JsonOption,
    LimitOption,
)
from csdctl.cli.streams import Streams
from csdctl.errors import InputError

if TYPE_CHECKING:
    from csdctl.workflows.discovery.inventory_sources import NodeSource


def discover(
    fleet: FleetOption = DEFAULT_FLEET,
    cidr: Annotated[
        list[str] | None,
        typer.Option(
            "--cidr",
            help="Find machines in this range first, and write the fleet file.",
            show_default=False,
        ),
    ] = None,
    interface: Annotated[
        str,
        typer.Option("--interface", help="Scan through this network interface; needs root or CAP_NET_RAW."),
    ] = "",
    user: Annotated[str, typer.Option("--user", help="User on the machines that --cidr finds; root.")] = "",
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Private key for the machines that --cidr finds.", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65535, help="SSH port that --cidr looks for; 22.", show_default=False
        ),
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(
            "--inventory", help="Write the fleet file from this Ansible inventory.", show_default=False
        ),
    ] = None,
    ssh_config: Annotated[
        Path | None,
        typer.Option(
            "--ssh-config",
            help="Write the fleet file from the aliases of this file, such as ~/.ssh/config.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a fleet file that is there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the fleet file that would be written, and stop.")
    ] = False,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
    failed_from: FailedFromOption = None,
    json: JsonOption = False,
) -> None:
    """Find the machines, learn what they are, and keep it beside the fleet file."""
    from csdctl.cli.render.discovering import DiscoverView
    from csdctl.cli.render.fleet import discover_document, fleet_document, render_fleet
    from csdctl.cli.render.numbers import format_count
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.workflows.discovery.discover import discover
    from csdctl.workflows.discovery.inventory_sources import check_may_write, find_nodes, write_fleet
    from csdctl.workflows.workspace.partial_failure import choose_fleet, conclude

    streams = Streams(is_json=json)
    source = _source(cidr or (), interface, user, key, port, inventory, ssh_config)
    limit, exclude = limit or [], exclude or []
    if source:
        if not dry_run:
            check_may_write(fleet, force=force)
        found = find_nodes(source, fleet, directory=streams.directory, limit=limit, exclude=exclude)
        for warning in found.warnings:
            streams.errors.print(f"warning: {warning}", markup=False)
        if dry_run:
            if not json:
                streams.stdout.write(found.text)
            streams.result(fleet_document(found.fleet))
            return
        write_fleet(found, force=force)
        streams.say(f"{format_count(found.fleet.nodes, 'machine')} found in {source.name}: {fleet} written")
        limit, exclude = [], []  # the file has no others
    elif dry_run or force:
        raise InputError(
            "--dry-run and --force are about writing the fleet file",
            remedy="say what to write it from: --cidr, --inventory or --ssh-config",
        )
    chosen = choose_fleet(fleet, limit, exclude, failed_from)
    with DiscoverView(streams.people, len(chosen.nodes) + 1) as view:
        result = discover(chosen, directory=streams.directory, on_done=view.show)
    render_fleet(streams.people, result, verbose=streams.is_verbose)
    streams.result(discover_document(result))
    conclude(ProjectDirectory(streams.directory), "discover", list(result.facts), result.failed)


def _source(
    cidrs: "list[str] | tuple[()]",
    interface: str,
    user: str,
    key: Path | None,
    port: int | None,
    inventory: Path | None,
    ssh_config: Path | None,
) -> "NodeSource | None":
    """The one source that the options name, if any; raises InputError for two."""
    from csdctl.workflows.discovery.inventory_sources import AddressRanges, AnsibleInventory, SshConfig

    sources: list[NodeSource] = []
    if cidrs:
        path = Path(os.path.abspath(key.expanduser())) if key else None
        sources.append(AddressRanges(tuple(cidrs), user or "root", path, port or 22, interface))
    elif given := [name for name, value in _of_cidr(interface, user, key, port) if value]:
        raise InputError(f"{given[0]} is about machines that --cidr finds", remedy="add --cidr RANGE")
    sources += [AnsibleInventory(inventory.expanduser())] if inventory else []
    sources += [SshConfig(ssh_config.expanduser())] if ssh_config else []
    if len(sources) > 1:
        raise InputError(
            f"a fleet file is written from one source, and {len(sources)} are named",
            remedy="name one of --cidr, --inventory and --ssh-config",
        )
    return sources[0] if sources else None


def _of_cidr(interface: str, user: str, key: Path | None, port: int | None) -> tuple[tuple[str, object], ...]:
    """The options that mean nothing without --cidr."""
    return ("--interface", interface), ("--user", user), ("--key", key), ("--port", port)
