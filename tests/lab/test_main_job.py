"""The main job over real SSH servers on isolated machines, and csdctl interrupted during a run."""

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import load_job
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from tests.emulated.small_jobs import pausing_layer
from tests.lab.project import Project
from tests.patience import wait_for

pytestmark = pytest.mark.lab

NETWORK = "10.77.0.0/23"


PAUSING = f"""\
{pausing_layer(0.05)}

def build():
    layers = [Pause(), keras.layers.Flatten(), keras.layers.Dense(2, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""
"""A model that pauses in every step: a run that waits for a fault does not need the processor meanwhile."""


def long_job(job: Path) -> Path:
    """The same job with a very large number of epochs."""
    path = job.with_name("long.yaml")
    path.write_text(job.read_text().replace("epochs: 2", "epochs: 100000"))
    return path


def pausing_job(job: Path) -> Path:
    """A job that trains for hours, and pauses in every step."""
    (job.parent / "pausing.py").write_text(PAUSING)
    path = job.with_name("pausing.yaml")
    path.write_text(long_job(job).read_text().replace("small.py", "pausing.py"))
    return path


def start_training(project: Project, job: Path, *options: str) -> subprocess.Popen[str]:
    """Start a training on the fleet and wait for its first epoch."""
    process = project.start("train", str(pausing_job(job)), "--batch-size", "8", "--skip-doctor", *options)
    runs = project.path / ".csdctl/runs"
    wait_for(lambda: any(runs.glob("*/checkpoints/*.npz")), process, project.path)
    return process


def load_events(events: Path) -> list[dict[str, Any]]:
    """Return all events so far; the last line may be incomplete."""
    parsed = []
    for line in events.read_text().splitlines():
        with contextlib.suppress(ValueError):
            parsed.append(json.loads(line))
    return parsed


def latest_members(events: Path) -> set[int]:
    """Return the ranks of the latest group, once rank 0 has done steps in it; none before."""
    members: set[int] = set()
    for event in load_events(events):
        if event["rank"] == 0 and event["event"] == "Joined":
            joined = {int(rank) for rank in event["batch_sizes"]}
            members = set()
        elif event["rank"] == 0 and event["event"] in ("Progress", "EpochEnd"):
            members = joined
    return members


def last_steps(events: Path) -> int:
    """Return the steps of the whole run from its completion records."""
    return int([event for event in load_events(events) if event["event"] == "Finished"][-1]["steps"])


@pytest.mark.fault(37)
def test_job_or_fleet_changed_after_tuning_is_detected(project: Project, job: Path) -> None:
    first, second, third = project.lab.near[:3]
    ranks = [RankPlan(node=name, batch_size=8, threads=1) for name in (HOST_NAME, "csd0", "csd1")]
    fingerprint = load_job(job).fingerprint()
    plan = project.path / "plan.yaml"
    save_plan(plan, Plan(job=job.stem, job_fingerprint=fingerprint, method="fit", ranks=ranks))
    project.use(first, second, third, network=NETWORK)
    said = project.refuse("train", str(job), "--plan", str(plan), code=2)
    assert "the plan does not include csd2" in said
    project.use(first, second, network=NETWORK)
    edited = job.with_name("edited.yaml")
    edited.write_text(job.read_text().replace("0.01", "0.02"))
    done = project.csdctl("train", str(edited), "--plan", str(plan))
    assert done.returncode == 2, done.stderr
    assert "changed since tuning" in done.stderr


@pytest.mark.fault(10)
def test_jump_host_that_is_off_is_named_once_for_all_nodes_behind_it(project: Project) -> None:
    lab = project.lab
    gate = lab.gate.node
    jump = {"name": gate.name, "address": gate.address, "key": str(gate.key)}
    project.write_fleet(*lab.far, network=NETWORK, jump_hosts=[jump], defaults={"jump": gate.name})
    project.trust(lab.gate, *lab.far)
    code, machines, errors = project.discover()
    assert (code, machines["far1"]["problem"]) == (0, None), errors
    with lab.gate.switched_off():
        done = project.csdctl("discover")
    assert done.returncode == 4
    assert "gate" in done.stdout
    assert done.stdout.count("→") == 1, done.stdout


@pytest.mark.thorough
@pytest.mark.fault(24)
@pytest.mark.fault(34)
@pytest.mark.fault(35)
def test_second_csdctl_names_the_first_and_works_once_it_is_dead(
    project: Project, job: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    node = project.lab.near[1]
    project.use(node, network=NETWORK)
    second_project = Project(project.lab, tmp_path_factory.mktemp("other"))
    second_project.use(node, network=NETWORK)
    first = start_training(project, job)
    try:
        second = second_project.csdctl("train", str(job), "--batch-size", "8")
        assert second.returncode == 6, second.stdout + second.stderr
        assert "csd1: another csdctl is running here" in second.stderr
        assert str(first.pid) in second.stderr
    finally:
        first.kill()
        first.communicate()
    second_project.succeed("train", str(job), "--batch-size", "8", "--max-steps", "2", "--skip-doctor")
    cleaned = project.csdctl("clean")
    assert cleaned.returncode == 0, cleaned.stdout + cleaned.stderr
    assert node.commands() == []


@pytest.mark.thorough
@pytest.mark.fault(23)
def test_ctrl_c_twice_ends_at_once_and_leaves_nothing_on_any_node(project: Project, job: Path) -> None:
    project.use(project.lab.near[0], network=NETWORK)
    process = start_training(project, job)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # a person's second press
    project.interrupt(process)


@pytest.mark.fault(17)
@pytest.mark.fault(20)
@pytest.mark.fault(46)
@pytest.mark.fault(47)
@pytest.mark.fault(54)
def test_run_survives_cable_freeze_and_power_cut_and_nodes_come_back(project: Project, job: Path) -> None:
    nodes = project.lab.near[:2]
    project.use(*nodes, network=NETWORK)
    process = start_training(project, job)
    (events,) = (project.path / ".csdctl/runs").glob("*/events.jsonl")

    def wait_until_trained_by(*ranks: int) -> None:
        """Wait until a group of these ranks has done steps."""
        wait_for(lambda: latest_members(events) == set(ranks), process, project.path)

    wait_until_trained_by(0, 1, 2)
    with nodes[1].cable_pulled():
        wait_until_trained_by(0, 1)
    wait_until_trained_by(0, 1, 2)
    with nodes[0].frozen():
        wait_until_trained_by(0, 2)
    wait_until_trained_by(0, 1, 2)
    with nodes[1].switched_off():
        wait_until_trained_by(0, 1)
        printed = project.interrupt(process)
        for words in ("csd0 is lost", "csd1 is lost", "csd0 is back", "csd1 is back", "2 ranks continue"):
            assert words in printed, printed
        steps = last_steps(events)
        done = project.csdctl(
            *("train", str(pausing_job(job)), "--resume", "latest", "--exclude", "csd1", "--skip-doctor"),
            *("--max-steps", str(steps + 5)),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resuming without csd1" in done.stdout
        assert last_steps(events) == steps + 5


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
        said = project.refuse("train", str(private_job), *TRAIN, code=4)
        assert "csd1" in said
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
