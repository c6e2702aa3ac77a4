"""`csdctl inventory`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from csdctl.cli import options
from csdctl.terminal.streams import Streams, format_json


class Format(StrEnum):
    """Formats of the inventory."""

    ANSIBLE = "ansible"
    JSON = "json"
    SSH_CONFIG = "ssh-config"


def inventory(
    fleet: options.FleetOption = options.DEFAULT_FLEET,
    form: Annotated[
        Format,
        typer.Option("--format", help="ansible: for ansible-playbook -i; ssh-config: for ssh -F; or json."),
    ] = Format.ANSIBLE,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
    limit: options.LimitOption = None,
    exclude: options.ExcludeOption = None,
) -> None:
    """Print the nodes of the fleet as an Ansible inventory, an ssh_config or JSON."""
    from csdctl.documents import save_text
    from csdctl.reporting.numbers import format_count
    from csdctl.terminal.fleet import fleet_document
    from csdctl.workflows.discovery.inventory import TEXT_FORMATS
    from csdctl.workflows.workspace.partial_failure import choose_fleet

    streams = Streams()
    chosen = choose_fleet(fleet, limit, exclude)
    if form is Format.JSON:
        text = format_json(fleet_document(chosen), indent=2) + "\n"
    else:
        text = TEXT_FORMATS[form](chosen, streams.directory)
    if output:
        save_text(output, text)
        streams.say(f"{format_count(chosen.nodes, 'node')}: {output} written")
    else:
        streams.write(text)
