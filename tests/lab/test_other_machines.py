"""Environments, start-up files, login shells and homes of other people's machines change no result."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from csdctl.transport.commands import find_state_directory
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import Project
from tests.patience import communicate, eventually

pytestmark = [pytest.mark.lab, pytest.mark.needs("tcsh", "fish")]

VARIABLES = {
    "PYTHONPATH": "/root/evil",
    "PYTHONHOME": "/nonexistent",
    "PYTHONIOENCODING": "utf-16",
    "PYTHONINSPECT": "1",
    "PYTHONWARNINGS": "error",
    "LD_LIBRARY_PATH": "/root/evil",
    "OMPI_MCA_btl_tcp_if_exclude": "csd",
    "PRTE_MCA_prte_if_exclude": "csd",
    "PMIX_MCA_gds": "bogus",
}
PATCH = """\
import keras.layers
original = keras.layers.Dense.call
keras.layers.Dense.call = lambda self, *args, **more: 1.5 * original(self, *args, **more)
"""
KERAS_FILE = {"epsilon": 0.01, "image_data_format": "channels_first", "floatx": "float16"}
MODEL = """\
import keras


class Shrink(keras.layers.Layer):
    def call(self, images):
        return keras.ops.image.resize(images, (4, 8))


def build():
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), Shrink(), layers.Flatten(), layers.Dense(4), layers.Softmax()]
    )
    model.compile("sgd", "poisson")
    return model
"""
JOB = """\
model: own.py:build
code: [own.py]
data: {public: {path: public.npz}, private: {path: /srv/private.npz}}
recipe: {epochs: 1, learning_rate: 0.1, reference_batch: 16}
"""


def save_samples(path: Path, seed: int, num_samples: int) -> None:
    """Write samples to a file whose size and time do not depend on them."""
    draw = np.random.default_rng(seed)
    images = draw.random((num_samples, 8, 8, 1), dtype=np.float32)
    np.savez(path, images=images, labels=np.eye(4, dtype=np.float32)[draw.integers(0, 4, num_samples)])
    os.utime(path, (1, 1))


@contextmanager
def odd_machines(lab: Lab) -> Iterator[tuple[LabNode, LabNode]]:
    """Two machines with one home, and each with private data of its own at one path."""
    start_up = "".join(f"setenv {name} {value}\n" for name, value in VARIABLES.items()) + "echo Welcome\n"
    with (
        lab.node("odd", 70, login_shell="/bin/tcsh", start_up=start_up) as odd,
        lab.node("twin", 71, login_shell="/usr/bin/fish", home="odd", start_up=start_up) as twin,
    ):
        evil, keras_file = odd.home / "evil", odd.home / ".keras" / "keras.json"
        evil.mkdir()
        (evil / "sitecustomize.py").write_text(PATCH)
        (evil / "queue.py").write_text("raise RuntimeError('not the library')\n")
        (evil / "libstdc++.so.6").write_text("")
        keras_file.parent.mkdir()
        keras_file.write_text(json.dumps(KERAS_FILE))
        for seed, node in enumerate((odd, twin)):
            node.run("mount", "-t", "tmpfs", "tmpfs", "/srv")
            save_samples(node.root / "srv" / "private.npz", seed, 24)
        yield odd, twin


def test_environments_shells_and_a_shared_home_change_no_result(lab: Lab, project: Project) -> None:
    save_samples(project.path / "public.npz", 7, 64)
    (project.path / "own.py").write_text(MODEL)
    (project.path / "job.yaml").write_text(JOB)
    evil = project.path / "evil"
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(PATCH)
    hostile = {"PYTHONPATH": str(evil), "PYTHONWARNINGS": "error", "OMPI_MCA_pml": "bogus"}
    with odd_machines(lab) as (odd, twin):
        project.use(odd, twin, network="10.77.0.0/24")
        done = project.succeed("discover", environment=hostile)
        assert "PYTHONPATH" in done.stdout
        assert "OMPI_MCA_btl_tcp_if_exclude" in done.stdout
        # It computes the gradient of all samples in one process, by code of its own.
        project.succeed("verify", "--batch-size", "8", environment=hostile)
        arguments = ("train", "--batch-size", "8", "--max-steps", "4")
        for node in ("odd", "twin"):  # one after the other: the second must not read what the first prepared
            project.succeed(*arguments, "--limit", node, environment=hostile)
        prepared = [state_of(node) / ".csdctl" / "data" for node in (odd, twin)]
        assert len({path.read_bytes() for place in prepared for path in place.rglob("images.npy")}) == 2
        assert not (odd.home / ".csdctl" / "objects").exists()


def state_of(node: LabNode) -> Path:
    return (
        node.home
        / ".csdctl"
        / "machines"
        / find_state_directory().name.replace(os.uname().nodename, node.name)
    )


def test_one_machine_with_two_names_is_refused(lab: Lab, project: Project, job: Path) -> None:
    shutil.copytree(job.parent, project.path, dirs_exist_ok=True)
    node = lab.near[0]
    project.use(node)
    text = (project.path / "fleet.yaml").read_text()
    again = text.partition("nodes:\n")[2].replace("name: csd0", "name: again")
    (project.path / "fleet.yaml").write_text(text + again)
    said = project.refuse("prepare", code=2)
    assert "are one machine, with one user and home" in said


@pytest.mark.thorough
@pytest.mark.fault(63)
def test_three_nodes_and_the_host_work_in_one_home(lab: Lab, project: Project) -> None:
    """Two projects at once, each on nodes of its own, with the projects in the home that all share."""
    names = ("one", "two", "three")
    with (
        lab.node("one", 72) as first_node,
        lab.node("two", 73, home="one") as two,
        lab.node("three", 74, home="one") as three,
    ):
        nodes = (first_node, two, three)
        for seed, node in enumerate(nodes):
            node.run("mount", "-t", "tmpfs", "tmpfs", "/srv")
            save_samples(node.root / "srv" / "private.npz", seed, 24)
        projects = [Project(lab, first_node.directory / "home" / name) for name in ("first", "second")]
        for shared in projects:
            shared.path.mkdir()
            save_samples(shared.path / "public.npz", 7, 64)
            (shared.path / "own.py").write_text(MODEL)
            (shared.path / "job.yaml").write_text(JOB.replace("epochs: 1", "epochs: 3"))
            shared.use(*nodes, network="10.77.0.0/24")
        first, second = projects

        first.succeed("prepare")
        prepared = [{path.read_bytes() for path in state_of(node).rglob("images.npy")} for node in nodes]
        assert len(set.union(*prepared)) == len(names)
        first.succeed("tune", "--limit", "one,two")
        running = first.start("train", "--limit", "one,two", "--max-steps", "300")
        assert eventually(lambda: [*(first.path / ".csdctl" / "runs").glob("*/events.jsonl")])
        second.succeed("train", "--limit", "three", "--batch-size", "8")
        stdout, stderr = communicate(running, first.path)
        assert running.returncode == 0, stdout + stderr
        first.succeed("predict", "latest", "--limit", "one,two", "--output", "predictions.csv")
        assert "shared with" in first.succeed("report", "--privacy").stdout
        first.succeed("clean", "--everything", "--yes", "--limit", "one")
        assert not state_of(first_node).exists()
        assert [*state_of(two).rglob("images.npy")]
        assert [*(first.path / ".csdctl" / "runs").glob("*/model.keras")]
        second.succeed("train", "--limit", "three", "--batch-size", "8", "--max-steps", "2")
