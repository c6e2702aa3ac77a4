"""The process that a fleet belongs to, real ones."""

import os
import subprocess
import threading
from collections.abc import Iterator
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


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def fleet_of(directory: Path, owner: Owner | None) -> FleetPaths:
    paths = FleetPaths(directory / ".csdctl" / "fleet")
    paths.directory.mkdir(parents=True)
    save_state(
        paths,
        FleetState(paths.fleet_id, EmulatedSpec(1), "auto", paths.default_fleet, owner=owner),
    )
    return paths


def test_fleet_is_removed_when_its_owner_ends(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    owner = find_owner(process.pid)
    paths = fleet_of(tmp_path, owner)
    watching = threading.Thread(target=watch_owner, args=(paths, owner))
    watching.start()
    watching.join(0.5)
    assert watching.is_alive()
    process.kill()  # it stays a zombie
    watching.join(60)
    assert not paths.directory.exists()


def test_process_that_got_the_number_of_the_owner_is_not_taken_for_it(tmp_path: Path) -> None:
    owner = find_owner(os.getpid())
    earlier = Owner(owner.pid, owner.start_time - 1)
    watch_owner(fleet_of(tmp_path, earlier), earlier)
    assert not (tmp_path / ".csdctl" / "fleet").exists()


def test_zombie_is_no_owner(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(InputError, match=f"received {process.pid}"):
        find_owner(process.pid)
