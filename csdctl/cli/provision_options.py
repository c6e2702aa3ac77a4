"""The options of `csdctl provision` as a request."""

from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.provision.machine import ARCHITECTURES, PYTHONS, SENT_PYTHON, Kind
from csdctl.workflows.provision.provision import ProvisionRequest
from csdctl.workflows.provision.wheels import LOCK


def build_request(
    directory: Path,
    bundles: Path | None,
    prefix: str,
    lock: Path | None,
    values: Sequence[str] | None,
    tags: str,
    *,
    dry_run: bool,
    send: bool,
) -> ProvisionRequest:
    """Return the request; raises InputError for an unusable value."""
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


def parse_kinds(texts: Sequence[str]) -> list[Kind]:
    """Return the kinds of `--kind`; without a version, Python itself is collected, too."""
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
