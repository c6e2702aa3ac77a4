"""One csdctl at a time on a machine, with real processes and locks. What `clean` leaves on the host."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import ExitCode, InputError
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.leftovers import (
    CleanupOptions,
    MachineLockedError,
    clean,
    clean_machine,
    describe_holder,
    is_gone,
    lock_machines,
    read_holder,
    relock_machine,
)
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.processes import load_stat
from tests.patience import eventually

FLEET = Fleet(tuple(Node(name, "127.0.0.1", python=sys.executable) for name in ("csd0", "csd1")))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LocalSession]:
    session = LocalSession("csd0", tmp_path)
    yield session
    session.close()


def lock(session: LocalSession, directory: Path, doing: str = "tune") -> Any:
    return lock_machines({session.name: session}, FLEET, doing=doing, directory=directory)


def is_free(lock_file: Path) -> bool:
    return subprocess.run(["flock", "-n", str(lock_file), "true"], check=False).returncode == 0


@pytest.mark.fault(34)
def test_second_csdctl_fails_at_once_and_names_the_first(session: LocalSession, tmp_path: Path) -> None:
    with lock(session, tmp_path / "first", "train"), pytest.raises(MachineLockedError) as caught:
        lock(session, tmp_path / "second").__enter__()
    assert (caught.value.exit_code, caught.value.node) == (ExitCode.LOCKED, "csd0")
    assert f"`csdctl train`, process {os.getpid()} on" in str(caught.value)
    assert str(tmp_path / "first") in str(caught.value)


@pytest.mark.parametrize("before", ["", '{"command": "prepare", "holding_pid": 4194304}'])
@pytest.mark.parametrize("is_described", [True, False])
def test_holder_is_read_once_it_has_described_itself(
    session: LocalSession, tmp_path: Path, before: str, is_described: bool
) -> None:
    """A holder locks the file and writes then. Meanwhile the file is empty or describes the holder before."""
    path = tmp_path / ".csdctl" / "lock"
    path.parent.mkdir()
    path.write_text(before)
    with path.open("r+") as file, ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        fcntl.flock(file, fcntl.LOCK_EX)
        locking = pool.submit(stack.enter_context, lock(session, tmp_path))
        cleaning = pool.submit(clean_machine, session, sys.executable, CleanupOptions())
        assert not wait([locking, cleaning], 1.0, FIRST_COMPLETED).done
        if is_described:
            path.write_text(json.dumps({"command": "train", "holding_pid": os.getpid()}))
            for future in (locking, cleaning):
                with pytest.raises(MachineLockedError, match="`csdctl train`"):
                    future.result()
        else:
            fcntl.flock(file, fcntl.LOCK_UN)
            assert locking.result()
            with contextlib.suppress(MachineLockedError):  # of `locking`
                cleaning.result()


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_lock_that_is_no_file_is_named_with_its_remedy(
    session: LocalSession, tmp_path: Path, kind: str
) -> None:
    (tmp_path / ".csdctl").mkdir()
    path = tmp_path / ".csdctl" / "lock"
    {"pipe": os.mkfifo, "directory": os.mkdir, "link": lambda path: path.symlink_to("other")}[kind](path)
    with pytest.raises(InputError) as caught:
        lock(session, tmp_path).__enter__()
    assert str(caught.value) == f"csd0: {path} is not a regular file\n  → remove it"


def relock(session: LocalSession, directory: Path) -> Any:
    return relock_machine(session, sys.executable, doing="train", directory=directory)


def test_machine_that_is_still_locked_by_us_can_be_relocked(session: LocalSession, tmp_path: Path) -> None:
    with lock(session, tmp_path, "train"), relock(session, tmp_path):
        pass
    with relock(session, tmp_path), pytest.raises(MachineLockedError):
        lock(session, tmp_path).__enter__()


@pytest.mark.fault(35)
def test_lock_of_a_holder_that_died_with_its_host_is_taken_over(
    session: LocalSession, tmp_path: Path
) -> None:
    """After a power cut of the host the locking program still waits. Its csdctl is of an earlier boot.

    The lock of a csdctl that runs is respected.
    """
    (tmp_path / ".csdctl").mkdir()
    lock_file = tmp_path / ".csdctl" / "lock"
    with subprocess.Popen(["flock", str(lock_file), "sleep", "100000"], start_new_session=True) as holding:
        children = Path(f"/proc/{holding.pid}/task/{holding.pid}/children")
        assert eventually(lambda: not is_free(lock_file) and children.read_text())
        sleeper = int(children.read_text())
        stat = load_stat(sleeper)
        assert stat
        sleeping = {"pid": sleeper, "started": str(stat.start_time), "holding_pid": sleeper}
        lock_file.write_text(json.dumps(describe_holder("train", tmp_path) | sleeping))
        with pytest.raises(MachineLockedError, match=f"process {sleeper} on"):
            relock(session, tmp_path).__enter__()
        lock_file.write_text(json.dumps(describe_holder("train", tmp_path) | sleeping | {"boot": "earlier"}))
        holding.kill()  # only the sleeper still holds the lock
        clean_machine(session, sys.executable, CleanupOptions())
        with lock(session, tmp_path):
            assert json.loads(lock_file.read_text())["command"] == "tune"


def test_holder_on_another_machine_never_counts_as_gone(tmp_path: Path) -> None:
    me = describe_holder("train", tmp_path)
    assert not is_gone(me)
    assert not is_gone({**me, "machine": "another", "boot": "another"})
    assert not is_gone({**me, "host": "of the same image", "boot": "another"})
    assert is_gone({**me, "boot": "an earlier one"})
    assert is_gone({**me, "started": "0"}), "the process id was reused"
    assert not is_gone({})


@pytest.mark.attack(13)
def test_only_known_parts_of_a_holder_are_read(tmp_path: Path) -> None:
    me = describe_holder("train", tmp_path)
    assert read_holder({**me, "holding_pid": 77}) == {**me, "holding_pid": 77}
    for pid in ("-1", -1, 0, 1, True, 1 << 40, 2.0, [2], None):
        assert "holding_pid" not in read_holder({**me, "holding_pid": pid})
        assert "pid" not in read_holder({**me, "pid": pid})
    assert read_holder({"command": {"a": 1}, "host": ["b"], "other": "c"}) == {}
    assert len(str(read_holder({"command": "x" * 10_000})["command"])) == 200
    for content in (None, 5, "text", [me]):
        assert read_holder(content) == {}


KEPT = ["plans/job.yaml", "runs/1/manifest.json", "known_hosts", "models/m/info.json", "objects/0123.npy"]


def test_plans_runs_models_and_keys_of_the_host_stay(tmp_path: Path) -> None:
    for name in (*KEPT, "objects/4567.npy.part", "features/a/images.npy"):
        path = tmp_path / ".csdctl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    options = CleanupOptions(
        is_removing=True, is_removing_all=True, is_removing_computed=True, is_pruning=True
    )
    outcomes = clean(Fleet(()), options, directory=tmp_path)
    assert outcomes["host"].value
    assert {*outcomes["host"].value.paths} == {".csdctl/objects/4567.npy.part", ".csdctl/features"}
    assert all((tmp_path / ".csdctl" / name).exists() for name in KEPT)
    assert not any((tmp_path / path).exists() for path in outcomes["host"].value.paths)
