"""Nodes that are off when a training begins, and join it once they are on."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.lab.project import Project
from tests.lab.test_main_job import NETWORK, latest_members, load_events, pausing_job
from tests.patience import wait_for

pytestmark = pytest.mark.lab

NUM_PUBLIC, NUM_PRIVATE = 96, 24
TRAIN = ("--batch-size", "8", "--skip-doctor")


@pytest.fixture
def private_job(project: Project, job: Path) -> Path:
    """A job that pauses in every step, with private samples on both nodes of the fleet."""
    nodes = project.lab.near[:2]
    project.use(*nodes, network=NETWORK)
    for number, node in enumerate(nodes):
        write_private(node.home, number)
    private = pausing_job(job).with_name("late.yaml")
    text = pausing_job(job).read_text()
    private.write_text(text.replace("path: public}", "path: public}, private: {path: private}"))
    return private


def write_private(home: Path, seed: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (NUM_PRIVATE, 8, 8, 1), dtype=np.uint8)
    (home / "private").mkdir(exist_ok=True)
    np.save(home / "private" / "images.npy", images)
    np.save(home / "private" / "labels.npy", np.arange(NUM_PRIVATE) % 2)


def start_without_csd1(project: Project, job: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Start a training; return it and its events once the host and csd0 train."""
    process = project.start("train", str(job), *TRAIN, "--min-nodes", "1")
    runs = project.path / ".csdctl/runs"
    wait_for(lambda: any(runs.glob("*/events.jsonl")), process, project.path)
    (events,) = runs.glob("*/events.jsonl")
    wait_for(lambda: latest_members(events) == {0, 1}, process, project.path)
    return process, events


@pytest.mark.fault(65)
def test_node_that_is_off_when_a_training_begins_joins_it_and_no_sample_is_lost(
    project: Project, private_job: Path
) -> None:
    late = project.lab.near[1]
    with late.switched_off():
        done = project.csdctl("train", str(private_job), *TRAIN, "--min-nodes", "1")
        assert done.returncode == 4, done.stderr  # its private samples were never counted
        assert "csd1" in done.stderr
    project.succeed("prepare", str(private_job))
    with late.switched_off():
        done = project.csdctl("train", str(private_job), *TRAIN)
        assert done.returncode == 4, done.stderr
        assert "csd1" in done.stderr
        done = project.csdctl("train", str(private_job), *TRAIN, "--min-nodes", "2")
        assert done.returncode == 4, done.stderr
        process, events = start_without_csd1(project, private_job)
    wait_for(lambda: latest_members(events) == {0, 1, 2}, process, project.path)
    number = max(ended_epochs(events)) + 2
    wait_for(lambda: number in ended_epochs(events), process, project.path)
    printed = project.interrupt(process)
    assert "starting without csd1" in printed
    assert "csd1 is back" in printed
    ends = [event for event in load_events(events) if event["event"] == "EpochEnd" and event["rank"] == 0]
    num_read = {event["epoch"]: event["global_samples"] for event in ends}
    assert num_read[1] == NUM_PUBLIC + NUM_PRIVATE
    assert num_read[number] == NUM_PUBLIC + 2 * NUM_PRIVATE
    project.succeed("train", str(private_job), "--resume", "latest", "--skip-doctor", "--max-steps", "5")


def ended_epochs(events: Path) -> set[int]:
    return {event["epoch"] for event in load_events(events) if event["event"] == "EpochEnd"}


def test_late_node_with_other_private_data_does_not_join_and_the_reason_is_logged(
    project: Project, private_job: Path
) -> None:
    late = project.lab.near[1]
    assert project.csdctl("prepare", str(private_job)).returncode == 0
    write_private(late.home, 9)
    with late.switched_off():
        process, events = start_without_csd1(project, private_job)
    log = events.parent / "logs" / "rank-2.log"
    wait_for(lambda: log.exists() and "has changed" in log.read_text(), process, project.path)
    project.interrupt(process)
    assert latest_members(events) == {0, 1}
