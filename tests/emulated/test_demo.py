"""`csdctl demo` as a user runs it: Fashion-MNIST on an emulated host and two nodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.emulated.running import csdctl

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_NODES = 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo's directory after `csdctl demo --keep`; the fleet runs until the module ends."""
    directory = tmp_path_factory.mktemp("main") / "demo with a space"
    done = csdctl(
        directory.parent, "demo", "--keep", "--nodes", str(NUM_NODES), "--directory", directory.name
    )
    try:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (directory / "demo.log").write_text(done.stdout + done.stderr)
        yield directory
    finally:
        csdctl(directory, "emulate", "down")


def report(directory: Path) -> dict[str, Any]:
    done = csdctl(directory, "report", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


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


def test_discover_finds_the_limits_of_emulated_nodes(demo: Path) -> None:
    document = json.loads(csdctl(demo, "discover", "--json").stdout)
    machines = {machine["name"]: machine for machine in document["machines"]}
    assert machines["csd0"]["cpu_limit"] == 0.25
    assert machines["csd0"]["mpi_version"] == "5.0.11"
    assert machines["host"]["tensorflow_version"]
