"""The process that a fleet belongs to: the fleet is taken down when it ends, however it ends.

A process of the fleet watches it, and then does what `csdctl emulate down` does.
"""

import time

from csdctl.emulation.cleanup import stop_fleet
from csdctl.emulation.processes import is_running, start_time
from csdctl.emulation.state import FleetPaths, Owner
from csdctl.errors import InputError

CHECK_INTERVAL_S = 0.2


def find_owner(pid: int) -> Owner:
    """Return the running process `pid` as an owner; raises InputError if there is none."""
    started = start_time(pid) if pid > 0 else None
    if started is None:
        raise InputError(
            f"received {pid} as the process that the emulated fleet ends with, "
            "expected the id of a running process",
            remedy="give one, such as --pid $$ for the shell, or leave it out: the fleet then stays up",
        )
    return Owner(pid, started)


def watch_owner(paths: FleetPaths, owner: Owner) -> None:
    """Stop the fleet when `owner` ends, unless it has got another owner meanwhile."""
    while is_running(owner.pid, owner.start_time):
        time.sleep(CHECK_INTERVAL_S)
    stop_fleet(paths.directory, owner)
