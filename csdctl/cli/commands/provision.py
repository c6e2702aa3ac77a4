"""`csdctl provision`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_fleet
from csdctl.errors import InputError
from csdctl.fleet.names import format_node_names

if TYPE_CHECKING:
    from csdctl.workflows.provision.machine import Kind
    from csdctl.workflows.provision.provision import ProvisionRequest


@on_fleet
def provision(
    call: Call,
    collect: Annotated[
        bool, typer.Option("--collect", help="Only collect what the nodes need, on this host.")
    ] = False,
    send: Annotated[
        bool, typer.Option("--send", help="Only collect and send; install nothing. Needs no Ansible.")
    ] = False,
    uninstall: Annotated[
        bool,
        typer.Option("--uninstall", help="Remove everything that was installed, and csdctl's files there."),
    ] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCHITECTURE[:PYTHON]",
            help="With --collect: collect for this kind without asking nodes; aarch64 or x86_64:3.12.",
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Directory of everything that is installed, the same on all nodes.")
    ] = "/opt/csdctl",
    bundles: Annotated[
        Path | None, typer.Option(help="Directory of what is collected.  [default: .csdctl/provision]")
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(help="Another lock file of Python packages, with hashes.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a variable of the role, such as node_firewall=true.",
        ),
    ] = None,
    tags: Annotated[
        str, typer.Option(help="Run only tasks with these tags: user, sshd, wheels, limits, …")
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "--check", help="Show what would be sent and changed, without doing it."),
    ] = False,
    yes: options.YesOption = False,
) -> None:
    """Install Python, the packages for training and MPI on bare nodes."""
    from csdctl.terminal.nodes import (
        TransferView,
        collected_document,
        provision_document,
        render_provisioned,
    )
    from csdctl.workflows.provision import provision as workflow

    streams = call.streams
    request = _build_request(call.directory, bundles, prefix, lock, set_, tags, dry_run=dry_run, send=send)
    if collect and kind:
        found = [workflow.collect_kind(request, one, streams.say) for one in _parse_kinds(kind)]
        streams.result(collected_document(found))
        return
    if collect:
        streams.result(
            collected_document(workflow.collect_fleet(request, call.fleet, call.directory, streams.say))
        )
        return
    if uninstall and not dry_run:
        names = format_node_names(node.name for node in call.fleet.nodes)
        call.streams.confirm(f"Remove {prefix} and ~/.csdctl, with prepared data, from {names}?", yes=yes)
    with TransferView(call.streams.console, len(call.fleet.nodes)) as view:
        if uninstall:
            outcomes = workflow.uninstall(request, call.fleet, directory=call.directory, on_task=view.task)
        else:
            outcomes = workflow.provision(
                request,
                call.fleet,
                directory=call.directory,
                say=call.streams.say,
                on_progress=view.advance,
                on_sent=view.sent,
                on_task=view.task,
            )
    render_provisioned(call.streams.console, outcomes, request)
    call.finish(outcomes, provision_document(outcomes, request), is_dry=dry_run)


def _build_request(
    directory: Path,
    bundles: Path | None,
    prefix: str,
    lock: Path | None,
    values: Sequence[str] | None,
    tags: str,
    *,
    dry_run: bool,
    send: bool,
) -> "ProvisionRequest":
    """Return the request; raises InputError for an unusable value."""
    from csdctl.runs.directory import ProjectDirectory
    from csdctl.workflows.provision.bundle import LOCK
    from csdctl.workflows.provision.provision import ProvisionRequest

    parsed = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(
                f"--set {text!r} is not NAME=VALUE", remedy="for example --set node_firewall=true"
            )
        parsed[name] = value
    return ProvisionRequest(
        (bundles or ProjectDirectory(directory).state / "provision").absolute(),
        prefix.rstrip("/"),
        lock or LOCK,
        is_dry_run=dry_run,
        sends_only=send,
        values=parsed,
        tags=tags,
    )


def _parse_kinds(texts: Sequence[str]) -> "list[Kind]":
    """Return the kinds of `--kind`; without a version, Python itself is collected, too."""
    from csdctl.workflows.provision.machine import ARCHITECTURES, PYTHONS, SENT_PYTHON, Kind

    kinds = []
    for text in texts:
        architecture, colon, python = text.partition(":")
        if architecture not in ARCHITECTURES or (colon and python not in PYTHONS):
            raise InputError(
                f"--kind {text!r} is unknown",
                remedy=f"give {' or '.join(ARCHITECTURES)}; with {', '.join(PYTHONS)} if nodes have that",
            )
        kinds.append(Kind(architecture, python or SENT_PYTHON, sends_python=not colon))
    return kinds
