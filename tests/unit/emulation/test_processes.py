import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from csdctl.emulation import limits
from csdctl.emulation.limits import end_largest_above
from csdctl.worker.protocol.processes import find_descendants, load_all, load_stat, parse_stat
from tests.patience import eventually


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    environment = {limits.FLEET_VARIABLE: "unit-test-fleet"}
    child = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 100000 & wait"], env=environment, start_new_session=True
    )
    assert eventually(lambda: limits.list_descendants(child.pid))
    yield child
    os.killpg(child.pid, 9)
    child.wait()


def test_a_name_with_brackets_does_not_shift_the_fields() -> None:
    text = "42 (a) b) S 7 40 40 0 -1 4194560 1 2 3 4 100 50 300 100 20 0 1 0 98765 1000 2 3\n"
    stat = parse_stat(text)
    assert (stat.state, stat.parent, stat.group, stat.start_time) == ("S", 7, 40, 98765)
    assert stat.children_cpu_s == pytest.approx(400 / os.sysconf("SC_CLK_TCK"))


def test_descendants_are_found_with_and_without_children_files(sleeper: "subprocess.Popen[bytes]") -> None:
    descendants = set(limits.list_descendants(os.getpid()))
    assert {sleeper.pid, *limits.list_descendants(sleeper.pid)} <= descendants
    assert descendants >= set(find_descendants(sleeper.pid, load_all()))


def test_a_process_is_found_by_its_marker(sleeper: "subprocess.Popen[bytes]") -> None:
    family = {sleeper.pid, *limits.list_descendants(sleeper.pid)}
    # It is found as soon as it has replaced this program.
    assert eventually(lambda: set(limits.list_marked("unit-test-fleet")) == family)
    assert limits.list_marked("unit-test-flee") == []


def test_neither_a_zombie_nor_another_start_time_is_the_process() -> None:
    child = subprocess.Popen(["true"])
    started = load_stat(child.pid)
    assert started is not None
    assert eventually(lambda: limits.start_time(child.pid) is None)
    assert not limits.is_running(child.pid, started.start_time)
    child.wait()
    mine = limits.start_time(os.getpid())
    assert mine is not None
    assert limits.is_running(os.getpid(), mine)
    assert not limits.is_running(os.getpid(), mine - 1)


def test_cpu_time_is_what_the_process_itself_reports() -> None:
    before = time.process_time()
    read = limits.cpu_time_s(os.getpid())
    assert before <= read <= time.process_time()


def test_the_largest_process_is_killed_above_the_limit() -> None:
    hold = (
        "import sys, time; block = bytearray(int(sys.argv[1]) << 20); print(flush=True); time.sleep(100_000)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", hold, size], stdout=subprocess.PIPE) for size in ("8", "64")
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        used_bytes = {child.pid: limits.anonymous_bytes(child.pid) for child in children}
        assert end_largest_above(sum(used_bytes.values()), used_bytes) is None
        assert end_largest_above(60 << 20, used_bytes) == children[1].pid
        assert children[1].wait() == -9
        assert children[0].poll() is None
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_memory_that_a_process_shares_with_its_parent_counts_once() -> None:
    share = (
        "import os, time; block = bytearray(b'x') * (64 << 20); os.fork();"
        "os.write(1, b'%d\\n' % os.getpid());"  # with PYTHONUNBUFFERED, print writes the end of a line apart
        "time.sleep(100_000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", share], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert sum(map(limits.anonymous_bytes, pids)) > 128 << 20
        assert 64 << 20 < sum(limits.anonymous_bytes(pid, is_divided=True) for pid in pids) < 100 << 20
    finally:
        os.killpg(parent.pid, 9)
        parent.communicate()
