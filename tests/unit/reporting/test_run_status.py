"""What a list of runs says of each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.reporting.results import DONE, FAILED, INTERRUPTED, STOPPED, RunStatus, load_run_status
from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.protocol.events import STOPPED as ASKED_TO_STOP
from csdctl.worker.protocol.events import EpochEnd, Event, Failed, Finished, Progress
from tests.unit.runs.manifests import manifest_of, write_events

PROGRESS = Progress(0, "host", 2, 7, 3, 96, 0.5, 0.25, 0.8, 128, 2.5, 0.1)
EPOCH_END = EpochEnd(0, "host", 2, 10, 100, 6.0, 3.0, 10.0, "hash", 800, 1.5, 0.5, 1.25, 0.625)
FINISHED = Finished(0, "host", 2, 20, "hash", 1 << 20)
FAILURE = Failed(1, "csd0", "disk full")


def status(directory: Path, *events: Event, **manifest: Any) -> RunStatus:
    run = ProjectDirectory(directory).new_run()
    run.save_manifest(manifest_of() | manifest)
    return load_run_status(write_events(run, events, 1_000.0))


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], INTERRUPTED),
        ([PROGRESS], INTERRUPTED),
        ([PROGRESS, replace(FINISHED, rank=1, node="csd0")], INTERRUPTED),
        ([PROGRESS, FINISHED], DONE),
        ([PROGRESS, replace(FINISHED, reason=ASKED_TO_STOP)], STOPPED),
        ([PROGRESS, FAILURE], FAILED),
        ([PROGRESS, FAILURE, PROGRESS], INTERRUPTED),
        ([PROGRESS, FAILURE, PROGRESS, FINISHED], DONE),
        ([PROGRESS, FINISHED, EPOCH_END], INTERRUPTED),
    ],
)
def test_state_is_what_the_last_events_say(tmp_path: Path, events: list[Event], state: str) -> None:
    assert status(tmp_path, *events).state == state


def test_run_that_goes_on_has_its_epoch_step_and_rate(tmp_path: Path) -> None:
    found = status(tmp_path, EPOCH_END, replace(PROGRESS, epoch=3), recipe={"epochs": 5})
    assert (found.epoch, found.step, found.epochs, found.num_ranks) == (3, 7, 5, 2)
    assert found.samples_per_s == pytest.approx((800 + 128) / (9.0 + 0.75))  # of the run, as in its report
    assert (found.loss, found.accuracy, found.validation_loss) == (2.5, 0.1, 1.25)
    assert found.last_event_s == 1_001.0


def test_run_without_a_manifest_has_its_state_alone(tmp_path: Path) -> None:
    run = ProjectDirectory(tmp_path).new_run()
    assert load_run_status(run) == RunStatus(run.run_id, INTERRUPTED)
