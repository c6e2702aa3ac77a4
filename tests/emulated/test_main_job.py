"""The main job with real SSH, MPI and training on an emulated host and two nodes: each command, then faults.

The model has 700 parameters. A run that is to be broken pauses in every step, so that it waits without the
processor. The same with Fashion-MNIST, as `csdctl demo` does it, is in test_demo.py.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from csdctl.fleet.facts import load_facts
from csdctl.fleet.fleet_file import load_fleet
from csdctl.worker.protocol.events import describe_model
from tests.emulated.running import document, emulated, home_of, refuse, state_of, succeed
from tests.emulated.small_jobs import ALL_DATA, pausing_layer, small_job
from tests.emulated.training import (
    assert_all_read_once,
    events_of,
    hash_at_the_end,
    kill_daemon,
    kill_host_rank,
    kill_mpirun,
    nothing_is_left,
    resumed_from,
    start_run,
    wait_until_all_train,
)
from tests.patience import communicate, eventually, files_written
from tests.unit.worker.ingest.prepared_data import sha256, swap

pytestmark = pytest.mark.emulated

NODES = ("csd0", "csd1")
NUM_NODES = len(NODES)
CPU = 0.9
NUM_PUBLIC, NUM_PRIVATE, NUM_VALIDATION = 600, 96, 100
MAX_GLOBAL_BATCH = 24
PAUSE = "pause"
"""A file; while it exists, steps take longer."""
PLANNED = ("--no-rebalance",)
"""All runs of the plan with these are the same to the bit."""
JOB = small_job(
    *("epochs: 8, learning_rate: 0.05, momentum: 0.9, reference_batch: 64, warmup_epochs: 1", ".npz"),
    model="small.py:build",
    data=ALL_DATA,
)
BUILD = """

def build():
    layers = [Pause(), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(4, activation="softmax")])
"""
PREDICT = """\
import keras, small, sys, numpy as np
model = keras.models.load_model(sys.argv[1], custom_objects={"Pause": small.Pause}, compile=False)
samples = [np.load(name)["x"] / np.float32(255) for name in sys.argv[2:]]
np.save("expected.npy", model.predict(np.concatenate(samples), verbose=0))
"""


def write_samples(path: Path, num_samples: int, seed: int) -> None:
    """Write pictures whose brightness tells their class, and which need no decoding."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, num_samples)
    pictures = generator.integers(0, 60, (num_samples, 8, 8, 1)) + 60 * labels[:, None, None, None]
    np.savez(path, x=pictures.astype(np.uint8), y=labels)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which every command has run once; the fleet runs until the module ends."""
    directory = tmp_path_factory.mktemp("main") / "a name with spaces"
    directory.mkdir()
    model = pausing_layer(0.05, f"os.path.exists({str(directory / PAUSE)!r})") + BUILD
    with emulated(directory, NUM_NODES, {"job.yaml": JOB, "small.py": model}, cpu=CPU):
        write_samples(directory / "public.npz", NUM_PUBLIC, 0)
        write_samples(directory / "validation.npz", NUM_VALIDATION, 1)
        for number, node in enumerate(NODES, 2):
            write_samples(home_of(directory, node) / "private.npz", NUM_PRIVATE, number)
        for command in (
            ["discover"],
            ["prepare"],
            ["tune", "--probe-seconds", "0.1", "--max-global-batch", str(MAX_GLOBAL_BATCH)],
            ["train", *PLANNED],
        ):
            succeed(directory, *command)
        yield directory


def test_discover_finds_the_limits_of_the_nodes(project: Path) -> None:
    saved = load_facts(load_fleet(project / "fleet.yaml"))
    assert set(saved) == {"host", "csd0", "csd1"}
    assert {saved[name].cpu_limit for name in ("csd0", "csd1")} == {CPU}
    assert saved["csd0"].prefix == saved["host"].prefix == sys.prefix
    discovered = document(project, "discover")
    assert discovered["emulated"] is True
    assert [machine["name"] for machine in discovered["machines"]] == ["host", "csd0", "csd1"]


def test_report_of_a_trained_job_says_what_was_trained_and_learnt(project: Path) -> None:
    report = document(project, "report")
    assert (report["state"], report["emulated"], report["epochs"]) == ("completed", True, 8)
    assert report["samples"] == 8 * (NUM_PUBLIC + NUM_NODES * NUM_PRIVATE)
    assert sum(rank["num_public"] for rank in report["ranks"]) == NUM_PUBLIC
    assert [rank["num_private"] for rank in report["ranks"]] == [0, NUM_PRIVATE, NUM_PRIVATE]
    assert report["validation_accuracy"] > 0.5  # of four classes


def test_all_ranks_hold_identical_weights_at_every_epochs_end(project: Path) -> None:
    report = document(project, "report")
    hashes: dict[int, set[str]] = {}
    run = Path(report["path"])
    for event in events_of(run, "EpochEnd"):
        hashes.setdefault(event["epoch"], set()).add((event["rank"], event["weights_hash"]))
    assert sorted(hashes) == list(range(1, report["epochs"] + 1))
    for of_epoch in hashes.values():
        assert {rank for rank, _ in of_epoch} == {0, 1, 2}
        assert len({digest for _, digest in of_epoch}) == 1
    assert report["identical_weights"] is True
    assert 3 <= len(list((run / "checkpoints").glob("*.npz"))) <= 4  # the newest, and the best
    assert not report["missing_models"]
    (weights_hash,) = {digest for _, digest in hashes[report["epochs"]]}
    with zipfile.ZipFile(run / "model.keras") as archive:
        assert archive.comment.decode() == describe_model(run.name, weights_hash)


def test_predictions_are_those_of_one_process_and_an_absent_node_lacks_its_rows_alone(project: Path) -> None:
    num_rows = NUM_PUBLIC + NUM_VALIDATION + NUM_NODES * NUM_PRIVATE
    first = document(project, "predict", "latest", "--on", "all")
    assert first["num_rows"] == first["num_computed"] == num_rows
    before = (project / "predictions.csv").read_text()
    with (project / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    sets = {("public", "host"): project / "public.npz", ("validation", "host"): project / "validation.npz"}
    sets |= {("private", node): home_of(project, node) / "private.npz" for node in NODES}
    counts = (NUM_PUBLIC, NUM_VALIDATION, NUM_PRIVATE, NUM_PRIVATE)
    keys = [(row["data"], row["node"], int(row["row"])) for row in rows]
    assert keys == [(*name, row) for name, count in zip(sets, counts, strict=True) for row in range(count)]
    report = document(project, "report")
    subprocess.run(
        [sys.executable, "-c", PREDICT, f"{report['path']}/model.keras", *map(str, sets.values())],
        cwd=project,
        check=True,
        capture_output=True,
    )
    scores = np.load(project / "expected.npy")
    classes = np.array([int(row["class"]) for row in rows])
    assert classes.tolist() == scores.argmax(axis=1).tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], scores.max(axis=1), rtol=1e-5)
    labels, start = np.load(project / "validation.npz")["y"], NUM_PUBLIC
    accuracy = float((classes[start : start + NUM_VALIDATION] == labels).mean())
    assert accuracy == pytest.approx(report["validation_accuracy"], abs=1e-3)

    fleet = yaml.safe_load((project / "fleet.yaml").read_text())
    fleet["nodes"][1]["port"] = 1  # where nothing listens
    (project / "away.yaml").write_text(yaml.safe_dump(fleet))
    said = refuse(project, "predict", "latest", "--on", "all", "--force", "--fleet", "away.yaml", code=3)
    assert f"private rows of csd1 ({NUM_PRIVATE}) are missing" in said
    present = [line for line in before.splitlines() if not line.startswith("private,csd1,")]
    assert (project / "predictions.csv").read_text().splitlines() == present
    again = document(project, "predict", "latest", "--on", "all", "--force")
    assert (again["num_rows"], again["num_computed"]) == (num_rows, 0)
    assert (project / "predictions.csv").read_text() == before


@pytest.fixture(scope="module")
def expected_hash(project: Path) -> str:
    """The hash of the final weights of the undisturbed run, the first of all."""
    return hash_at_the_end(min((project / ".csdctl" / "runs").iterdir()))


@pytest.fixture
def paused(project: Path) -> Iterator[None]:
    """Every step of every rank takes 50 ms: its run waits to be broken, without the processor."""
    pause = project / PAUSE
    pause.touch()
    yield
    pause.unlink()


@pytest.mark.fault(23)
def test_run_that_is_stopped_resumes_bit_identically(project: Path, paused: None, expected_hash: str) -> None:
    process, run = start_run(project, "--skip-doctor", *PLANNED)
    stop(process, project, run)
    stopped = {event["steps"] for event in events_of(run, "Finished")}
    assert len(stopped) == 1
    assert stopped.pop() < num_steps(project)
    assert resume_to_the_end(project, run) == expected_hash


@pytest.mark.fault(45)
@pytest.mark.fault(48)
def test_run_that_breaks_three_times_reads_every_sample_once(project: Path, paused: None) -> None:
    """An MPI daemon is killed, then mpirun of another link, then rank 0, which goes on from its step file."""
    process, run = start_run(project, "--skip-doctor", *PLANNED)
    before = open_in(process.pid)
    for number, kill in enumerate((kill_daemon("csd1"), kill_mpirun("csd0"), kill_host_rank), 1):
        kill(project, run)
        wait_until_all_train(process, run, number)
    progress = partial(files_written, project)
    assert eventually(lambda: not open_in(process.pid) - before, progress), open_in(process.pid) - before
    stop(process, project, run)
    lost = [event["node"] for event in events_of(run, "NodeLost")]
    assert lost[:3] == ["csd1", "csd0", "host"], lost
    assert set(lost) <= {event["node"] for event in events_of(run, "NodeBack")}
    for number in (1, 2, 3):
        resumed_from(run, number)
    resume_to_the_end(project, run, has_losses=True)
    assert_all_read_once(run, NUM_PUBLIC + NUM_NODES * NUM_PRIVATE)


def open_in(pid: int) -> Counter[str]:
    """Count the descriptors and threads of a process."""
    kinds = ("fd", "task")
    return Counter({kind: len(os.listdir(f"/proc/{pid}/{kind}")) for kind in kinds})


def stop(process: subprocess.Popen[str], project: Path, run: Path) -> None:
    """Press Ctrl-C."""
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, project)
    assert process.returncode == 130, output
    assert f"csdctl train --resume {run.name}" in output
    assert "Traceback" not in output
    assert nothing_is_left(project, run)
    assert document(project, "report", run.name)["state"] == "stopped"


@pytest.mark.thorough
@pytest.mark.fault(24)
def test_run_of_a_killed_csdctl_resumes_bit_identically(
    project: Path, paused: None, expected_hash: str
) -> None:
    process, run = start_run(project, "--skip-doctor", *PLANNED)
    process.kill()
    communicate(process)
    assert nothing_is_left(project, run)
    seen = max(event["step"] for event in events_of(run, "Progress"))
    assert resume_to_the_end(project, run) == expected_hash
    assert events_of(run, "Joined")[-1]["step"] >= seen


def resume_to_the_end(project: Path, run: Path, *, has_losses: bool = False) -> str:
    """Resume a run; return the hash of its final weights.

    After losses it has more steps than without: a rank that comes back reads its private samples then.
    """
    succeed(project, "train", "--skip-doctor", *PLANNED, "--resume", run.name)
    last = events_of(run, "Finished")[-NUM_NODES - 1 :]
    (steps,) = {event["steps"] for event in last}
    assert steps == num_steps(project) or (has_losses and steps > num_steps(project))
    (weights_hash,) = {event["weights_hash"] for event in last}
    return str(weights_hash)


def num_steps(project: Path) -> int:
    """Return the steps of the undisturbed run."""
    first = min((project / ".csdctl" / "runs").iterdir())
    return int(events_of(first, "Finished")[0]["steps"])


def test_verify_proves_the_gradient_on_this_fleet(project: Path) -> None:
    verified = document(project, "verify")
    assert all(rank["difference"] <= 1e-6 for rank in verified["ranks"].values())
    assert verified["is_equal"]
    assert verified["verdict"] == "equal: within the rounding of float32"
    assert set(verified["ranks"]) == {"host", *NODES}


@pytest.mark.thorough
@pytest.mark.fault(57)
def test_nan_loss_ends_the_run_with_a_remedy(project: Path) -> None:
    (project / "wild.yaml").write_text(JOB.replace("learning_rate: 0.05", "learning_rate: 1e12"))
    options = ("--batch-size", "16", "--skip-doctor", "--exclude", "csd1")
    said = refuse(project, "train", "wild.yaml", *options, code=1)
    assert "recipe.learning_rate" in said
    assert "epoch 1, step" in said
    assert nothing_is_left(project, max((project / ".csdctl" / "runs").iterdir()))


@pytest.mark.thorough
@pytest.mark.attack(17)
def test_swapped_data_is_not_trained_on_until_it_is_prepared_again(project: Path) -> None:
    """The other data has the same size and time."""
    (path,) = (state_of(project, "csd0") / ".csdctl" / "data").glob("*/images.npy")
    before = sha256(path)
    swap(path)
    said = refuse(project, "train", *PLANNED, "--skip-doctor")
    for words in ("csd0:", f"{path.parent.name}/images.npy", before, sha256(path), "csdctl prepare"):
        assert words in said
    assert "epoch 1/" not in said
    succeed(project, "prepare")
    assert sha256(path) == before


@pytest.mark.thorough
@pytest.mark.attack(17)
def test_resumed_run_follows_no_path_of_its_files(project: Path) -> None:
    victim = project / "victim"
    victim.write_text("a file of the user")
    succeed(project, "train", *PLANNED, "--skip-doctor", "--max-steps", "3")
    run = max((project / ".csdctl" / "runs").iterdir())
    edited = dict.fromkeys(("architecture", "weights"), "/etc/passwd")
    edited |= {"step_file": str(victim), "output_directory": "../escaped"}
    public = {"public": {"images": "/etc/passwd", "labels": "/etc/passwd"}}
    (run / "spec.json").write_text(json.dumps(json.loads((run / "spec.json").read_text()) | edited | public))
    succeed(project, "train", "--skip-doctor", "--resume", run.name)
    assert victim.read_text() == "a file of the user"
    assert not (project.parent / "escaped").exists()
    assert (run / "model.keras").exists()


def test_fleet_with_no_node_reachable_has_an_exit_code_of_its_own(project: Path) -> None:
    fleet = yaml.safe_load((project / "fleet.yaml").read_text())
    for node in fleet["nodes"]:
        node["port"] = 1
    (project / "gone.yaml").write_text(yaml.safe_dump(fleet))
    for command in (["discover"], ["tune"], ["train"]):
        refuse(project, *command, "--fleet", "gone.yaml", code=4)


def test_private_samples_are_on_their_own_node_only(project: Path) -> None:
    """After every command above."""
    for node in NODES:
        sample = np.load(home_of(project, node) / "private.npz")["x"][0].tobytes()
        homes = [home_of(project, name) for name in NODES if name != node]
        for path in (*files_of_csdctl(project), *(path for home in homes for path in home.rglob("*"))):
            if path.is_file():
                assert sample not in path.read_bytes(), f"a private sample of {node} in {path}"


def files_of_csdctl(project: Path) -> list[Path]:
    """Return everything below .csdctl but the emulated nodes, which stand for other machines."""
    state = project / ".csdctl"
    return [path for path in state.rglob("*") if "emulated" not in path.relative_to(state).parts]
