"""Program run by mpirun in test_exact_gradient.py: sums the ranks' vectors for several divisions of samples.

For the models in several directories. Saves the results of every rank for each division; rank 0 also saves
the results of one process for all samples.
"""

import json
import sys
from pathlib import Path

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.model import load
from csdctl.worker.compute.step import Step
from csdctl.worker.group.collective import choose_collective
from csdctl.worker.group.mpi import init_mpi
from csdctl.worker.protocol.recipe import Recipe

divisions: list[list[int]] = json.loads(sys.argv[1])
world = init_mpi()
tf, keras = load_backend()
RECIPE = Recipe()
"""Loss and optimizer are part of the models."""


def sum_all_divisions(directory: Path) -> None:
    """Save the results of the model in `directory`, for all divisions."""
    keras.utils.set_random_seed(1)
    images, labels = np.load(directory / "images.npy"), np.load(directory / "labels.npy")

    def load_step(weight: float = 1.0) -> Step:
        model = load(directory / "architecture.json", directory / "weights.npz", keras)
        return Step(model, RECIPE, (images, labels), tf, keras, weight=weight)

    if world.rank == 0:
        alone = load_step()
        np.save(directory / "alone.npy", alone.local(images, labels))
        some = slice(0, 10)
        np.save(directory / "once.npy", load_step().local(images[some], labels[some]))
        doubled = [np.concatenate([array[some], array[some]]) for array in (images, labels)]
        np.save(directory / "twice.npy", load_step(weight=0.5).local(*doubled))
        alone.apply(np.load(directory / "alone.npy"))
        np.savez(directory / "alone-weights.npz", *alone.model.get_weights())
    for number, counts in enumerate(divisions):
        start = sum(counts[: world.rank])
        mine = slice(start, start + counts[world.rank])
        step = load_step()
        local = np.array(step.local(images[mine], labels[mine]))
        total = np.zeros_like(local)
        choose_collective(world, local, total, "star", rounds=1)
        np.savez(directory / f"division-{number}-rank-{world.rank}.npz", local=local, total=total)
        step.apply(total)
        np.savez(directory / f"division-{number}-weights-{world.rank}.npz", *step.model.get_weights())


for path in sys.argv[2:]:
    sum_all_divisions(Path(path))
