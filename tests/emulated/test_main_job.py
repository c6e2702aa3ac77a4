"""The main job with real SSH, MPI and training on Fashion-MNIST, on an emulated host and two nodes.

The demo runs once, with fewer epochs than a user's unless the tests are to be thorough; the other tests work
in its directory, with its fleet still running.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from csdctl.workflows.data.demo import JOB
from tests.emulated.running import csdctl
from tests.emulated.training import (
    SHORT_RUN,
    STEPS,
    events_of,
    hash_at_the_end,
    kill_daemon,
    kill_host_rank,
    kill_mpirun,
    kill_rank,
    nothing_is_left,
    remove_cpu_limits,
    resume_training,
    resumed_from,
    start_training,
    wait_until_regrouped,
)
from tests.patience import communicate

pytestmark = pytest.mark.emulated

NUM_NODES = 2
SHORTER_JOB = JOB.replace("epochs: 5", "epochs: 3").replace("learning_rate: 0.015", "learning_rate: 0.03")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """The demo's directory after `csdctl demo --keep`; the fleet runs until the module ends."""
    directory = tmp_path_factory.mktemp("main") / "demo with a space"
    if not pytestconfig.getoption("--thorough"):
        directory.mkdir()
        (directory / "job.yaml").write_text(SHORTER_JOB)
    done = csdctl(
        directory.parent, "demo", "--keep", "--nodes", str(NUM_NODES), "--directory", directory.name
    )
    (directory / "demo.log").write_text(done.stdout + done.stderr)
    yield directory
    csdctl(directory, "emulate", "down")
    if done.returncode:
        pytest.fail(f"the demo ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def report(directory: Path) -> dict[str, Any]:
    done = csdctl(directory, "report", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def plan(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((directory / ".csdctl" / "plans" / "job.yaml").read_text())
    return content


def job_with(directory: Path, name: str, **changes: str) -> Path:
    """Write job.yaml with changed values."""
    content = yaml.load((directory / "job.yaml").read_text(), yaml.BaseLoader)
    for key, value in changes.items():
        target = content if key in content else content["recipe"]
        target[key] = value
    path = directory / name
    path.write_text(yaml.safe_dump(content).replace("'", ""))
    return path


def test_demo_shows_its_commands_and_ends_with_the_report(demo: Path) -> None:
    log = (demo / "demo.log").read_text()
    for command in ("emulate up", "discover", "prepare", "tune", "train", "report"):
        assert f"$ csdctl {command}" in log
    assert "emulated" in log
    assert any(line.startswith("run directory:") for line in log.splitlines()[-6:])
    assert "Traceback" not in log


def test_demo_reaches_085_accuracy_on_fashion_mnist(demo: Path) -> None:
    document = report(demo)
    assert document["state"] == "done"
    assert document["emulated"] is True
    assert document["validation_accuracy"] >= 0.85


def test_every_sample_is_trained_on_once_an_epoch(demo: Path) -> None:
    document = report(demo)
    assert document["epochs"] == yaml.safe_load((demo / "job.yaml").read_text())["recipe"]["epochs"]
    assert document["samples"] == 60_000 * document["epochs"]
    assert sum(rank["num_public"] + rank["num_private"] for rank in document["ranks"]) == 60_000
    assert [rank["num_private"] for rank in document["ranks"]] == [0, 4286, 4285]


def test_all_ranks_hold_identical_weights_at_every_epochs_end(demo: Path) -> None:
    document = report(demo)
    hashes: dict[int, set[str]] = {}
    for line in (Path(document["path"]) / "events.jsonl").read_text().splitlines():
        event = json.loads(json.loads(line)["line"].removeprefix("@csdctl "))
        if event["event"] == "EpochEnd":
            hashes.setdefault(event["epoch"], set()).add((event["rank"], event["weights_hash"]))
    assert sorted(hashes) == list(range(1, document["epochs"] + 1))
    for found in hashes.values():
        assert {rank for rank, _ in found} == {0, 1, 2}
        assert len({digest for _, digest in found}) == 1
    assert document["identical_weights"] is True


def test_slow_nodes_get_smaller_batches_than_the_host(demo: Path) -> None:
    sizes = {rank["node"]: rank["batch_size"] for rank in plan(demo)["ranks"]}
    assert max(sizes["csd0"], sizes["csd1"]) < sizes["host"]


def test_run_directory_has_checkpoints_and_a_model_that_keras_loads(demo: Path) -> None:
    document = report(demo)
    run = Path(document["path"])
    assert 3 <= len(list((run / "checkpoints").glob("*.npz"))) <= 4  # the newest, and the best
    assert (run / "best.keras").exists()
    program = (
        "import sys, keras, numpy as np\n"
        "model = keras.models.load_model(sys.argv[1], compile=False)\n"
        "images, labels = np.load(sys.argv[2]), np.load(sys.argv[3])\n"
        "found = model.predict(images / np.float32(255), batch_size=500, verbose=0).argmax(-1)\n"
        "print(float((found == labels).mean()))\n"
    )
    arguments = [
        run / "model.keras",
        demo / "data/validation/images.npy",
        demo / "data/validation/labels.npy",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(document["validation_accuracy"], abs=1e-3)


def test_private_samples_are_on_their_own_node_only(demo: Path) -> None:
    homes = {name: demo / ".csdctl/emulated/nodes" / name / "home" for name in ("csd0", "csd1")}
    for name, home in homes.items():
        sample = np.load(home / "private" / "images.npy", mmap_mode="r")[0].tobytes()
        elsewhere = [other for other in homes if other != name]
        places = [demo / "data", *(demo / ".csdctl" / part for part in ("objects", "shards", "data", "runs"))]
        places += [homes[other] for other in elsewhere]
        for place in places:
            for path in place.rglob("*"):
                assert not (path.is_file() and sample in path.read_bytes()), (
                    f"{name}'s private sample in {path}"
                )


def test_second_deploy_sends_nothing(demo: Path) -> None:
    done = csdctl(demo, "deploy", "--json")
    assert done.returncode == 0, done.stderr
    nodes = json.loads(done.stdout)["nodes"]
    assert set(nodes) == {"csd0", "csd1"}
    for delivery in nodes.values():
        assert delivery["num_sent"] == delivery["bytes_sent"] == 0
        assert delivery["num_present"] > 0


def test_discover_finds_the_limits_of_emulated_nodes(demo: Path) -> None:
    document = json.loads(csdctl(demo, "discover", "--json").stdout)
    machines = {machine["name"]: machine for machine in document["machines"]}
    assert machines["csd0"]["cpu_limit"] == 0.25
    assert machines["csd0"]["mpi_version"] == "5.0.11"
    assert machines["host"]["tensorflow_version"]


@pytest.fixture(scope="module")
def expected_hash(demo: Path) -> str:
    """The hash of the final weights of a short undisturbed run."""
    remove_cpu_limits(demo)
    done = csdctl(demo, "train", *SHORT_RUN, "--no-rebalance")
    assert done.returncode == 0, done.stdout + done.stderr
    return hash_at_the_end(max((demo / ".csdctl" / "runs").iterdir()))


@pytest.mark.fault(45)
@pytest.mark.fault(48)
def test_run_continues_bit_identically_each_time_mpi_or_the_hosts_rank_breaks(
    demo: Path, expected_hash: str
) -> None:
    """An MPI daemon is killed, in the next group mpirun, and in the third the host's rank.

    That rank is restarted, and goes on from its step file; the nodes take over its state, not it theirs.
    """
    process, run = start_training(demo, "--no-rebalance")
    kill_daemon("csd1")(demo, run)
    wait_until_regrouped(process, run, 2)
    kill_mpirun(demo, run)
    wait_until_regrouped(process, run, 3)
    assert events_of(run, "NodeLost") == []
    kill_host_rank(demo, run)
    output, _ = communicate(process, demo)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert nothing_is_left(demo, run)
    assert [event["node"] for event in events_of(run, "NodeLost")] == ["host"]
    for generation in (2, 3, 4):
        assert len(resumed_from(run, generation)["batch_sizes"]) == NUM_NODES + 1
    assert hash_at_the_end(run) == expected_hash


@pytest.mark.fault(44)
def test_run_continues_without_a_killed_rank(demo: Path) -> None:
    process, run = start_training(demo)
    kill_rank("csd1")(demo, run)
    output, _ = communicate(process, demo)
    assert process.returncode == 0, output
    assert "csd1 is lost" in output
    assert "private samples are not read" in output
    assert "Traceback" not in output
    assert nothing_is_left(demo, run)
    assert [event["node"] for event in events_of(run, "NodeLost")] == ["csd1"]
    assert len(resumed_from(run)["batch_sizes"]) == NUM_NODES
    assert {event["steps"] for event in events_of(run, "Finished")} == {STEPS}
    hash_at_the_end(run)
    document = json.loads(csdctl(demo, "report", run.name, "--json").stdout)
    assert document["state"] == "done"
    assert document["lost_nodes"] == ["csd1"]


@pytest.mark.thorough("attacks/test_hostile_node.py::test_failed_run_leaves_nothing_in_memory_and_resumes")
def test_run_that_lost_too_many_nodes_ends_and_says_how_it_is_resumed(demo: Path) -> None:
    process, run = start_training(demo, "--min-nodes", str(NUM_NODES))
    kill_rank("csd1")(demo, run)
    output, _ = communicate(process, demo)
    assert process.returncode == 1, output
    assert "csd1" in output
    assert f"--resume {run.name}" in output
    assert "Traceback" not in output
    assert nothing_is_left(demo, run)
    assert state_of(demo, run) == "failed"


@pytest.mark.fault(23)
@pytest.mark.fault(24)
def test_run_that_is_stopped_and_then_killed_resumes_bit_identically(demo: Path, expected_hash: str) -> None:
    """Ctrl-C ends it; resumed, csdctl is killed; resumed again, it has the weights of an undisturbed run."""
    process, run = start_training(demo, "--no-rebalance")
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, demo)
    assert process.returncode == 130, output
    assert f"csdctl train --resume {run.name}" in output
    assert "Traceback" not in output
    assert nothing_is_left(demo, run)
    stopped = {event["steps"] for event in events_of(run, "Finished")}
    assert len(stopped) == 1
    assert stopped.pop() < STEPS
    assert state_of(demo, run) == "stopped"

    process = resume_training(demo, run, "--no-rebalance", "--resume", "latest")
    process.kill()
    communicate(process, demo)
    assert nothing_is_left(demo, run)
    seen = max(event["step"] for event in events_of(run, "Progress"))
    done = csdctl(demo, "train", *SHORT_RUN[2:], "--no-rebalance", "--resume", run.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert events_of(run, "Joined")[-1]["step"] >= seen
    last = events_of(run, "Finished")[-NUM_NODES - 1 :]
    assert {event["steps"] for event in last} == {STEPS}
    assert {event["weights_hash"] for event in last} == {expected_hash}


def state_of(directory: Path, run: Path) -> str:
    return str(json.loads(csdctl(directory, "report", run.name, "--json").stdout)["state"])


@pytest.mark.fault(57)
def test_nan_loss_ends_the_run_with_a_remedy(demo: Path) -> None:
    job_with(demo, "wild.yaml", learning_rate="1e12")
    done = csdctl(demo, "train", "wild.yaml", "--batch-size", "16", "--skip-doctor", "--exclude", "csd1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "recipe.learning_rate" in done.stderr
    assert "epoch 1, step" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert nothing_is_left(demo, max((demo / ".csdctl" / "runs").iterdir()))


def test_verify_proves_the_gradient_on_this_fleet(demo: Path) -> None:
    done = csdctl(demo, "verify", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "csdctl.verify/1"
    assert found["by_parts"] <= 1e-6
    assert found["one_batch"]["difference"] <= 1e-6
    assert found["is_equal"]
    assert found["verdict"] == "equal: as near as one process is to itself in float32"
    assert set(found["ranks"]) == {"host", *(f"csd{number}" for number in range(NUM_NODES))}


@pytest.mark.fault(37)
def test_plan_is_refused_after_the_job_has_changed(demo: Path) -> None:
    job_with(demo, "changed.yaml", learning_rate="0.5")
    (demo / ".csdctl/plans/changed.yaml").write_text((demo / ".csdctl/plans/job.yaml").read_text())
    done = csdctl(demo, "train", "changed.yaml")
    assert done.returncode == 2
    assert "changed since tuning" in done.stderr


def test_unknown_key_is_named_with_line_and_nearest_key(demo: Path) -> None:
    text = (demo / "job.yaml").read_text().replace("warmup_epochs", "warmup_epoch")
    (demo / "typo.yaml").write_text(text)
    line = 1 + text[: text.index("warmup_epoch")].count("\n")
    done = csdctl(demo, "train", "typo.yaml")
    assert done.returncode == 2
    assert (
        f"typo.yaml:{line}: unknown key `recipe.warmup_epoch`, did you mean `warmup_epochs`?" in done.stderr
    )


def test_missing_model_file_is_named(demo: Path) -> None:
    job_with(demo, "missing.yaml", model="nowhere.py:build")
    done = csdctl(demo, "tune", "missing.yaml")
    assert done.returncode == 2
    assert "nowhere.py does not exist" in done.stderr


def test_model_with_too_few_outputs_is_refused_before_anything_starts(demo: Path) -> None:
    (demo / "five.py").write_text((demo / "fashion_cnn.py").read_text().replace("Dense(10", "Dense(5"))
    job_with(demo, "five.yaml", model="five.py:build")
    done = csdctl(demo, "tune", "five.yaml")
    assert done.returncode == 2
    assert "has 5 outputs, the public data has labels up to 9" in done.stderr


def test_node_that_is_down_is_named_and_can_be_excluded(demo: Path) -> None:
    fleet = yaml.safe_load((demo / "fleet.yaml").read_text())
    fleet["nodes"][1]["port"] = 1
    for key in ("key",):
        fleet["defaults"][key] = str((demo / fleet["defaults"][key]).resolve())
    (demo / "down.yaml").write_text(yaml.safe_dump(fleet))
    found = csdctl(demo, "discover", "--fleet", "down.yaml")
    assert found.returncode == 3
    refused = csdctl(demo, "train", "--fleet", "down.yaml")
    assert refused.returncode == 1
    for output in (found.stderr + found.stdout, refused.stderr):
        assert "csd1" in output
    assert "--exclude csd1" in refused.stderr
    options = ("--exclude", "csd1", "--batch-size", "16", "--max-steps", "3", "--skip-doctor", "--json")
    done = csdctl(demo, "train", "--fleet", "down.yaml", *options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["schema"] == "csdctl.report/1"
    assert lines[-1]["num_ranks"] == 2


def test_fleet_with_no_node_reachable_has_an_exit_code_of_its_own(demo: Path) -> None:
    fleet = yaml.safe_load((demo / "fleet.yaml").read_text())
    for node in fleet["nodes"]:
        node["port"] = 1
    (demo / "gone.yaml").write_text(yaml.safe_dump(fleet))
    for command in (["discover"], ["tune"], ["train"]):
        assert csdctl(demo, *command, "--fleet", "gone.yaml").returncode == 4
