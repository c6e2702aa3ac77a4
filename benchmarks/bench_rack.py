"""A host and 36 emulated nodes at 10% of a core on this machine: seconds from `tune` to the report.

    make bench ARGS="-k rack"

The network is tiny (530 parameters), so that starting and supervising 37 ranks is what takes time. Prints
what the plan leaves out, and by how much it is faster. Asserts only that the run reached its end.
"""

import time
from pathlib import Path

import numpy as np

from benchmarks.running import csdctl, emulated_fleet

NUM_NODES, CPU, STEPS, NUM_IMAGES = 36, 0.10, 300, 40_000
MODEL = """\
import keras
from keras import layers


def build():
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(10, 3, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
"""
JOB = """\
model: tiny.py:build
data: {public: {path: tiny.npz}}
recipe: {epochs: 1000, learning_rate: 0.01, reference_batch: 512}
"""


def test_rack_of_37_ranks(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB)
    generator = np.random.default_rng(1)
    images = generator.integers(0, 256, (NUM_IMAGES, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "tiny.npz", x=images, y=generator.integers(0, 10, NUM_IMAGES).astype(np.int32))
    with emulated_fleet(tmp_path, NUM_NODES, CPU):
        csdctl(tmp_path, "discover")
        began = time.monotonic()
        plan = csdctl(tmp_path, "tune")[-1]
        print(f"\ntuned after {time.monotonic() - began:.1f} s")
        report = csdctl(tmp_path, "train", "--max-steps", str(STEPS))[-1]
        print(f"trained after {time.monotonic() - began:.1f} s: {report['samples_per_s']:,.0f} samples/s")
        csdctl(tmp_path, "report", "latest")
        print(f"reported after {time.monotonic() - began:.1f} s")
        predicted = plan["predicted"]
        print(f"{len(plan['ranks'])} ranks, left out {len(plan['left_out'])}, {predicted}")
        assert report["steps"] == STEPS
