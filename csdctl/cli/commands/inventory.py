"""`csdctl inventory`."""

import json as json_format
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli.options import DEFAULT_FLEET, ExcludeOption, FleetOption, LimitOption
from csdctl.cli.streams import Streams


class Format(StrEnum):
    """What the inventory is for."""

    ANSIBLE = "ansible"
    JSON = "json"
    SSH_CONFIG = "ssh-config"


def inventory(
    fleet: FleetOption = DEFAULT_FLEET,
    form: Annotated[
        Format,
        typer.Option("--format", help="ansible: for ansible-playbook -i; ssh-config: for ssh -F; or json."),
    ] = Format.ANSIBLE,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write this file instead of standard output.", show_default=False),
    ] = None,
    limit: LimitOption = None,
    exclude: ExcludeOption = None,
) -> None:
    """Print the nodes of the fleet for other programs: Ansible, ssh, or your own."""
    from csdctl.cli.render.fleet import fleet_document
    from csdctl.cli.render.numbers import format_count
    from csdctl.documents import save_text
    from csdctl.workflows.discovery.inventory import TEXT_FORMATS
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams()
    chosen = choose_fleet(fleet, limit, exclude)
    if form is Format.JSON:
        text = json_format.dumps(fleet_document(chosen), indent=2) + "\n"
    else:
        text = TEXT_FORMATS[form](chosen, streams.directory)
    if output:
        save_text(output, text)
        streams.say(f"{format_count(chosen.nodes, 'node')}: {output} written")
    else:
        streams.stdout.write(text)
