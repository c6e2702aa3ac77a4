"""The process that a fleet belongs to, real ones."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.emulation.owner import OwnerWatch, find_owner
from csdctl.emulation.state import FleetPaths, Owner, locked, try_lock
from csdctl.errors import InputError


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


async def ends(watch: OwnerWatch) -> bool:
    """Whether the watch has returned, and its server has to remove the fleet."""
    await asyncio.wait_for(watch.wait(), 60)
    return watch.is_removing


def test_server_ends_when_the_owner_is_killed(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    async def watch_and_kill() -> bool:
        watch = OwnerWatch(FleetPaths(tmp_path / "gone" / "fleet"), find_owner(process.pid))
        waiting = asyncio.create_task(ends(watch))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        process.kill()
        return await waiting

    assert asyncio.run(watch_and_kill())


def test_process_that_got_the_number_of_the_owner_is_not_taken_for_it(tmp_path: Path) -> None:
    owner = find_owner(os.getpid())
    watch = OwnerWatch(FleetPaths(tmp_path / "fleet"), Owner(owner.pid, owner.start_time - 1))
    assert asyncio.run(ends(watch))


def test_zombie_is_no_owner(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(InputError, match=f"received {process.pid}"):
        find_owner(process.pid)


def test_fleet_is_removed_by_one_server_at_a_time(tmp_path: Path) -> None:
    for directory in (tmp_path / "fleet", tmp_path / "gone" / "too" / "fleet"):
        paths = FleetPaths(directory)
        handle = try_lock(paths)
        assert handle is not None
        assert try_lock(paths) is None
        os.close(handle)
    with locked(FleetPaths(tmp_path / "fleet")):
        assert try_lock(FleetPaths(tmp_path / "fleet")) is None
