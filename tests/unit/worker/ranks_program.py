"""Run by mpirun in test_exact_gradient.py: sums the ranks' vectors for several ways to share the samples.

Saves, for each way, what every rank ended with; rank 0 adds what one process gives for all samples.
"""

import json
import sys
from pathlib import Path

import numpy as np

from csdctl.worker.backend import load_backend
from csdctl.worker.collective import MpiRanks, merge_batch_norm
from csdctl.worker.contract import Recipe
from csdctl.worker.model import load
from csdctl.worker.step import Step

directory = Path(sys.argv[1])
ways: list[list[int]] = json.loads(sys.argv[2])
ranks = MpiRanks()
tf, keras = load_backend(threads=1)
keras.utils.set_random_seed(1)
images, labels = np.load(directory / "images.npy"), np.load(directory / "labels.npy")
recipe = Recipe(optimizer="sgd", optimizer_args={"momentum": 0.9}, learning_rate=0.1)


def load_step() -> Step:
    model = load(directory / "architecture.json", directory / "weights.npz", keras)
    return Step(model, recipe, (images, labels), tf, keras)


if ranks.rank == 0:
    np.save(directory / "alone.npy", load_step().local(images, labels))
for number, counts in enumerate(ways):
    start = sum(counts[: ranks.rank])
    mine = slice(start, start + counts[ranks.rank])
    step = load_step()
    local = step.local(images[mine], labels[mine])
    total = ranks.sum(local)
    np.savez(directory / f"way-{number}-rank-{ranks.rank}.npz", local=local, total=total)
    step.apply(total)
    merge_batch_norm(step.model, counts[ranks.rank], ranks, keras)
    np.savez(directory / f"way-{number}-weights-{ranks.rank}.npz", *step.model.get_weights())
