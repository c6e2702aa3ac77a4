"""Program run by test_verify.py: the vectors of all ranks of rows, computed as on other machines.

    other_ranks_program.py DIRECTORY ROW…

With other threads and kernels than those of the test, so that vectors are rounded otherwise. For each row,
saves each rank's vector of the verified step, and wrong ones of rank 1.
"""

import sys
from pathlib import Path

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.worker.tasks.verify import MAX_MOVE, draw_samples, move_weights
from tests.unit.worker.tasks.verified_models import ROWS, SEED, SIZES, WRONG, make_step

_, keras = load_backend(Runtime(threads=2, onednn=False))


def save_vectors(name: str, path: Path) -> None:
    row = ROWS[name]
    step = make_step(row, keras)
    step.values = move_weights(step, np.random.default_rng(SEED), MAX_MOVE)

    def vector(rank: int, samples: np.ndarray, labels: np.ndarray) -> np.ndarray:
        step.position = 0, rank
        return np.array(step.local(samples, labels))

    def draw(rank: int, seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
        kind = {"example": (row.samples, row.labels), "info": step.info, "ranges": row.ranges}
        return draw_samples(rank, SIZES[rank], seed=seed, **kind)

    wrong = draw(WRONG)
    first_again = np.r_[0, 0, 2 : SIZES[WRONG]]
    vectors = {f"rank {rank}": vector(rank, *draw(rank)) for rank in range(len(SIZES))}
    vectors["one sample twice"] = vector(WRONG, *(column[first_again] for column in wrong))
    vectors["one sample more"] = vector(WRONG, *(np.r_[column[:1], column] for column in wrong))
    vectors["another rank's random states"] = vector(0, *wrong)
    vectors["stale"] = vector(WRONG, *draw(WRONG, SEED + 1))
    np.savez(path, **vectors)


for name in sys.argv[2:]:
    save_vectors(name, Path(sys.argv[1]) / f"{name}.npz")
