"""The csdctl process that trains a run: whether it is at work, and how to ask it to stop."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from csdctl.documents import load_json
from csdctl.errors import CsdctlError, DeadlineError, InputError
from csdctl.launch.machine_lock import describe_holder, is_gone, read_holder, show_holder
from csdctl.runs.directory import RunDirectory

POLL_S = 0.2


@dataclass(frozen=True)
class RunProcess:
    """The csdctl that trains a run, or the last one that did."""

    holder: Mapping[str, object]

    @property
    def is_running(self) -> bool:
        """Whether it may be at work: a process of another machine cannot be seen from here."""
        return bool(self.holder) and not is_gone(self.holder)

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this machine."""
        mine = describe_holder("", Path())
        return self.holder.get("machine") == mine["machine"]

    @property
    def pid(self) -> int | None:
        """Its process id."""
        pid = self.holder.get("pid")
        return pid if isinstance(pid, int) else None

    def describe(self) -> str:
        """Return the process as one line of text."""
        return show_holder(self.holder)


def process_of(run: RunDirectory) -> RunProcess:
    """Return the process that trains `run`; one without a description is not running."""
    try:
        return RunProcess(read_holder(load_json(run.process)))
    except InputError:
        return RunProcess({})


def interrupt(run: RunDirectory) -> None:
    """Ask the csdctl that trains `run` to stop, as the first Ctrl-C does; raises InputError, CsdctlError."""
    process = process_of(run)
    if not process.is_running or process.pid is None:
        raise InputError(f"run {run.run_id} is not running", remedy="csdctl runs list shows the runs' states")
    if not process.is_here:
        raise InputError(
            f"run {run.run_id} is trained by {process.describe()}", remedy="stop it on that machine"
        )
    try:
        # Whatever gets the process id next cannot be signalled through the handle.
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise InputError(f"run {run.run_id} has ended") from None
    try:
        if process_of(run).is_running:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise CsdctlError(
            f"process {process.pid} belongs to another user", remedy="stop the run as that user"
        ) from None
    finally:
        os.close(handle)


def wait_until_over(run: RunDirectory, deadline_s: float) -> None:
    """Wait until the csdctl that trains `run` has ended; raises DeadlineError."""
    end = time.monotonic() + deadline_s
    while process_of(run).is_running:
        if time.monotonic() > end:
            raise DeadlineError(
                f"run {run.run_id} has not ended after {deadline_s:g} s",
                remedy="give the command again to end its ranks at once",
            )
        time.sleep(POLL_S)
