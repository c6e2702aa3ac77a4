"""The power fails at any moment at which csdctl syncs: what it has reported is there, and the run continues.

The project and the home of a node are on a disk that notes at every sync what would be left
(tests/forgetful_disk.py). The step file in the machine's memory is never left.
"""

import hashlib
import io
import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulated.running import CSDCTL, csdctl, document, emulated, home_of
from tests.emulated.small_jobs import dense_model, save_arrays, small_job
from tests.forgetful_disk import ORDERED, SAID, STRICT, Cut, ForgetfulDisk, unmount
from tests.needs import require
from tests.patience import communicate
from tests.reaper import remove_step_files

pytestmark = pytest.mark.emulated

JOB = small_job("epochs: 3, optimizer: adam, learning_rate: 0.01, metrics: [accuracy]")
EXACT = ("--no-rebalance", "--skip-doctor", "--json")
"""With other batch sizes, the weights would be others."""
TRAIN = ("train", "--batch-size", "8", "--keep", "1", *EXACT)
RESUME = ("train", "--resume", "latest", *EXACT)
DEPLOY = ("deploy", "--tree", "public:copies/public")
TUNE = ("tune", "--probe-seconds", "0.1")
COMMANDS = (("trust", "--yes"), ("discover",), ("prepare",), TRAIN)
HOME = "node"
"""The home of the node, on the same disk."""
NOT_SYNCED = (SAID, "*/lock", "*.lock", "*/logs/*")
"""Locks have no content that is needed after a power cut, and logs are for people."""
NUM_REPEATED = 5
"""States after which a command is repeated."""
REPORTED = ("EpochEnd", "CheckpointSaved")
PROMPT = "$ csdctl "


@dataclass
class Recording:
    """Commands that have run on a disk, and the files at the end of each."""

    disk: ForgetfulDisk
    fleet: Path
    files: dict[str, dict[str, str]]
    """By command, the content of each file at its end, by path."""
    cuts: list[Cut]

    @property
    def project(self) -> Path:
        return self.disk.directory

    def at_the_end_of(self, command: str) -> Cut:
        """Return the cut at the end of a command, of which only the strict state is of interest."""
        return next(cut for cut in self.cuts if cut.said.endswith(f"{PROMPT}{command} has ended\n"))

    def during(self, command: str) -> list[Cut]:
        """Return the cuts of a command."""
        return [cut for cut in self.cuts if cut.said.rpartition(PROMPT)[2].split()[0] == command]

    def read(self, state: str, path: str) -> bytes:
        """Return the content of a file in a state, or b'' where it is not there."""
        entry = self.disk.read_state(state).get(path)
        return self.disk.read_content(entry[1]) if entry else b""

    def find(self, state: str, pattern: str) -> list[str]:
        """Return the paths in a state that match `pattern`."""
        return [path for path in self.disk.read_state(state) if fnmatchcase(path, pattern)]


def run(project: Path, *arguments: str) -> None:
    """Run csdctl, whose output goes to a file on the disk. It must succeed."""
    with open(project / SAID, "ab", buffering=0) as said:
        said.write(f"{PROMPT}{' '.join(arguments)}\n".encode())
        process = subprocess.Popen(
            [str(CSDCTL), *arguments],
            cwd=project,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            text=True,
        )
        communicate(process, project)
        assert process.returncode == 0, (project / SAID).read_text()[-4000:]
        said.write(f"{PROMPT}{arguments[0]} has ended\n".encode())
        os.fsync(said.fileno())


def record(fleet: Path, directory: Path, *commands: tuple[str, ...]) -> Recording:
    """Run `commands` in a new project on a disk, with the fleet of another directory."""
    project, files = directory / "project", dict[str, dict[str, str]]()
    save_arrays(project / "public", 96, 8, 8, 1)
    save_arrays(project / HOME / "private", 48, 8, 8, 1)
    (project / "model.py").write_text(dense_model(8, 8, 1))
    (project / "job.yaml").write_text(JOB)
    (project / "fleet.yaml").write_text((fleet / "fleet.yaml").read_text())
    disk = ForgetfulDisk(project, directory)
    with disk.mounted(), home_in(project, fleet):
        for command in commands:
            run(project, *command)
            files[command[0]] = {
                str(path.relative_to(project)): content_of(path)
                for path in project.rglob("*")
                if path.is_symlink() or path.is_file()
            }
    return Recording(disk, fleet, files, disk.read_cuts())


def content_of(path: Path) -> str:
    """Return what the disk notes of a file or a link: the hash of its content, or its target."""
    return os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def home_in(project: Path, fleet: Path) -> Iterator[None]:
    """Let the home of the fleet's node be in the project."""
    home = home_of(fleet, "csd0")
    subprocess.run(["mount", "--bind", project / HOME, home], check=True)
    try:
        yield
    finally:
        unmount(home)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require("forgetful disk")
    with emulated(tmp_path_factory.mktemp("fleet"), 1) as directory:
        yield directory


@pytest.fixture(scope="module")
def recording(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(fleet, tmp_path_factory.mktemp("cut"), *COMMANDS)


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a run in the lines of `text`."""
    lines = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return [line for line in lines if "event" in line]


def final_hash(text: str) -> str:
    """Return the hash of the final weights, equal on all ranks."""
    (weights,) = {event["weights_hash"] for event in events_in(text) if event["event"] == "Finished"}
    return str(weights)


def find_lost_files(recording: Recording, command: str) -> list[str]:
    """Return what a command left at its end, and would not be there after a power cut."""
    state = recording.disk.read_state(recording.at_the_end_of(command).states[STRICT])
    return [
        path
        for path, content in recording.files[command].items()
        if state.get(path, (0, ""))[1] != content
        and not any(fnmatchcase(path, pattern) for pattern in NOT_SYNCED)
    ]


def find_lost_events(recording: Recording, cut: Cut, kind: str) -> list[str]:
    """Return the epochs and checkpoints that were reported before a cut, and are not there after it."""
    name = cut.states[kind]
    reported = [event for event in events_in(cut.said) if event["event"] in REPORTED and event["rank"] == 0]
    checkpoints = [event for event in reported if event["event"] == "CheckpointSaved"]
    logged = [
        event
        for path in recording.find(name, ".csdctl/runs/*/events.jsonl")
        for event in events_in(recording.read(name, path).decode())
    ]
    lost = [
        f"{event['event']} of epoch {event['epoch']}" for event in reported if event not in undated(logged)
    ]
    paths = recording.find(name, ".csdctl/runs/*/checkpoints/step-*.npz")
    if checkpoints and not any(
        path >= checkpoints[-1]["path"] and is_readable(recording.read(name, path)) for path in paths
    ):
        lost.append(f"{checkpoints[-1]['path']}, there is {paths}")
    return lost


def undated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events as csdctl prints them."""
    return [
        {name: value for name, value in event.items() if name not in ("time", "check")} for event in events
    ]


def is_readable(checkpoint: bytes) -> bool:
    """Return whether these are all bytes of a checkpoint."""
    try:
        with np.load(io.BytesIO(checkpoint)) as archive:
            return bool(archive["state"].size)
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


@contextmanager
def restarted(recording: Recording, state: str) -> Iterator[Path]:
    """Give the project in this state, after the machine has restarted."""
    recording.disk.restore(state)
    remove_step_files(recording.project)
    with home_in(recording.project, recording.fleet):
        yield recording.project


def continue_after(recording: Recording, state: str) -> tuple[bool, str]:
    """Resume the run after a restart in `state`. Return whether that was possible, and the final weights.

    csdctl lists and reports what there is, or says what to do. Where no run can be resumed, it starts anew.
    """
    with restarted(recording, state) as project:
        assert "runs" in document(project, "runs", "list")
        for arguments in (("report",), RESUME):
            done = csdctl(project, *arguments)
            said = done.stdout + done.stderr
            assert "Traceback" not in said
            assert done.returncode == 0 or (done.returncode == 2 and "→" in done.stderr), said
        is_resumed = done.returncode == 0
        if not is_resumed:
            done = csdctl(project, *TRAIN)
            assert done.returncode == 0, done.stderr
        if "nothing to resume" in done.stderr:
            (path,) = project.glob(".csdctl/runs/*/events.jsonl")
            return True, final_hash(path.read_text())
        return is_resumed, final_hash(done.stdout)


@pytest.mark.fault(66)
@pytest.mark.parametrize("command", [command[0] for command in COMMANDS])
def test_all_that_a_command_wrote_is_there_when_the_power_fails_at_its_end(
    recording: Recording, command: str
) -> None:
    assert find_lost_files(recording, command) == []


@pytest.mark.parametrize("kind", [STRICT, ORDERED])
def test_epochs_and_checkpoints_are_there_once_they_are_reported(recording: Recording, kind: str) -> None:
    cuts = recording.during("train")
    assert [cut for cut in cuts if cut.said.count('"CheckpointSaved"') == 2]
    assert {cut.call: lost for cut in cuts if (lost := find_lost_events(recording, cut, kind))} == {}


@pytest.mark.fault(66)
def test_run_continues_from_a_checkpoint_that_was_just_reported(recording: Recording) -> None:
    cut = next(cut for cut in recording.during("train") if '"CheckpointSaved"' in cut.said)
    undisturbed = final_hash(recording.cuts[-1].said)
    assert continue_after(recording, cut.states[STRICT]) == (True, undisturbed)


@pytest.mark.thorough
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("kind", [STRICT, ORDERED])
def test_run_ends_with_the_same_weights_whenever_the_power_fails(recording: Recording, kind: str) -> None:
    undisturbed = final_hash(recording.cuts[-1].said)
    cuts = {cut.states[kind]: cut for cut in recording.during("train")}
    for state, cut in cuts.items():
        is_resumed, weights = continue_after(recording, state)
        assert weights == undisturbed, cut.call
        assert is_resumed or '"CheckpointSaved"' not in cut.said, cut.call


@pytest.mark.thorough
def test_other_commands_can_be_repeated_whenever_the_power_fails(fleet: Path, tmp_path: Path) -> None:
    recording = record(fleet, tmp_path, *COMMANDS[:3], DEPLOY, TUNE)
    assert [find_lost_files(recording, command) for command in ("deploy", "tune")] == [[], []]
    for command in (COMMANDS[2], DEPLOY, TUNE):
        states = dict.fromkeys(state for cut in recording.during(command[0]) for state in cut.states.values())
        for state in states:
            measured = recording.read(state, ".csdctl/measurements.jsonl")
            assert all(json.loads(line) for line in measured.splitlines())
        for state in [*states][:: max(1, len(states) // NUM_REPEATED)]:
            with restarted(recording, state) as project:
                done = csdctl(project, *command)
                assert (done.returncode, "ignored" in done.stderr) == (0, False), done.stderr
