"""Jobs and fleets for benchmarks in the lab: a host with one thread, slow nodes, and random images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.running import EXAMPLES
from tests.lab.machines import LabNode
from tests.lab.project import Project

DEMO_MODEL = (EXAMPLES / "fashion_mnist" / "fashion_cnn.py").read_text()
CPU = 0.22
"""Share of a core that a slow node has."""
NETWORK = "10.77.0.0/23"


@dataclass(frozen=True)
class Work:
    """A model, and the shape of images to train it on."""

    model: str
    """The lines of the job file for the model."""
    shape: tuple[int, ...]
    num_classes: int
    learning_rate: float
    reference_batch: int
    code: str = ""
    """Content of model.py."""


MOBILENET = Work(
    "model: keras.applications:MobileNetV2\n"
    "model_args: {input_shape: [64, 64, 3], classes: 200, weights: null}\n",
    (64, 64, 3),
    200,
    learning_rate=0.01,
    reference_batch=256,
)
"""2.48 million trainable parameters, with many operations for each."""
SMALL = Work("model: small.py:build\n", (28, 28, 1), 10, 0.001, 128, DEMO_MODEL)
"""The demo's network: steps of a tenth of a second, 0.5 MB to sum."""
DENSE = Work(
    "model: dense.py:build\n",
    (28, 28, 1),
    10,
    0.001,
    512,
    """\
import keras
from keras import layers


def build():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(2048, activation="relu"),
            layers.Dense(2048, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
""",
)
"""5.8 million parameters with few operations for each: the sums of 23 MB matter. The global batch is
large enough for nodes to gain more than their sums cost."""


def write_fleet(project: Project, nodes: Sequence[LabNode], name: str = "fleet.yaml") -> None:
    """Write a fleet file for `nodes` and a host with one thread; their host keys must be accepted already."""
    project.write_fleet(*nodes, name=name, network=NETWORK, host={"threads": 1})


def write_job(project: Project, name: str, work: Work, num_images: int) -> None:
    """Write NAME.yaml, its model, and random images for it."""
    if work.code:
        (project.path / f"{name}.py").write_text(work.code)
    recipe = (
        f"epochs: 1000, learning_rate: {work.learning_rate}, "
        f"reference_batch: {work.reference_batch}, momentum: 0.9"
    )
    (project.path / f"{name}.yaml").write_text(
        f"{work.model}data: {{public: {{path: {name}}}}}\nrecipe: {{{recipe}}}\n"
    )
    _write_images(project.path / name, (num_images, *work.shape), work.num_classes)


def _write_images(directory: Path, shape: tuple[int, ...], num_classes: int) -> None:
    directory.mkdir()
    generator = np.random.default_rng(7)
    np.save(directory / "images.npy", generator.integers(0, 256, shape, np.uint8))
    np.save(directory / "labels.npy", generator.integers(0, num_classes, shape[0]).astype(np.int32))
