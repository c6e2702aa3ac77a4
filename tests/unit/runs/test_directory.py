"""A run's directory: its events, its manifest, logs, and files that were edited or come from a stranger."""

import errno
import functools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.runs.directory import MAX_LINE_BYTES, CappedLog, EventLog, ProjectDirectory, RunDirectory
from csdctl.runs.stored_events import MAX_LINE_BYTES as MAX_EVENT_BYTES
from csdctl.worker.protocol.events import Event, Failed, Finished, Progress, Ready, event_document
from csdctl.workflows.train.run import record_process
from tests.full_disk import full_disk
from tests.unit.runs.manifests import manifest_of, write_events

NODES = ("host", "csd0")
EVENTS = [
    Ready(0, "host", 10),
    Progress(0, "host", 1, 2, 3, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1),
    Failed(1, "csd0", "two\nlines, “quotes”\u2028and a separator", "fix it", 2),
    Finished(0, "host", 1, 4, "hash", 1 << 20),
]
OF_NODE = Progress(1, "csd0", 1, 2, 3, 96, 0.5, 0.25, 0.8, input_s=0.1, cpu_s=0.7, memory_bytes=1 << 20)


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    return ProjectDirectory(tmp_path)


@pytest.fixture
def run(project: ProjectDirectory) -> RunDirectory:
    return project.new_run()


class TestFindingRuns:
    def test_latest_run_is_found_or_one_by_how_its_id_begins_if_no_other_does(
        self, project: ProjectDirectory
    ) -> None:
        for run_id in ("20260103-000000", "20260102-000000", "20260102-000001"):
            (project.runs / run_id).mkdir(parents=True)
        (project.runs / "notes.txt").write_text("not a run")
        assert project.find_run(None).run_id == "20260103-000000"
        assert project.find_run("20260103").run_id == "20260103-000000"
        with pytest.raises(InputError, match="2 runs begin with '20260102'"):
            project.find_run("20260102")
        with pytest.raises(InputError, match="no run"):
            project.find_run("")

    def test_run_is_the_latest_after_the_clock_was_set_back(self, project: ProjectDirectory) -> None:
        """A foreign name is no time, and nothing comes after the last time that there is."""
        for name in ("20260101-000000-000000", "21260101-000000-000009", "99991231-235959-999999", "zzz"):
            (project.runs / name).mkdir(parents=True)
        started = [project.new_run().run_id for _ in range(2)]
        assert started == ["21260101-000000-000010", "21260101-000000-000011"]
        for name in ("99991231-235959-999999", "zzz"):
            (project.runs / name).rmdir()
        assert project.find_run("latest").run_id == started[-1]

    @pytest.mark.parametrize("run_id", ["20260101-000000-aaaa", "..", "../plans", "."])
    def test_unknown_run_is_rejected_with_the_known_runs(
        self, project: ProjectDirectory, run: RunDirectory, run_id: str
    ) -> None:
        with pytest.raises(InputError, match=f"no run '{re.escape(run_id)}'") as raised:
            project.find_run(run_id)
        assert run.run_id in raised.value.remedy


class TestEvents:
    def test_events_round_trip_in_order_with_their_times(self, run: RunDirectory) -> None:
        write_events(run, EVENTS, 1_700_000_000.25)
        assert list(run.read_events(NODES).with_times()) == [
            (1_700_000_000.25 + number, event) for number, event in enumerate(EVENTS)
        ]

    def test_log_is_for_this_user_alone(self, run: RunDirectory) -> None:
        umask = os.umask(0)
        try:
            EventLog(run).close()
        finally:
            os.umask(umask)
        assert run.events.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("num_missing", [1, 2, 20, 60])
    @pytest.mark.fault(36)
    def test_truncated_last_line_is_skipped(self, run: RunDirectory, num_missing: int) -> None:
        write_events(run, EVENTS)
        content = run.events.read_bytes()
        run.events.write_bytes(content[: -1 - num_missing])
        assert list(run.read_events(NODES)) == EVENTS[:-1]

    @pytest.mark.parametrize(
        "line",
        [
            "[" * 100_000,
            "x" * (MAX_EVENT_BYTES + 1),
            '{"event":"Pong","rank":1,"node":"csd0","number":1}',
            '{"time":NaN,"event":"Pong","rank":1,"node":"csd0","number":1}',
            '{"time":1,"event":5}',
            '{"time":1,"event":"a line of a log"}',
            '{"time":1,"event":"Ready","rank":7,"node":"csd7","num_samples":1}',
            '{"time":1,"event":"Ready","rank":1,"node":"host","num_samples":1}',
            '{"time":1,"event":"Ready","rank":1,"node":"csd0","num_samples":-1}',
            '{"time":1,"event":"Pong","rank":1,"node":"csd0","number":' + "9" * 5000 + "}",
            json.dumps({"time": 1.0, **event_document(OF_NODE), "compute_s": math.nan}),
            json.dumps({"time": 1.0, **event_document(OF_NODE), "cpu_s": -0.1}),
        ],
        ids=lambda line: line[:60],
    )
    def test_line_that_is_no_event_of_the_run_is_left_out_and_counted(
        self, run: RunDirectory, line: str
    ) -> None:
        write_events(run, EVENTS)
        whole = run.events.read_text()
        run.events.write_text(f"{line}\n{whole}{line}\n\n{whole}{line}")
        events = run.read_events(NODES)
        assert list(events) == EVENTS * 2
        assert events.num_unreadable == 4

    @pytest.mark.parametrize(
        ("change", "num_breaks"),
        [
            (lambda lines: lines, 0),
            (lambda lines: lines[1:], 1),
            (lambda lines: lines[:1] + lines[2:], 1),
            (lambda lines: [*lines[:2], *lines[1:]], 1),
            (lambda lines: [lines[1], lines[0], *lines[2:]], 3),
            (lambda lines: [lines[0].replace(b'"rank":0', b'"rank":1', 1), *lines[1:]], 1),
            (lambda lines: [lines[0][:-30] + b"\n", *lines[1:]], 0),  # cut, and counted as unreadable
            (lambda lines: [line.partition(b',"check"')[0] + b"}\n" for line in lines], 0),
        ],
        ids=["whole", "first", "second", "repeated", "moved", "changed", "cut", "of an earlier version"],
    )
    @pytest.mark.fault(36)
    def test_lines_that_are_lost_repeated_moved_or_changed_are_counted(
        self, run: RunDirectory, change: Callable[[list[bytes]], list[bytes]], num_breaks: int
    ) -> None:
        write_events(run, EVENTS[:2])
        write_events(run, EVENTS[2:])  # of a resumption
        run.events.write_bytes(b"".join(change(run.events.read_bytes().splitlines(keepends=True))))
        write_events(run, EVENTS)
        events = run.read_events(NODES)
        for read in (events.with_times, events.skim, lambda: events.follow(lambda: True, 0.0)):
            list(read())
            assert events.num_breaks == num_breaks

    def test_events_that_were_gone_when_a_run_was_resumed_are_told(self, run: RunDirectory) -> None:
        write_events(run, EVENTS)
        run.kept_step_file.touch()
        run.events.unlink()
        log = EventLog(run, is_begun=run.has_state())
        log.append(1.0, EVENTS[0])
        log.close()
        events = run.read_events(NODES)
        assert list(events) == EVENTS[:1]
        assert events.num_breaks == 1

    def test_an_older_log_is_told_before_and_after_the_run_is_resumed(self, run: RunDirectory) -> None:
        project = ProjectDirectory(run.path.parents[2])

        def train(*parts: Sequence[Event]) -> None:
            """Write events, if any, as a csdctl that then ends."""
            with ExitStack() as after:
                space: Any = SimpleNamespace(project=project, ledger=SimpleNamespace(), after=after)
                record_process(run, space)
                for part in parts:
                    write_events(run, part)

        train(EVENTS[:1])
        older = run.events.read_bytes()
        train(EVENTS[1:])
        assert not run.read_events(NODES).num_breaks
        run.events.write_bytes(older)
        assert run.read_events(NODES).num_breaks == 1
        train()  # it fails before the ranks start
        assert run.read_events(NODES).num_breaks == 1
        train(EVENTS * 2)
        events = run.read_events(NODES)
        assert len(list(events)) == 1 + 2 * len(EVENTS)
        assert events.num_breaks == 1

    def test_events_of_another_run_are_told(self, run: RunDirectory, tmp_path: Path) -> None:
        write_events(run, EVENTS)
        renamed = RunDirectory(run.path.rename(tmp_path / "another"))
        events = renamed.read_events(NODES)
        assert list(events) == EVENTS
        assert events.num_breaks == 1

    def test_progress_of_nodes_is_not_parsed_where_it_does_not_matter(self, run: RunDirectory) -> None:
        write_events(run, [*EVENTS, OF_NODE])
        events = run.read_events(NODES)
        assert [event for _, event in events.skim()] == EVENTS
        assert list(events) == [*EVENTS, OF_NODE]

    def test_frequent_events_of_nodes_are_not_stored_in_a_large_file(
        self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(EventLog, "max_bytes", 1 << 20)
        progress = Progress(1, "csd0", 1, 2, 3, 96, 0.5, 0.25, 0.8)
        log = EventLog(run)
        while run.events.stat().st_size < 1 << 20:
            log.append(1.0, progress)
        log.close()
        log = EventLog(run)  # of a resumed run
        size = run.events.stat().st_size
        for _ in range(3):
            log.append(1.0, progress)
        assert run.events.stat().st_size == size
        for event in EVENTS:
            log.append(1.0, event)
        log.close()
        assert list(run.read_events(NODES))[-len(EVENTS) :] == EVENTS
        said = "… progress of csd0 is no longer stored: events.jsonl has 1 MiB\n"
        assert run.rank_log(1).read_text() == said

    def test_event_that_a_full_disk_has_no_place_for_is_written_later(self, run: RunDirectory) -> None:
        log = EventLog(run)
        log.append(1.0, EVENTS[0])
        with full_disk(run.events.stat().st_size + 20):
            for event in EVENTS[1:]:
                log.append(1.0, event)
            assert log.unwritten
        log.close()
        assert list(run.read_events(NODES)) == EVENTS

    def test_events_that_a_full_disk_refuses_when_they_are_synced_are_an_error_at_the_end(
        self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS tells of a full quota only then."""

        def refuse(descriptor: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        log = EventLog(run)
        monkeypatch.setattr(os, "fsync", refuse)
        log.append(1.0, EVENTS[-1])
        with pytest.raises(OSError, match="No space left"):
            log.close()

    def test_event_that_was_cut_is_said_and_costs_no_other(self, run: RunDirectory) -> None:
        said: list[str] = []
        for event, num_cut in zip(EVENTS, (20, 0, 0), strict=False):
            log = EventLog(run, say=said.append)
            log.append(1.0, event)
            log.close()
            os.truncate(run.events, run.events.stat().st_size - num_cut)
        assert said == [f"warning: {run.events}: its last line was cut"]
        assert list(run.read_events(NODES)) == EVENTS[1:3]

    def test_run_without_events_is_an_error(self, run: RunDirectory) -> None:
        with pytest.raises(InputError, match=f"run {run.run_id} has no events: {run.events} does not exist"):
            list(run.read_events(NODES))


class TestEditedManifest:
    @pytest.mark.parametrize(
        ("path", "value", "problem"),
        [
            ("schema", 0, "`schema`"),
            ("schema", 2, "was written by a newer csdctl: received schema 2, expected 1"),
            ("plan", None, "`plan`"),
            ("plan.ranks.1.batch_size", 10**12, "`plan.ranks.1.batch_size`: .*less than or equal to 1048576"),
            ("plan.ranks.0.node", "csd1", "`plan.ranks`: .*first rank is not `host`"),
            ("plan.ranks.1.node", "host", "`plan.ranks`: .*host is listed more than once"),
            ("placed.1.name", "\ud800", "name of csd0 is .ud800, expected csd0' is not text"),
            ("plan.ranks.1.node", "csd1", "placed: name of csd1 is csd0, expected csd1"),
            ("plan.ranks.1.batch_size", 5, "placed: batch_size of csd0 is 4, expected 5"),
            ("placed.1.batch_size", True, "placed: batch_size of csd0 is 1, expected 4"),
            ("placed.1.num_private", -1, "num_private of csd0 is -1, expected 0"),
            ("placed.1.num_repeated", 7, "num_repeated of csd0 is 7, expected 0"),
            ("placed.1.public_start", 99, "placed: public_start of csd0 is 99, expected 100"),
            ("placed.0.public_stop", 101, "public_start of csd0 is 100, expected 101"),
            ("placed.0.public_stop", -1, "public_stop of host is -1, expected 0"),
            ("placed.0.name", "../../etc/passwd", "name of host is ../../etc/passwd"),
            ("placed", [], "different numbers of ranks"),
            ("placed.1.public_stop", 10**30, "public_stop of csd0 is 10{30}, expected 10{15}"),
            ("noise", {"l2_norm_clip": 0, "noise_multiplier": 1, "delta": 0.1}, "`noise.l2_norm_clip`"),
            ("predicted_samples_per_s", float("nan"), "`predicted_samples_per_s`"),
            ("data.private", {"csd0": 5}, "`data.private.csd0`"),
        ],
    )
    def test_edited_value_is_named(self, run: RunDirectory, path: str, value: object, problem: str) -> None:
        content: Any = deepcopy(manifest_of())
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        functools.reduce(operator.getitem, parents, content)[last] = value
        run.save_manifest(content)
        with pytest.raises(InputError, match=f"manifest.json.*{problem}") as raised:
            run.load_manifest()
        assert "\n" not in raised.value.message

    @pytest.mark.parametrize("text", ["", "5", "[]", "null", "{}", "[" * 5000, '{"plan": 1, "plan": 2}'])
    def test_text_that_is_no_manifest_is_reported(self, run: RunDirectory, text: str) -> None:
        run.manifest.write_text(text)
        with pytest.raises(InputError, match="manifest.json"):
            run.load_manifest()


class TestLinks:
    @pytest.mark.parametrize("place", ["manifest.json", "events.jsonl", "logs/rank-0.log", "checkpoints"])
    def test_link_in_a_run_is_refused(self, tmp_path: Path, run: RunDirectory, place: str) -> None:
        (run.path / place).symlink_to("/etc")
        for run_id in (None, run.run_id):
            with pytest.raises(InputError, match=f"{place} is a symbolic link"):
                ProjectDirectory(tmp_path).find_run(run_id)

    def test_run_that_is_a_link_is_refused(self, tmp_path: Path, run: RunDirectory) -> None:
        (run.path.parent / "99990101-000000-000000").symlink_to(run.path)
        with pytest.raises(InputError, match="99990101-000000-000000 is a symbolic link"):
            ProjectDirectory(tmp_path).find_run(None)


LIMIT = 1 << 20
SAID = "… further output of csd1 is dropped after 1 MiB\n"


def test_lines_are_appended_without_null_characters_and_long_ones_are_cut(tmp_path: Path) -> None:
    for _ in range(2):
        log = CappedLog(tmp_path / "log", "csd1")
        log.write(b"one\0 two\r\n")
        log.close()
    assert (tmp_path / "log").read_bytes() == b"one two\n" * 2
    log = CappedLog(tmp_path / "long", "csd1")
    log.write(b"x" * (1 << 20))
    log.close()
    assert (tmp_path / "long").stat().st_size == MAX_LINE_BYTES + 1


def test_file_ends_at_its_limit_and_says_so_once_whoever_writes(tmp_path: Path) -> None:
    first, second = (CappedLog(tmp_path / "log", "csd1", LIMIT) for _ in range(2))
    for _ in range(LIMIT // 500):
        first.write(b"x" * 999)
        second.write(b"y" * 999)
    first.close()
    second.close()
    third = CappedLog(tmp_path / "log", "csd1", LIMIT)
    third.write(b"z")
    third.close()
    text = (tmp_path / "log").read_text()
    assert text.endswith(f"\n{SAID}")
    assert text.count("…") == 1
    assert len(text) < LIMIT + 2 * len(SAID)


def test_log_that_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "missing" / "log", "csd1")
    log.write(b"x")
    log.close()
    full = CappedLog(Path("/dev/full"), "csd1")
    full.write(b"x")
    full.close()
