import json
import math
import os
import re
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.runs.directory import EventLog, ProjectDirectory, RunDirectory
from csdctl.runs.stored_events import MAX_LINE_BYTES, Spent
from csdctl.worker.protocol.events import Failed, Finished, Progress, Ready, event_document
from tests.unit.runs.manifests import manifest_of, write_events

NODES = ("host", "csd0")
EVENTS = [
    Ready(0, "host", 10, 0.5),
    Progress(0, "host", 1, 2, 3, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1),
    Failed(1, "csd0", "two\nlines, “quotes”\u2028and a separator", "fix it", 2),
    Finished(0, "host", 1, 4, "hash", 1 << 20),
]
OF_NODE = Progress(
    1, "csd0", 1, 2, 3, 96, 0.5, 0.25, 0.8, input_s=0.1, cpu_s=0.7, memory_bytes=1 << 20, temperature_c=51.5
)


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    return ProjectDirectory(tmp_path)


@pytest.fixture
def run(project: ProjectDirectory) -> RunDirectory:
    return project.new_run()


class TestFindingRuns:
    def test_latest_run_is_found_without_an_id(self, project: ProjectDirectory) -> None:
        for run_id in ("20260102-000000-0000", "20260101-235959-ffff", "20251231-000000-ffff"):
            (project.runs / run_id).mkdir(parents=True)
        (project.runs / "notes.txt").write_text("not a run")
        assert project.find_run(None).run_id == "20260102-000000-0000"

    def test_run_is_found_by_how_its_id_begins_if_no_other_does(self, project: ProjectDirectory) -> None:
        for run_id in ("20260102-000000", "20260102-000001", "20260103-000000"):
            (project.runs / run_id).mkdir(parents=True)
        assert project.find_run("20260103").run_id == "20260103-000000"
        with pytest.raises(InputError, match="2 runs begin with '20260102'"):
            project.find_run("20260102")
        with pytest.raises(InputError, match="no run"):
            project.find_run("")

    @pytest.mark.parametrize("run_id", ["20260101-000000-aaaa", "..", "../plans", "."])
    def test_unknown_run_is_rejected_with_the_known_runs(
        self, project: ProjectDirectory, run: RunDirectory, run_id: str
    ) -> None:
        with pytest.raises(InputError, match=f"no run '{re.escape(run_id)}'") as raised:
            project.find_run(run_id)
        assert run.run_id in raised.value.remedy


class TestManifest:
    def test_values_that_are_left_out_have_their_defaults(self, run: RunDirectory) -> None:
        written = manifest_of()
        del written["placed"][1]["num_repeated"]
        run.save_manifest(written)
        assert run.load_manifest()["placed"] == manifest_of()["placed"]


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
            "x" * (MAX_LINE_BYTES + 1),
            '{"event":"Paused","rank":1,"node":"csd0","generation":1}',
            '{"time":NaN,"event":"Paused","rank":1,"node":"csd0","generation":1}',
            '{"time":1,"event":5}',
            '{"time":1,"event":"a line of a log"}',
            '{"time":1,"event":"Ready","rank":7,"node":"csd7","num_samples":1,"setup_s":1}',
            '{"time":1,"event":"Ready","rank":1,"node":"host","num_samples":1,"setup_s":1}',
            '{"time":1,"event":"Ready","rank":1,"node":"csd0","num_samples":-1,"setup_s":1}',
            '{"time":1,"event":"Paused","rank":1,"node":"csd0","generation":' + "9" * 5000 + "}",
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

    def test_progress_of_nodes_is_given_apart(self, run: RunDirectory) -> None:
        write_events(run, [*EVENTS, OF_NODE])
        spent: list[Spent] = []
        events = run.read_events(NODES)
        assert [event for _, event in events.with_times(spent.append)] == list(events) == EVENTS
        assert spent == [(4.0, 1, 3, 96, 0.5, 0.25, 0.8, 0.1, None, 0.7, 51.5)]
        assert [event for _, event in events.with_times()][-1] == OF_NODE

    @pytest.mark.parametrize(
        "change",
        [
            {"rank": 0},
            {"rank": "1"},
            {"rank": 2},
            {"node": "csd1"},
            {"samples": -1},
            {"samples": "x"},
            {"compute_s": math.nan},
            {"wall_s": None},
            {"cpu_s": -0.1},
            {"wait_s": [1]},
            {"temperature_c": 1e4},
        ],
        ids=str,
    )
    def test_progress_of_nodes_that_no_node_can_send_is_left_out_and_counted(
        self, run: RunDirectory, change: dict[str, object]
    ) -> None:
        run.events.write_text(json.dumps({"time": 1.0, **event_document(OF_NODE), **change}) + "\n")
        spent: list[Spent] = []
        events = run.read_events(NODES)
        assert list(events.with_times(spent.append)) == []
        assert (spent, events.num_unreadable) == ([], 1)

    def test_half_of_a_character_is_replaced(self, run: RunDirectory) -> None:
        write_events(run, [Failed(1, "csd0", "half \ud800 a character")])
        assert list(run.read_events(NODES)) == [Failed(1, "csd0", "half ? a character")]

    def test_frequent_events_of_nodes_are_not_stored_in_a_large_file(self, run: RunDirectory) -> None:
        progress = Progress(1, "csd0", 1, 2, 3, 96, 0.5, 0.25, 0.8)
        log = EventLog(run, max_bytes=1 << 20)
        while run.events.stat().st_size < 1 << 20:
            log.append(1.0, progress)
        log.close()
        log = EventLog(run, max_bytes=1 << 20)  # of a resumed run
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

    def test_run_without_events_is_an_error(self, run: RunDirectory) -> None:
        with pytest.raises(InputError, match=f"run {run.run_id} has no events"):
            list(run.read_events(NODES))
