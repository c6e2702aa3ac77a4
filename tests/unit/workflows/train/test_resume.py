"""Finding the run to resume, and recognizing one that is complete."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Node
from csdctl.job.model import Job
from csdctl.runs.directory import EventLog, ProjectDirectory, RunDirectory
from csdctl.worker.protocol.events import EARLY_STOPPING, STOPPED, Event, Finished, Joined
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from csdctl.workflows.train.resume import LATEST, find_resumable, is_complete, load_spec
from tests.unit.runs.manifests import manifest_of

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")))
JOINED = Joined(0, "host", 1, 1, 0, 10, 0, {"0": 4}, "star", 0.1)
FINISHED = Finished(0, "host", 3, 30, "hash", 1)


@pytest.fixture
def run(tmp_path: Path, job: Job) -> RunDirectory:
    """A run of the host, csd0 and csd7."""
    run = ProjectDirectory(tmp_path).new_run()
    run.save_manifest(manifest_of(["host", "csd0", "csd7"], job.name))
    return run


def record(run: RunDirectory, *events: Event) -> RunDirectory:
    log = EventLog(run)
    for event in events:
        log.append(0.0, event)
    log.close()
    return run


def test_latest_run_is_found_and_nodes_that_do_not_take_part_are_reported(
    tmp_path: Path, run: RunDirectory, job: Job
) -> None:
    messages: list[str] = []
    assert find_resumable(ProjectDirectory(tmp_path), LATEST, job, FLEET, messages.append) == run
    assert messages[0].startswith("resuming without csd7")
    assert messages[1].startswith("csd1 did not take part")


def test_run_of_another_job_is_rejected(tmp_path: Path, run: RunDirectory, job: Job) -> None:
    run.save_manifest(manifest_of(job="other"))
    with pytest.raises(InputError, match=r"belongs to job other, not to job"):
        find_resumable(ProjectDirectory(tmp_path), run.run_id, job, FLEET, print)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([JOINED], False),
        ([JOINED, FINISHED], True),
        ([JOINED, replace(FINISHED, epochs=2)], False),
        ([JOINED, replace(FINISHED, epochs=1, reason=EARLY_STOPPING)], True),
        ([JOINED, replace(FINISHED, reason=STOPPED)], False),
        ([JOINED, FINISHED, JOINED], False),
        ([JOINED, FINISHED, replace(JOINED, rank=1)], True),
    ],
)
def test_run_is_complete_when_rank_0_has_finished_all_epochs_or_stopped_early(
    run: RunDirectory, job: Job, events: list[Event], expected: bool
) -> None:
    assert is_complete(record(run, *events), job) is expected


def test_run_without_events_is_not_complete(run: RunDirectory, job: Job) -> None:
    assert not is_complete(run, job)


RANKS = (
    RankSpec(0, "host", 4, Runtime(1), None, None, 0, 100),
    RankSpec(1, "csd0", 4, Runtime(1), None, None, 0, 100, 100),
)


def spec_of(run: RunDirectory) -> RunSpec:
    return RunSpec(run.run_id, "a", "w", Recipe(), RANKS, None, None, "output")


def test_spec_is_read_back(run: RunDirectory) -> None:
    run.spec.write_text(to_json(spec_of(run)))
    assert load_spec(run) == spec_of(run)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({"run_id": "another"}, "`run_id` is 'another'"),
        ({"schema": 1}, "`schema` is 1"),
        ({"num_checkpoints": 0}, "`num_checkpoints` is 0, expected 1"),
        ({"num_checkpoints": 10**12}, "`num_checkpoints` is 1000000000000"),
        ({"num_checkpoints": "many"}, "`num_checkpoints`: .*received 'many'"),
        ({"checkpoint_interval_s": -5}, "`checkpoint_interval_s` is -5"),
        ({"checkpoint_interval_s": float("inf")}, "Infinity is not a finite number"),
        ({"task": {"name": "verify", "arguments": {}}}, "`task`"),
        ({"ranks": 5}, "`ranks`"),
        ({"recipe": None}, "`recipe`"),
        ({"output_directory": ["a"]}, "`output_directory`"),
    ],
)
def test_spec_that_was_edited_is_refused(run: RunDirectory, edit: dict[str, object], problem: str) -> None:
    run.spec.write_text(json.dumps(json.loads(to_json(spec_of(run))) | edit))
    with pytest.raises(InputError, match=f"spec.json.*{problem}") as raised:
        load_spec(run)
    assert raised.value.remedy == "start a new run"


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "\x00"])
def test_text_that_is_no_spec_is_refused(run: RunDirectory, text: str) -> None:
    run.spec.write_text(text)
    with pytest.raises(InputError, match="spec.json"):
        load_spec(run)
