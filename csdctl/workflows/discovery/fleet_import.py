"""`discover --cidr`, `--inventory`, `--ssh-config`: a fleet file from another source of nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.workflows.discovery.inventory_sources import (
    FoundFleet,
    NodeSource,
    check_may_write,
    find_nodes,
    write_fleet,
)


@dataclass(frozen=True)
class ImportOptions:
    """Which nodes of a source to take, and what to do with the fleet file."""

    limit: Sequence[str] = ()
    exclude: Sequence[str] = ()
    is_overwriting: bool = False
    is_dry_run: bool = False
    """Whether to find the nodes and write no file."""


def import_fleet(source: NodeSource, path: Path, options: ImportOptions, *, directory: Path) -> FoundFleet:
    """Find the nodes of `source` and write them to the fleet file `path`.

    Raises InputError or NoNodeReachableError; a file that may not be overwritten is an error before
    the search for nodes starts.
    """
    if not options.is_dry_run:
        check_may_write(path, force=options.is_overwriting)
    found = find_nodes(source, path, directory=directory, limit=options.limit, exclude=options.exclude)
    if not options.is_dry_run:
        write_fleet(found, force=options.is_overwriting)
    return found
