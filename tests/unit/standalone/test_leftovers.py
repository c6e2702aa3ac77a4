"""What `clean` finds and removes on a machine, with real files and processes, and what ends by itself."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csdctl.emulation.limits import FLEET_VARIABLE, list_marked
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.leftovers import (
    CleanupOptions,
    MachineLockedError,
    clean_machine,
    describe_holder,
    end_run,
)
from csdctl.runs.directory import ProjectDirectory
from csdctl.standalone.leftovers import scratch_directories, step_files
from csdctl.transport.commands import build_child_command
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.run_spec import COPIES
from tests.patience import eventually
from tests.started_programs import start_and_kill
from tests.unit.transport.test_session_contract import is_alive

RUN = f"20260101-000000-{os.getpid() % 1_000_000:06d}"
"""Differs between test sessions on one machine: the ranks of a run are ended wherever they are."""
UNFINISHED = {
    ".csdctl/objects/89ab.npy.part": "",
    ".csdctl/trees/.part-77": "file",
    ".csdctl/models/.0123.0a9cb9f1": "file",
    ".csdctl/tmpabcdefgh.predict": "file",
    ".csdctl/.known_hosts.0123abcd": "",
    ".csdctl/runs/1/.manifest.json.0123abcd": "",
    ".csdctl/runs/1/checkpoints/.step-00000001.npz.0123abcd": "",
    ".csdctl/runs/1/.model.keras.0123abcd": "model.keras",
}
"""What commands leave behind that are killed, and what is in it."""
FILES = [
    ".csdctl/objects/0123.npy",
    ".csdctl/runs/1/model.keras",
    ".csdctl/emulated/nodes/a/home/.b.0123abcd",
    *(str(Path(path, file)) for path, file in UNFINISHED.items()),
    ".csdctl/features/a/images.npy",
    ".csdctl/predictions/b/images.npy",
    ".csdctl/data/x",
    "own/file",
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a node with everything that csdctl may have written, and a file of the user."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    return tmp_path


@pytest.fixture
def session(home: Path) -> Iterator[LocalSession]:
    session = LocalSession("csd0", home)
    yield session
    session.close()


def left(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def test_what_is_unfinished_and_then_what_is_computed_is_found_and_removed_on_request(
    session: LocalSession, home: Path
) -> None:
    leftovers = clean_machine(session, sys.executable, CleanupOptions(is_ending=False))
    assert {*leftovers.paths} == {*UNFINISHED}
    assert leftovers.num_bytes == 5 * len(UNFINISHED)
    assert (leftovers.features_bytes, leftovers.predictions_bytes) == (5, 5)
    assert left(home) == {*FILES}
    removed = clean_machine(session, sys.executable, CleanupOptions(is_removing=True))
    assert {*removed.paths} == {*UNFINISHED}
    kept = {name for name in FILES if not name.startswith((*UNFINISHED,))}
    assert left(home) == kept
    options = CleanupOptions(is_removing=True, is_removing_computed=True)
    removed = clean_machine(session, sys.executable, options)
    assert {*removed.paths} == {".csdctl/features", ".csdctl/predictions"}
    assert (removed.features_bytes, removed.predictions_bytes) == (0, 0)
    assert left(home) == {name for name in kept if "features" not in name and "predictions" not in name}


def test_everything_of_csdctl_is_removed_with_the_links_to_its_trees(
    session: LocalSession, home: Path
) -> None:
    trees = home / ".csdctl" / "trees"
    for name, target in (("used", trees / "1"), ("replaced", home / "own")):
        (home / name).symlink_to(target)
        (trees / f"{name}.link").write_text(str(home / name))
    (trees / "used.link").rename(trees / "1.link")
    (trees / "replaced.link").rename(trees / "2.link")
    for name in ("1", "2"):
        (trees / name).mkdir()
    clean_machine(session, sys.executable, CleanupOptions(is_removing=True, is_removing_all=True))
    assert not (home / ".csdctl").exists()
    assert not (home / "used").is_symlink()
    assert (home / "replaced").is_symlink(), "the user has put another link there"
    assert left(home) == {"own/file"}


YEAR_S = 365 * 86400.0


def age(path: Path, read_s: float, written_s: float) -> None:
    """Let a file be read and written so many seconds ago."""
    os.utime(path, (time.time() - read_s, time.time() - written_s))


def test_what_was_not_used_for_so_long_is_found_and_removed_with_logs(
    session: LocalSession, home: Path
) -> None:
    made = [
        *(".csdctl/models/0123/info.json", ".csdctl/shards/0123-0-8/images.npy", ".csdctl/logs/1-rank-1.log"),
        *(".csdctl/objects/4567.pyz", ".csdctl/detached-7.log", ".csdctl/scratch/1/link.log"),
        *(".csdctl/data/0123/images.npy", ".csdctl/data/.part-0123/images.npy"),
    ]
    for name in made:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"12345")
    for path in home.rglob("*"):
        age(path, 2 * YEAR_S, 2 * YEAR_S)
    read, written = home / ".csdctl/data/0123/images.npy", home / ".csdctl/models/0123/info.json"
    age(read, 60.0, 2 * YEAR_S)
    age(written, 2 * YEAR_S, 60.0)
    (home / ".csdctl/trees/1-0").mkdir()
    os.link(home / ".csdctl/objects/4567.pyz", home / ".csdctl/trees/1-0/program")
    (home / "linked").symlink_to(home / ".csdctl/trees/1-0")
    (home / ".csdctl/trees/1-0.link").write_text(str(home / "linked"))
    before = left(home)
    found = clean_machine(session, sys.executable, CleanupOptions(is_ending=False, unused_s=YEAR_S))
    assert left(home) == before
    removed = clean_machine(session, sys.executable, CleanupOptions(is_removing=True, unused_s=YEAR_S))
    assert {*removed.paths} == {*found.paths}
    gone = [
        name for name in (*FILES, *made) if not (home / name).exists() and not name.startswith((*UNFINISHED,))
    ]
    assert {*gone} == {
        *(".csdctl/objects/0123.npy", ".csdctl/features/a/images.npy", ".csdctl/predictions/b/images.npy"),
        *(".csdctl/data/x", ".csdctl/shards/0123-0-8/images.npy", ".csdctl/logs/1-rank-1.log"),
        *(".csdctl/detached-7.log", ".csdctl/scratch/1/link.log", ".csdctl/data/.part-0123/images.npy"),
    }


@pytest.mark.fault(34)
def test_machine_that_another_csdctl_uses_is_left_alone_unless_forced(
    session: LocalSession, home: Path
) -> None:
    options = {"is_removing": True, "is_removing_all": True}
    with (home / ".csdctl" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({**describe_holder("train", home), "machine": "another"}))
        lock.flush()
        with pytest.raises(MachineLockedError, match="csdctl train"):
            clean_machine(session, sys.executable, CleanupOptions(**options))
        assert {*FILES} <= left(home)
        clean_machine(session, sys.executable, CleanupOptions(**options, is_forced=True))
    assert left(home) == {"own/file"}


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process in a directory with marks on its command line, and wait until it has a child."""
    processes = []

    def start(directory: Path, *marks: str) -> "subprocess.Popen[bytes]":
        command = ["sh", "-c", "sleep 1000 & echo; wait", *marks]
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, start_new_session=True)
        processes.append(process)
        assert process.stdout
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_copy_of_a_run_of_another_server_is_removed_with_the_run_or_all_of_them(
    session: LocalSession, home: Path
) -> None:
    copies = ProjectDirectory(home / COPIES)
    runs = [copies.new_run() for _ in range(3)]
    states = [copies.step_file(run) for run in runs]
    fleet = Fleet((Node("csd0", "127.0.0.1", python=sys.executable),))
    try:
        for path in states:
            path.touch()
        end_run(runs[0].run_id, {"csd0": session}, fleet, is_removing=True)
        end_run(runs[1].run_id, {"csd0": session}, fleet)
        assert copies.run_ids() == [run.run_id for run in runs[1:]]
        assert [path.exists() for path in states] == [False, True, True]
        clean_machine(session, sys.executable, CleanupOptions(is_removing=True))
        assert copies.run_ids() == []
        assert not any(path.exists() for path in states)
    finally:
        for path in states:
            path.unlink(missing_ok=True)


def test_processes_of_this_directory_are_ended_and_their_runs_named(
    session: LocalSession, home: Path, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    ours = [start(home, f"csdctl-run={RUN}/csd0"), start(home, ".csdctl/objects/0123.pyz")]
    foreign = [start(elsewhere, f"csdctl-run={RUN}/csd0"), start(home, "own-program")]
    leftovers = clean_machine(session, sys.executable, CleanupOptions(is_ending=False))
    assert (leftovers.num_processes, leftovers.runs) == (2, (RUN,))
    assert [process.poll() for process in ours] == [None, None], "only looked at"
    clean_machine(session, sys.executable, CleanupOptions())
    assert [process.wait(30) for process in ours] == [-9, -9]
    assert [process.poll() for process in foreign] == [None, None]


def test_rank_of_one_node_is_ended_with_its_children_and_no_other(
    session: LocalSession, home: Path, start: Start
) -> None:
    rank = start(home, f"csdctl-run={RUN}/csd0")
    foreign = [start(home, f"csdctl-run={RUN}/csd1"), start(home, "csdctl-run=20250101-000000-000001/csd0")]
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    clean_machine(session, sys.executable, CleanupOptions(run_id=RUN, node="csd0"))
    assert rank.wait(30) == -9
    assert children
    assert not any(is_alive(int(child)) for child in children)
    assert [process.poll() for process in foreign] == [None, None]


def test_files_of_killed_sandboxes_are_removed_and_with_everything_the_state_that_a_run_resumes_from(
    session: LocalSession, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    patterns = []
    for directory, pid in ((home, gone.pid), (home / "own", os.getpid())):
        monkeypatch.chdir(directory)
        patterns += [
            Path(pattern.replace("*", "test")) for pattern in (step_files(), scratch_directories(pid))
        ]
    for path in patterns:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch()
    try:
        removed = clean_machine(session, sys.executable, CleanupOptions(is_removing=True))
        assert str(patterns[1]) in removed.paths
        assert [path.exists() for path in patterns] == [True, False, True, True]
        clean_machine(session, sys.executable, CleanupOptions(is_removing=True, is_removing_all=True))
        assert [path.exists() for path in patterns] == [False, False, True, True]
    finally:
        for path in patterns:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("command", "parent", "code", "output", "error"),
    [
        (["sh", "-c", "echo out; echo err >&2; exit 7"], os.getpid(), 7, b"out\n", b"err\n"),
        (["no-such"], os.getpid(), 1, b"", b"no-such cannot be run: No such file or directory\n"),
        (["true"], 2**22 + 1, 1, b"", b"the process that started this program has ended\n"),
    ],
    ids=["its own", "not found", "no parent"],
)
def test_output_and_exit_code_are_those_of_the_program(
    command: list[str], parent: int, code: int, output: bytes, error: bytes
) -> None:
    done = subprocess.run(build_child_command(command, parent), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, output, error)


def test_programs_on_the_host_end_when_csdctl_is_killed(tmp_path: Path) -> None:
    mark = str(tmp_path)
    start_and_kill(str(tmp_path), **{FLEET_VARIABLE: mark})
    assert eventually(lambda: not list_marked(mark))
