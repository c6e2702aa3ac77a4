"""What every function of the Python interface does before and after its workflow.

It works in the current directory, as the command line does, so that `csdctl report` and the like find what
Python has written, and the other way round.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from csdctl.api.fleet import Fleet
from csdctl.api.options import python_errors
from csdctl.fleet import model
from csdctl.runs.private import STATE_DIRECTORY, check_private
from csdctl.terminal.streams import Streams

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
