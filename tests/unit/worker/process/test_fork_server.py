"""Commands that a fork server runs: streams, environment, exit codes and ends, and the end of the server."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csdctl.standalone.leftovers import end_all
from csdctl.worker.process import fork_server
from tests.patience import eventually

PROGRAM = """
import os, signal, subprocess, sys, time
from csdctl.worker.process import fork_server
from csdctl.worker.protocol.run_spec import Runtime


def main():
    if sys.argv[1] == "fork-server":
        place = fork_server.SOCKET.stat().st_ino
        import tensorflow
        if fork_server.serve(sys.argv[3], place):
            main()
        return
    fork_server.run_in_fork(Runtime(int(sys.argv[1])), float(sys.argv[2]))
    exec(sys.argv[3])


main()
"""
REPORT = 'print("tensorflow" in sys.modules, os.getppid(), os.getpid(), flush=True);'
SLEEP = REPORT + "subprocess.Popen(['sleep', '1000']); print('begun', flush=True); time.sleep(1000)"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A session's home directory; its servers end with the test."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / ".csdctl").mkdir()
    yield tmp_path
    for pid in find_servers(tmp_path):
        os.kill(pid, signal.SIGKILL)


def start(
    place: Path,
    code: str,
    *,
    threads: int = 1,
    idle_s: float = 60.0,
    program: str = "program.py",
    **environment: str,
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, program, str(threads), str(idle_s), code],
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def find_servers(place: Path) -> set[int]:
    """Return the processes of servers in `place`, which those that they have forked are too."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_server = fork_server.COMMAND.encode() in (path / "cmdline").read_bytes().split(b"\0")
            if is_server and (path / "cwd").samefile(place) and " Z " not in (path / "stat").read_text():
                found.add(int(path.name))
        except OSError:
            continue
    return found


def only_server(place: Path) -> int:
    """Wait until the server has no process; return the server."""
    assert eventually(lambda: len(find_servers(place)) == 1)
    (server,) = find_servers(place)
    return server


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_second_command_finds_tensorflow_loaded_and_has_its_own_streams_environment_and_exit_code(
    place: Path,
) -> None:
    first = start(place, REPORT)
    assert first.communicate()[0].startswith("True ")
    server = only_server(place)
    code = REPORT + "print(os.environ['OWN'], input()); print('aside', file=sys.stderr); sys.exit(7)"
    second = start(place, code, OWN="mine")
    printed, errors = second.communicate("typed\n")
    parent = int(printed.split()[1])
    assert printed.endswith("mine typed\n")
    assert (printed.startswith("True "), errors, second.returncode) == (True, "aside\n", 7)
    assert parent not in (second.pid, os.getpid())
    assert only_server(place) == server


def test_what_a_command_started_ends_with_it_however_it_ends(place: Path) -> None:
    running = start(place, SLEEP)
    assert running.stdout
    pid = int(running.stdout.readline().split()[2])
    assert running.stdout.readline() == "begun\n"
    (sleeping,) = (int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    running.kill()
    assert eventually(lambda: not is_running(pid) and not is_running(sleeping))
    ended = start(
        place,
        "subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL);" + REPORT,
    )
    assert ended.communicate()[0].startswith("True ")
    only_server(place)


def test_server_stays_when_the_command_that_started_it_ends_with_all_its_children(place: Path) -> None:
    first = start(place, SLEEP)
    assert first.stdout
    assert [first.stdout.readline() for _ in range(2)][1] == "begun\n"
    end_all([first.pid])  # as after a failed run
    server = only_server(place)
    assert start(place, REPORT).communicate()[0].startswith("True ")
    assert only_server(place) == server


def test_command_ends_by_the_signal_that_ended_its_process(place: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
        running = start(place, f"os.kill(os.getpid(), {int(number)})")
        running.communicate()
        assert running.returncode == -number


def test_other_settings_or_another_version_replace_the_server(place: Path) -> None:
    (place / "newer.py").write_text(PROGRAM)
    (packages := place / "site-packages").mkdir()
    found_there = {
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(packages)])
    }
    others: list[dict[str, Any]] = [
        {},
        {"threads": 2},
        {"program": "newer.py"},
        {"TF_OWN": "1"},
        found_there,
        found_there,
    ]
    found: list[int] = []
    for other in others:
        start(place, REPORT, **other).communicate()
        found.append(only_server(place))
        if other is found_there:
            (packages / "installed").touch()
    assert len(set(found)) == len(others)


def test_server_ends_when_no_process_has_run_for_its_time(place: Path) -> None:
    printed = start(place, "time.sleep(3);" + REPORT, idle_s=1.5).communicate()[0]
    assert printed.startswith("True ")  # after longer than that
    assert eventually(lambda: not find_servers(place))


def test_command_that_ends_while_the_server_loads_leaves_nothing_but_the_server(place: Path) -> None:
    first = start(place, SLEEP)
    assert eventually(lambda: find_servers(place))
    first.kill()
    second = start(place, REPORT)  # behind the first in the queue
    assert second.communicate()[0].startswith("True ")
    only_server(place)


def test_broken_request_leaves_the_server_and_no_descriptor(place: Path) -> None:
    start(place, REPORT).communicate()
    server = only_server(place)
    descriptors = set(os.listdir(f"/proc/{server}/fd"))
    for content in (b"{}\n", b"[1, 2]\n", b"[1, ", b""):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{os.open(place, os.O_PATH)}/{fork_server.SOCKET}")
            socket.send_fds(connection, [b"\n"], (0, 1))
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(content)
    assert start(place, REPORT).communicate()[0].startswith("True ")
    assert eventually(lambda: find_servers(place) == {server})
    assert eventually(lambda: set(os.listdir(f"/proc/{server}/fd")) == descriptors)


def test_command_loads_tensorflow_itself_without_a_server(place: Path) -> None:
    (place / ".csdctl").rmdir()  # no socket can be made
    printed = start(place, REPORT + "print(os.getppid())").communicate()[0]
    assert printed.startswith("False ")
    (place / ".csdctl").mkdir()
    assert start(place, REPORT, idle_s=0).communicate()[0].startswith("False ")
    assert not find_servers(place)
