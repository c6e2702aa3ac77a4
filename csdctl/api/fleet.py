"""`csdctl.Fleet`: the machines of fleet.yaml, a Fabric group of its nodes, and the session of a function.

A function works in the current directory, as the command line does, so that `csdctl report` and the like find
what Python has written, and the other way round.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from csdctl.api.options import python_errors
from csdctl.fleet import model
from csdctl.runs.private import STATE_DIRECTORY, check_private
from csdctl.terminal.streams import Streams
from csdctl.workflows.workspace.partial_failure import choose_fleet

if TYPE_CHECKING:
    from csdctl.transport.fabric_group import FleetGroup


class Fleet(model.Fleet):
    """The host and its nodes, as written in fleet.yaml.

    `nodes` have `name`, `address`, `port`, `user`, `key`, `python`, `groups` and `jump`; `machines` are all
    names, the host first; `node(name)` returns one node; `network`, `emulated`, `path` are those of the file.
    """

    @classmethod
    def load(
        cls, path: str | Path = "fleet.yaml", *, limit: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> Self:
        """Return the fleet of fleet.yaml: all its nodes, or those that are selected.

        `limit` and `exclude` are lists of node names, ranges such as "csd[0-7]", or groups.
        Raises InputError.
        """
        with python_errors():
            return cls(**vars(choose_fleet(Path(path), limit, exclude)))

    def connections(
        self, *, command_deadline_s: float | None = 600.0, connect_deadline_s: float = 10.0
    ) -> "FleetGroup":
        """Return a Fabric ThreadingGroup of the nodes; use it as a context manager.

        Connections open when they are first used, with the addresses, keys, jump hosts and accepted host keys
        of csdctl. A command is ended, with its processes, after `command_deadline_s` seconds unless
        `run(…, timeout=…)` says otherwise; an output is kept up to 1 MiB.
        """
        from csdctl.transport.fabric_group import open_group

        return open_group(
            self,
            directory=Path.cwd(),
            connect_deadline_s=connect_deadline_s,
            command_deadline_s=command_deadline_s,
        )


FleetOrPath = model.Fleet | str | Path


@contextmanager
def open_session() -> Iterator[Streams]:
    """Work in the current directory, with files for this user alone."""
    before = os.umask(0o077)
    try:
        streams = Streams(is_verbose=False, is_debugging=False)  # not by the arguments of a user's program
        check_private(streams.directory / STATE_DIRECTORY)
        with python_errors():
            yield streams
    finally:
        os.umask(before)


def as_fleet(fleet: FleetOrPath) -> model.Fleet:
    """Return a fleet as it is, or that of a file."""
    return fleet if isinstance(fleet, model.Fleet) else load_fleet(fleet)


def load_fleet(
    path: str | Path = "fleet.yaml", *, limit: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Fleet:
    """Return the fleet of fleet.yaml: all its nodes, or those that are selected.

    `limit` and `exclude` are lists of node names, ranges such as "csd[0-7]", or groups. Where a fleet is
    expected, a path does as well. Raises InputError.
    """
    return Fleet.load(path, limit=limit, exclude=exclude)
