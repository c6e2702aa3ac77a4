"""Runs of a project, with their files as `csdctl train` writes them, and real processes."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from csdctl.cli.app import run_command
from csdctl.documents import save_json
from csdctl.errors import DeadlineError, InputError
from csdctl.launch.leftovers import describe_holder
from csdctl.reporting.results import RunStatus
from csdctl.reporting.tables import write_headline
from csdctl.runs.directory import EventLog, ProjectDirectory, RunDirectory
from csdctl.runs.stored_events import EVENTS_LOST
from csdctl.terminal.streams import Streams
from csdctl.worker.protocol.events import EpochEnd, Event, Finished, Progress
from csdctl.worker.protocol.json_codec import add_check, remove_check
from csdctl.worker.protocol.processes import load_stat
from csdctl.workflows.reporting.report import report
from csdctl.workflows.runs.manage import (
    OWN,
    StoredRun,
    choose_runs,
    find_logs,
    find_run,
    interrupt,
    list_runs,
    look_at,
    print_logs,
    remove_runs,
    stop_run,
)
from tests.attacks.other_user import needs_root
from tests.full_disk import full_disk
from tests.patience import scaled
from tests.unit.runs.manifests import manifest_of, write_events

NODES = ("host", "csd0")
PROGRESS = Progress(0, "host", 2, 7, 7, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1)
END = EpochEnd(0, "host", 2, 10, 96, 0.5, 0.25, 2.0, "hash", 128, 2.25, 0.5, 2.5, 0.25)
DONE = [Finished(rank, node, 2, 20, "hash", 1 << 20) for rank, node in enumerate(NODES)]
TRAINS = """
import os, pathlib, signal, sys, time
from csdctl.cli.app import run_command
from csdctl.documents import save_json
from csdctl.launch.leftovers import describe_holder
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(float(sys.argv[2])), os._exit(130)))
save_json(pathlib.Path(sys.argv[1]), describe_holder("train", pathlib.Path()))
print("ready", flush=True)
time.sleep(100_000)
"""


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    return ProjectDirectory(tmp_path)


def add_run(project: ProjectDirectory, *events: Event, **manifest: Any) -> RunDirectory:
    run = project.new_run()
    recipe = {"epochs": 2, "learning_rate": 0.1}
    run.save_manifest({**manifest_of(NODES), "recipe": recipe, "job": {"path": "job.yaml"}, **manifest})
    return write_events(run, events, 1_700_000_000)


def start_process(run: RunDirectory, end_after_s: float = 0.0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", TRAINS, str(run.process), str(end_after_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    # A child that has ended keeps its entry until somebody waits for it, which a run's csdctl is not.
    threading.Thread(target=process.wait, daemon=True).start()
    return process


class TestList:
    def test_foreign_empty_and_damaged_directories_are_skipped_with_a_warning(
        self, project: ProjectDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        add_run(project, END, *DONE)
        latest = add_run(project, END)
        latest.events.write_bytes(b"\xff\n{}\n" + b"x" * 1000)
        damaged = project.new_run()
        damaged.manifest.write_text("{")
        (project.runs / "99990101").symlink_to(project.root)
        (project.runs / "99990102").mkdir()
        (project.runs / "foreign").mkdir()
        (project.runs / "foreign" / "manifest.json").write_text('{"schema": 1}')
        warnings: list[str] = []
        assert [run.state for run in list_runs(project, warnings.append)] == ["completed", "interrupted"]
        skipped = [damaged.run_id, "99990101", "99990102", "foreign"]
        assert [line.split(" is skipped: ")[0] for line in warnings] == [
            f"warning: {name}" for name in skipped
        ]
        warnings.clear()
        assert find_run(project, None, warnings.append) == latest
        assert len(warnings) == len(skipped)
        latest.events.write_text("")
        monkeypatch.chdir(project.root)
        assert run_command(["report", "--json"], Streams()) == 0
        stdout, stderr = capsys.readouterr()
        assert json.loads(stdout)["run_id"] == latest.run_id
        assert stderr.count(" is skipped: ") == len(skipped)

    def test_statuses_are_kept_and_never_trusted_more_than_the_runs(
        self, project: ProjectDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = [add_run(project, END, *DONE), add_run(project, END), add_run(project, PROGRESS)]
        first = list_runs(project, print)
        for kept in (None, b"", b"{", b"[]", bytes(1000), b'{"x": {"status": 7}}'):
            if kept is not None:
                project.statuses.write_bytes(kept)
            assert list_runs(project, print) == first
        text = project.statuses.read_text()
        document = text.removesuffix("\n")
        is_another = document.replace('"completed"', '"failed"', 1).encode()
        of_another_version = document.replace('"version": 2', '"version": 1').encode()
        assert document.encode() not in (is_another, of_another_version)
        for changed in (is_another, add_check(remove_check(of_another_version))[0]):
            project.statuses.write_bytes(changed)
            assert list_runs(project, print) == first
            assert project.statuses.read_text() == text
        project.statuses.write_bytes(add_check(remove_check(is_another))[0])
        assert [run.state for run in list_runs(project, print)] == ["failed", "interrupted", "interrupted"]
        write_events(runs[0], [PROGRESS], 1_700_000_100)
        remove_runs(project, [runs[1].run_id], lambda _: None)
        assert [run.state for run in list_runs(project, print)] == ["completed", "interrupted"]
        assert [*json.loads(project.statuses.read_text())] == [runs[0].run_id, runs[2].run_id, "check"]

    @pytest.mark.fault(26)
    def test_directory_that_cannot_be_written_to_is_listed(self, project: ProjectDirectory) -> None:
        add_run(project, END, *DONE)
        with full_disk(0):
            assert [run.state for run in list_runs(project, print)] == ["completed"]
        assert not project.statuses.exists()

    def test_run_whose_manifest_was_unreadable_once_is_read_again(
        self, project: ProjectDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add_run(project, END, *DONE)

        def refuse(run: RunDirectory) -> Any:
            raise InputError("stale file handle")

        with monkeypatch.context() as patched:
            patched.setattr(RunDirectory, "read_manifest", refuse)
            assert list_runs(project, lambda line: None) == []
        assert [status.state for status in list_runs(project, print)] == ["completed"]


def stored(*sizes_and_ages: tuple[int, float], **needed: str) -> list[StoredRun]:
    """Return runs with these bytes and days since their last events, the oldest first."""
    now = time.time()
    return [
        (
            RunStatus(f"run{number}", "completed", last_event_s=now - age * 86400),
            size,
            needed.get(f"run{number}", ""),
        )
        for number, (size, age) in enumerate(sizes_and_ages)
    ]


class TestRules:
    @pytest.mark.parametrize(
        ("older_than", "max_bytes", "keep", "named"),
        [
            (90, None, None, "01"),
            (50, None, None, "012"),
            (None, 10, None, "01"),
            (None, 12, None, "0"),
            (None, 0, None, "01234"),
            (None, None, 2, "012"),
            (None, None, 9, ""),
            (None, None, 0, "01234"),
            (90, None, 4, "0"),
            (90, 9, None, "012"),
            (90, 0, 3, "01"),
        ],
    )
    def test_old_runs_go_then_the_oldest_until_the_rest_fits_and_the_newest_stay(
        self, older_than: float | None, max_bytes: int | None, keep: int | None, named: str
    ) -> None:
        runs = stored((4, 200), (2, 100), (1, 80), (4, 30), (5, 1))
        older_than_s = None if older_than is None else older_than * 86400
        chosen = choose_runs(runs, older_than_s, max_bytes, keep)
        assert [run.run_id[3:] for run, _, _ in chosen] == [*named]

    def test_run_without_events_is_as_old_as_its_id(self) -> None:
        new, old = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}", "20200101-000000-000000"
        runs = [(RunStatus(run_id, "interrupted"), 1, "") for run_id in (old, new, "of somebody")]
        assert [run.run_id for run, _, _ in choose_runs(runs, 86400.0, None, None)] == [old]

    def test_run_that_is_needed_is_named_and_frees_nothing(self) -> None:
        runs = stored((4, 200), (2, 100), (1, 80), (4, 30), run0="running")
        chosen = choose_runs(runs, None, 8, None)
        assert [(run.run_id, needed) for run, _, needed in chosen] == [
            ("run0", "running"),
            ("run1", ""),
            ("run2", ""),
        ]

    def test_rules_remove_what_they_have_shown_and_nothing_that_is_needed(
        self, project: ProjectDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(project.root)
        runs = [add_run(project, END, *DONE) for _ in range(5)]
        runs[0].model.write_bytes(bytes(1 << 20))
        (project.root / "job.yaml").write_text(f"model: .csdctl/runs/{runs[1].run_id}/model.keras\n")
        process = start_process(runs[2])
        rules = ["runs", "rm", "--older-than", "90d", "--max-size", "50G", "--keep", "1"]
        assert run_command(rules, Streams()) == 2
        said = " ".join("".join(capsys.readouterr()).split())
        assert project.run_ids() == [run.run_id for run in runs]
        assert f"{runs[1].run_id}: completed" in said
        assert "stays: named in job.yaml" in said
        assert "stays: running" in said
        assert "2 runs to remove, which frees 1." in said
        assert runs[4].run_id not in said
        assert "confirm with --yes" in said
        assert run_command([*rules, "--yes", "--json"], Streams()) == 0
        removed = json.loads(capsys.readouterr().out)["runs"]
        assert removed == [runs[0].run_id, runs[3].run_id]
        assert project.run_ids() == [run.run_id for run in (runs[1], runs[2], runs[4])]
        assert run_command(["runs", "rm", "--keep", "0", "--yes", "--json"], Streams()) == 0
        assert json.loads(capsys.readouterr().out)["runs"] == []
        process.kill()

    @pytest.mark.parametrize(
        "arguments",
        [[], ["20260101", "--keep", "3"], ["--older-than", "90"], ["--max-size", "many"], ["--keep", "-1"]],
    )
    def test_command_that_names_nothing_or_both_is_refused(
        self, project: ProjectDirectory, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
    ) -> None:
        monkeypatch.chdir(project.root)
        run = add_run(project, END)
        assert run_command(["runs", "rm", "--yes", *arguments], Streams()) == 2
        assert run.path.exists()


def put(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what puts something in the place of a file."""

    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return damage


DAMAGES = [
    put(Path.mkdir),
    put(os.mkfifo),
    pytest.param(
        put(lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))),
        marks=needs_root,  # /dev/zero
    ),
    lambda path: os.truncate(path, 1 << 40),
]


class TestUnreadable:
    """What one run has that cannot be read hides no other run, and blocks no command."""

    @pytest.fixture(autouse=True)
    def runs(self, project: ProjectDirectory, monkeypatch: pytest.MonkeyPatch) -> list[RunDirectory]:
        monkeypatch.chdir(project.root)
        return [add_run(project, END, *DONE) for _ in range(2)]

    def say(self, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
        """Run csdctl. Return its standard output and, in one line, all that it prints."""
        assert run_command(arguments, Streams()) == code
        stdout, stderr = capsys.readouterr()
        return stdout, " ".join((stdout + stderr).split())

    @pytest.mark.fault(36)
    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("name", ["events.jsonl", "manifest.json"])
    def test_run_is_named_and_the_others_are_listed(
        self,
        runs: list[RunDirectory],
        capsys: pytest.CaptureFixture[str],
        name: str,
        damage: Callable[[Path], None],
    ) -> None:
        first, latest = runs
        damage(latest.path / name)
        stdout, said = self.say(capsys, "runs", "list", "--json")
        assert [run["run_id"] for run in json.loads(stdout)["runs"]] == [first.run_id]
        assert f"{latest.run_id} is skipped: " in said
        assert str(latest.path / name) in said
        assert f"csdctl runs rm {latest.run_id}" in said
        self.say(capsys, "runs", "stop", code=2)
        self.say(capsys, "runs", "rm", latest.run_id, "--yes")
        assert [path.name for path in latest.path.parent.iterdir()] == [first.run_id]

    @pytest.mark.parametrize("name", ["", "manifest.json"])
    def test_latest_is_the_latest_run_that_can_be_read(
        self,
        project: ProjectDirectory,
        capsys: pytest.CaptureFixture[str],
        runs: list[RunDirectory],
        name: str,
    ) -> None:
        """After a kill when the directory had just been made, and with a damaged manifest."""
        killed = project.new_run()
        if name:
            (killed.path / name).write_bytes(bytes(100))
        for command in ("report", "report --privacy", "runs logs", "runs watch"):
            _, said = self.say(capsys, *command.split(), code=2 if command == "runs watch" else 0)
            assert f"{killed.run_id} is skipped: " in said
        stdout, _ = self.say(capsys, "report", "latest", "--json")
        assert json.loads(stdout)["run_id"] == runs[-1].run_id
        self.say(capsys, "runs", "rm", "latest", "--yes")
        assert not killed.path.exists()

    @pytest.mark.parametrize("damage", DAMAGES[:3])
    def test_logs_that_can_be_read_are_shown(
        self, runs: list[RunDirectory], capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
    ) -> None:
        run = runs[-1]
        run.own_log.write_text("of csdctl\n")
        damage(run.rank_log(0))
        run.rank_log(1).write_text("of csd0\n")
        for options in ((), ("--follow",)):
            stdout, _ = self.say(capfd, "runs", "logs", *options)
            assert "of csdctl" in stdout
            assert "of csd0" in stdout
        run.manifest.unlink()
        assert "of csd0" in self.say(capfd, "runs", "logs", run.run_id)[0]


class TestStop:
    def test_process_that_does_not_train_the_run_is_not_signalled(self, project: ProjectDirectory) -> None:
        """Whatever process.json says: it may be a copy of another run's, or come from others."""
        run, copy = add_run(project, PROGRESS), add_run(project, PROGRESS)
        trains = start_process(run)
        copy.process.write_bytes(run.process.read_bytes())
        with subprocess.Popen(["sleep", "100000"]) as sleeping:
            for pid in (trains.pid, sleeping.pid):
                started = str(load_stat(pid).start_time)  # type: ignore[union-attr]
                holder = describe_holder("train", project.root) | {"pid": pid, "started": started}
                save_json(copy.process, holder)
                with pytest.raises(InputError, match=f"run {copy.run_id} is not running"):
                    stop_run(project, copy.run_id, 1.0, print)
                assert [run.state for run in list_runs(project, print)] == ["running", "interrupted"]
            assert (trains.poll(), sleeping.poll()) == (None, None)
            sleeping.kill()
        trains.kill()

    def test_process_is_interrupted_and_awaited(self, project: ProjectDirectory) -> None:
        run = add_run(project, PROGRESS)
        process = start_process(run, end_after_s=0.3)
        assert list_runs(project, print)[0].state == "running"
        with pytest.raises(InputError, match="is running"):
            remove_runs(project, [run.run_id], lambda _: None)
        assert stop_run(project, None, scaled(20), print).run_id == run.run_id
        assert process.wait() == 130

    def test_run_that_goes_on_is_said_and_one_of_a_process_that_goes_on_may_have_ended(
        self, project: ProjectDirectory
    ) -> None:
        run = add_run(project, PROGRESS, *DONE)
        process = start_process(run, end_after_s=3600)
        with pytest.raises(DeadlineError, match="has not ended"):
            stop_run(project, run.run_id, 0.3, print)
        assert list_runs(project, print)[0].state == "running"
        save_json(run.process, {**json.loads(run.process.read_text()), "ended": "2026-01-01 00:00:00 UTC"})
        assert list_runs(project, print)[0].state == "completed"
        process.kill()

    def test_process_with_the_same_number_is_left_alone(self, project: ProjectDirectory) -> None:
        run = add_run(project, PROGRESS)
        process = start_process(run)
        holder = json.loads(run.process.read_text())
        damaged = ["", "[]", '{"pid": -1}', '{"pid": 1, "started": "x"}']
        for content in [json.dumps({**holder, "started": "1"}), *damaged]:
            run.process.write_text(content)
            with pytest.raises(InputError, match="is not running"):
                interrupt(run)
        assert process.poll() is None
        process.kill()


@pytest.mark.fault(36)
@pytest.mark.parametrize("content", [b"", bytes(999)])
def test_run_that_has_completed_stays_completed_without_its_events(
    project: ProjectDirectory, content: bytes
) -> None:
    """Its csdctl has recorded that it ended without an error. A run that failed stays so, too."""
    for end, state in (({}, "completed"), ({"state": "failed", "error": "x"}, "failed")):
        run = add_run(project, PROGRESS, END, *DONE)
        save_json(run.process, describe_holder("train", project.root) | {"ended": "2026-01-01"} | end)
        run.events.write_bytes(content)
        assert look_at(run).state == state
        results = report(run)
        assert results.summary.state == state
        is_lost = write_headline(results)["result"] == "completed: events lost"
        assert is_lost == (look_at(run).reason == EVENTS_LOST) == (state == "completed")


@pytest.mark.parametrize(
    "change", [{"pid": "x"}, {"pid": 1 << 40}, {"pid": None}, {"boot": "an earlier one"}]
)
def test_run_whose_process_cannot_exist_is_not_running(
    project: ProjectDirectory, change: dict[str, Any]
) -> None:
    run = add_run(project, PROGRESS)
    save_json(run.process, describe_holder("train", project.root) | change)
    assert look_at(run).state == "interrupted"
    remove_runs(project, [run.run_id], lambda _: None)
    assert project.run_ids() == []


def test_run_of_another_machine_is_ended_there_or_by_removing_its_record(project: ProjectDirectory) -> None:
    run = add_run(project, PROGRESS)
    save_json(run.process, describe_holder("train", project.root) | {"machine": "m", "host": "away"})
    with pytest.raises(InputError, match=f"csdctl train`, process {os.getpid()} on away") as raised:
        interrupt(run)
    assert raised.value.remedy == f"stop it on that machine; if it has ended there, remove {run.process}"
    run.process.unlink()
    assert look_at(run).state == "interrupted"


def test_followed_events_come_as_they_are_written(project: ProjectDirectory) -> None:
    run = add_run(project, PROGRESS)
    log = EventLog(run)
    is_over = threading.Event()
    following = run.read_events(NODES).follow(is_over.is_set, interval_s=0.01)
    assert next(following)[1] == PROGRESS
    with run.events.open("a") as file:
        file.write('{"time": 1.0, "li')
        file.flush()
        file.write('ne": "damaged"}\n')
    log.append(2.0, END)
    assert next(following)[1] == END
    is_over.set()
    assert list(following) == []


def test_logs_are_found_by_rank_and_node(
    project: ProjectDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    run = add_run(project)
    run.rank_log(1).write_text("first\nsecond\nthird\n")
    run.own_log.write_text("csdctl\n")
    assert find_logs(run, None) == [run.own_log, run.rank_log(1)]
    assert find_logs(run, OWN) == [run.own_log]
    assert find_logs(run, "1") == find_logs(run, "csd0") == [run.rank_log(1)]
    print_logs(run, [run.rank_log(1)], 2, is_following=True)
    assert capfd.readouterr().out == "second\nthird\n"
    with pytest.raises(InputError, match="no log 'csd7'"):
        find_logs(run, "csd7")
