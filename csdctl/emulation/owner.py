"""The process that a fleet belongs to: the fleet is taken down when it ends, however it ends.

Every server watches it, so that the loss of one server changes nothing. The first that gets the fleet's lock
does what `csdctl emulate down` does, and ends the others.
"""

import asyncio
import contextlib
import logging
import os

from csdctl.emulation.processes import is_running, start_time, wait_until_readable
from csdctl.emulation.state import FleetPaths, Owner, load_state, try_lock
from csdctl.errors import InputError

CHECK_INTERVAL_S = 1.0
"""Between looks at an owner for which the kernel has no descriptor."""
LOCK_INTERVAL_S = 0.1

log = logging.getLogger(__name__)


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


class OwnerWatch:
    """Waits in one server for the end of the fleet's owner, which `emulate up` may change."""

    def __init__(self, paths: FleetPaths, owner: Owner | None) -> None:
        self._paths = paths
        self._owner = owner
        self._changed = asyncio.Event()
        self.is_removing = False
        """Whether this server has to remove the fleet. It holds the fleet's lock from then on."""

    def reread(self) -> None:
        """Take the owner from the fleet's state again."""
        self._changed.set()

    async def wait(self) -> None:
        """Return when the server has to end, because the owner has ended."""
        while True:
            ended = asyncio.create_task(_wait_for_end(self._owner))
            changed = asyncio.create_task(self._changed.wait())
            done, pending = await asyncio.wait({ended, changed}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            if ended in done and await self._decide():
                return
            self._changed.clear()
            self._load_owner()

    async def _decide(self) -> bool:
        """Return whether the server has to end: with the lock, nobody changes the owner meanwhile."""
        handle = await _wait_for_lock(self._paths)
        state = load_state(self._paths)
        if state is not None and state.owner != self._owner:
            if handle is not None:
                os.close(handle)
            return False
        # Without its own entry in a whole state, this server is the remains of an earlier fleet.
        pids = [node.pid for node in state.nodes] if state else []
        self.is_removing = not pids or os.getpid() in pids
        log.info("the process that the fleet belongs to has ended")
        return True

    def _load_owner(self) -> None:
        state = load_state(self._paths)
        if state is not None:
            self._owner = state.owner


async def _wait_for_end(owner: Owner | None) -> None:
    """Return when `owner` has ended; without one, wait forever."""
    if owner is None:
        await asyncio.Event().wait()
        return
    try:
        handle = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel, or too many open files
        while is_running(owner.pid, owner.start_time):
            await asyncio.sleep(CHECK_INTERVAL_S)
        return
    try:
        # Checked with the descriptor open, which is another process's if the number was given away before.
        if is_running(owner.pid, owner.start_time):
            await wait_until_readable(handle)
    finally:
        os.close(handle)


async def _wait_for_lock(paths: FleetPaths) -> int | None:
    """Return a descriptor that holds the fleet's lock; None where it cannot be locked.

    The event loop goes on: whoever holds the lock may be ending this server.
    """
    with contextlib.suppress(PermissionError):
        while (handle := try_lock(paths)) is None:
            await asyncio.sleep(LOCK_INTERVAL_S)
        return handle
    return None
