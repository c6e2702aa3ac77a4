"""The process that a fleet belongs to, real ones."""

import os
import subprocess
from pathlib import Path

import pytest

from csdctl.emulation.fleet import (
    EmulatedSpec,
    FleetPaths,
    FleetState,
    Owner,
    find_owner,
    save_state,
    watch_owner,
)
from csdctl.errors import InputError


def test_process_that_got_the_number_of_the_owner_is_not_taken_for_it(tmp_path: Path) -> None:
    owner = find_owner(os.getpid())
    earlier = Owner(owner.pid, owner.start_time - 1)
    paths = FleetPaths(tmp_path / ".csdctl" / "fleet")
    paths.directory.mkdir(parents=True)
    save_state(
        paths, FleetState(paths.fleet_id, EmulatedSpec((0.25,)), "auto", paths.default_fleet, owner=earlier)
    )
    watch_owner(paths, earlier)
    assert not paths.directory.exists()


def test_zombie_is_no_owner() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(InputError, match=f"received {process.pid}"):
            find_owner(process.pid)
