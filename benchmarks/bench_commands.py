"""Whole commands on slow nodes in the lab, most of which was the start of TensorFlow.

    make bench ARGS="-k commands"

A host with one thread: with four nodes that have 22% of a core, with two of 40%, and in seven ranks of three
classes. Seconds of each command as a whole, after `prepare`.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.slow_nodes import MOBILENET, SMALL, Work, write_fleet, write_job
from tests.lab.lab import Lab
from tests.lab.project import Project

NASNET = Work(
    "model: keras.applications:NASNetMobile\n"
    "model_args: {input_shape: [64, 64, 3], classes: 200, weights: null}\n",
    (64, 64, 3),
    200,
    learning_rate=0.01,
    reference_batch=256,
)
TRAIN = ("train", "--skip-doctor", "--max-steps")
FLEETS: dict[str, tuple[Sequence[float], dict[str, Work], Sequence[Sequence[str]]]] = {
    "four": (
        [0.22] * 4,
        {"small": SMALL, "mobilenet": MOBILENET},
        [(*TRAIN, "3", "--batch-size", "8"), ("tune", "--fresh"), ("tune", "--method", "stannis", "--fresh")],
    ),
    "seven": (
        [0.5, 0.5, 0.22, 0.22, 0.1, 0.1],
        {"mobilenet": MOBILENET},
        [("tune", "--fresh"), (*TRAIN, "11"), ("verify",)],
    ),
    "nasnet": (
        [0.4] * 2,
        {"nasnet": NASNET},
        [("verify",), ("tune", "--fresh"), (*TRAIN, "5"), ("report", "latest")],
    ),
}


@pytest.mark.parametrize("fleet", FLEETS)
def test_commands(lab: Lab, tmp_path: Path, fleet: str) -> None:
    shares, works, commands = FLEETS[fleet]
    project = Project(lab, tmp_path)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(lab.node(f"{fleet}{number}", 80 + number, cpu=cpu))
            for number, cpu in enumerate(shares)
        ]
        write_fleet(project, nodes)
        project.trust(*nodes)
        for name, work in works.items():
            write_job(project, name, work, 2_000)
            total_s = measure(project, "prepare", f"{name}.yaml")
            for command in commands:
                job = () if command[0] == "report" else (f"{name}.yaml",)
                total_s += measure(project, command[0], *job, *command[1:])
            print(f"{name}: {total_s:.1f} s in all")


def measure(project: Project, *command: str) -> float:
    began = time.monotonic()
    done = project.csdctl(*command)
    elapsed_s = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"csdctl {' '.join(command)}: {elapsed_s:.1f} s", flush=True)
    return elapsed_s
