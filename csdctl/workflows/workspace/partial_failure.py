"""The end of a command on many nodes when some of them failed: its exit code, and the nodes to retry.

The names of the failed nodes are kept in `.csdctl/failed.json`. `--failed-from` reads this file, and also the
output of the same command with --json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from csdctl.documents import load_json, save_json
from csdctl.errors import (
    CsdctlError,
    DeadlineError,
    ExitCode,
    InputError,
    NoNodeReachableError,
    PartialError,
)
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import HOST_NAME, Fleet, select_nodes
from csdctl.fleet.names import format_node_names
from csdctl.runs.directory import ProjectDirectory

SCHEMA = "csdctl.failed/1"


def choose_fleet(
    path: Path,
    limit: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    failed_from: Path | None = None,
    *,
    may_be_empty: bool = False,
) -> Fleet:
    """Return the fleet of file `path`, with the nodes that the options select; raises InputError.

    `may_be_empty`: --exclude may leave the host alone.
    """
    fleet = load_fleet(path)
    if failed_from:
        fleet = select_nodes(fleet, [load_failed(failed_from)])
    return select_nodes(fleet, limit or (), exclude or (), may_be_empty=may_be_empty)


def load_failed(path: Path) -> str:
    """Return the nodes that a command failed on, joined by commas; raises InputError when none is listed."""
    content = load_json(path)
    try:
        names = [str(name) for name in content["failed"] if name != HOST_NAME]
    except (KeyError, TypeError):
        raise InputError(
            f"{path} does not list the nodes that a command failed on",
            remedy="pass .csdctl/failed.json, or the output of a command with --json",
        ) from None
    if not names:
        raise InputError(f"{path} lists no node: nothing to retry")
    return ",".join(names)


def failed_document(failed: Mapping[str, CsdctlError]) -> dict[str, dict[str, str]]:
    """Return the `failed` part of a command's JSON document."""
    return {name: {"message": error.message, "remedy": error.remedy} for name, error in failed.items()}


def conclude(
    project: ProjectDirectory,
    command: str,
    machines: Sequence[str],
    failed: Mapping[str, CsdctlError],
    arguments: str = "",
) -> None:
    """End a command that ran on `machines`: save the failed ones, and raise one error for them.

    Raises NoNodeReachableError when no node could be reached, PartialError when some machines succeeded,
    DeadlineError when none ended in time, CsdctlError when none succeeded. `arguments` are those that a retry
    needs too.
    """
    if not failed:
        project.failed.unlink(missing_ok=True)
        return
    save_json(project.failed, {"schema": SCHEMA, "command": command, "failed": failed_document(failed)})
    nodes = [name for name in machines if name != HOST_NAME]
    errors = list(failed.values())
    where = project.failed.relative_to(project.root)
    remedy = (
        f"fix them as shown above, then retry only them: csdctl {command} --failed-from {where}{arguments}"
    )
    if set(nodes) <= set(failed) and all(error.exit_code == ExitCode.UNREACHABLE for error in errors):
        raise NoNodeReachableError(f"none of {len(nodes)} nodes could be reached", remedy=remedy)
    error_type: type[CsdctlError] = PartialError if len(failed) < len(machines) else CsdctlError
    if error_type is CsdctlError and all(isinstance(error, DeadlineError) for error in errors):
        error_type = DeadlineError
    names = format_node_names(failed)
    raise error_type(f"{command} failed on {len(failed)} of {len(machines)} machines: {names}", remedy=remedy)
